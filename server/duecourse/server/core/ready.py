"""`Queue`: the tasks of one queue that are due and wait for a worker, in the order in which they are served.

The highest effective priority goes first: it grows by one for each `AGEING` that the oldest task of the level has
waited, of the types that are asked for. Within a level the fairness keys share by start-time fair queueing; within a
key the earlier (due time, sequence) goes first.

Start-time fair queueing: Goyal, Vin, Cheng, SIGCOMM 1996; every task counts as one unit of work. A key that had nothing
to do does not save up: it comes back at the virtual time of now, which grows by one in a round of all keys, so that
ever new keys do not put off the others for ever.

Tasks are never taken out in the middle: one that is no longer ready is passed over, or pruned.
"""

import heapq

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import Task

AGEING: Micros = 30 * bounds.SECOND

_RANKING: Micros = 100 * bounds.MILLISECOND
"""How long the order of a queue's priorities stands: ageing is slow."""

_Ready = tuple[Micros, int, int, Task]
"""Due time, sequence, shard, task."""


class _Line:
    """The ready tasks of one lane; ones that are no longer ready are passed over."""

    __slots__ = ("heap",)

    def __init__(self) -> None:
        self.heap: list[_Ready] = []

    def first(self) -> _Ready | None:
        """Return the first entry that is still ready, leaving it there."""
        heap = self.heap
        while heap:
            entry = heap[0]
            task = entry[3]
            if task.is_ready and task.progress.due_time == entry[0]:
                return entry
            heapq.heappop(heap)
        return None

    def prune(self) -> int:
        """Drop what is no longer ready; return how much is left."""
        self.heap = [entry for entry in self.heap if entry[3].is_ready and entry[3].progress.due_time == entry[0]]
        heapq.heapify(self.heap)
        return len(self.heap)


class _Share:
    """A fairness key within a level: its lines by task type, and the virtual time at which it is next in turn."""

    __slots__ = ("lines", "virtual_time")

    def __init__(self, virtual_time: float) -> None:
        self.virtual_time = virtual_time
        self.lines: dict[str, _Line] = {}


class _Level:
    """The ready tasks of one priority, by fairness key."""

    __slots__ = ("ages", "orders", "shares", "virtual_time")

    def __init__(self) -> None:
        self.shares: dict[str, _Share] = {}
        self.ages: dict[str, list[tuple[Micros, str]]] = {}
        """By task type: a heap of (due time, fairness key); of each line an entry no later than its first task."""
        self.orders: dict[str, list[tuple[float, str]]] = {}
        """By task type: a heap of (virtual time, fairness key), an entry for each line; the time may be outdated.

        An empty one stays until it is pruned.
        """
        self.virtual_time = 0.0

    def push(self, task: Task, due_time: Micros) -> None:
        lane = task.lane
        share = self.shares.get(lane.fairness_key)
        if share is None:
            share = self.shares[lane.fairness_key] = _Share(self.virtual_time)
        line = share.lines.get(lane.task_type)
        if line is None:
            line = share.lines[lane.task_type] = _Line()
            order = self.orders.setdefault(lane.task_type, [])
            heapq.heappush(order, (share.virtual_time, lane.fairness_key))
        entry = (due_time, task.sequence, task.shard, task)
        heapq.heappush(line.heap, entry)
        if line.heap[0] is entry:
            heapq.heappush(self.ages.setdefault(lane.task_type, []), (due_time, lane.fairness_key))

    def pop(self, task_types: frozenset[str]) -> Task | None:
        """Take the next task of these types."""
        best: tuple[float, _Ready] | None = None
        served: list[tuple[float, str]] = []
        for task_type, order in self.orders.items():
            if order and task_type in task_types:
                first = self._first(task_type, order)
                if first is not None and (best is None or first < best):
                    best = first
                    served = order
        if best is None:
            return None
        task = best[1][3]
        lane = task.lane
        share = self.shares[lane.fairness_key]
        heapq.heappop(share.lines[lane.task_type].heap)
        now = max(self.virtual_time, share.virtual_time)
        share.virtual_time = now + 1
        self.virtual_time = now + 1 / len(self.shares)
        heapq.heapreplace(served, (share.virtual_time, lane.fairness_key))
        return task

    def oldest(self, task_types: frozenset[str]) -> Micros | None:
        """Return the earliest due time of the level among these types."""
        firsts = (self._oldest(task_type, ages) for task_type, ages in self.ages.items() if task_type in task_types)
        return min((due_time for due_time in firsts if due_time is not None), default=None)

    def count(self, task_types: frozenset[str], most: int) -> int:
        """Count the tasks of these types, at least as far as `most`; some of them may no longer be ready."""
        found = 0
        for share in self.shares.values():
            for task_type, line in share.lines.items():
                if task_type in task_types and line.first() is not None:
                    found += len(line.heap)
                    if found >= most:
                        return found
        return found

    def prune(self) -> int:
        """Drop what is no longer ready; return how much is left."""
        left = 0
        self.orders = {}
        self.ages = {}
        for fairness_key, share in list(self.shares.items()):
            for task_type, line in list(share.lines.items()):
                count = line.prune()
                left += count
                if count:
                    self.orders.setdefault(task_type, []).append((share.virtual_time, fairness_key))
                    self.ages.setdefault(task_type, []).append((line.heap[0][0], fairness_key))
                else:
                    del share.lines[task_type]
            if not share.lines:
                del self.shares[fairness_key]
        for order in self.orders.values():
            heapq.heapify(order)
        for ages in self.ages.values():
            heapq.heapify(ages)
        return left

    def _oldest(self, task_type: str, ages: list[tuple[Micros, str]]) -> Micros | None:
        """Find the due time of the oldest task of a type; each entry that is out of date is put right once."""
        while ages:
            due_time, fairness_key = ages[0]
            share = self.shares.get(fairness_key)
            line = None if share is None else share.lines.get(task_type)
            first = None if line is None else line.first()
            if first is None:
                heapq.heappop(ages)
            elif first[0] != due_time:
                heapq.heapreplace(ages, (first[0], fairness_key))
            else:
                return due_time
        return None

    def _first(self, task_type: str, order: list[tuple[float, str]]) -> tuple[float, _Ready] | None:
        """Find the key in turn for a task type, and its first task; leave the entry at the top."""
        while order:
            virtual_time, fairness_key = order[0]
            share = self.shares[fairness_key]
            entry = share.lines[task_type].first()
            if entry is None:
                heapq.heappop(order)
                del share.lines[task_type]
                if not share.lines:
                    del self.shares[fairness_key]
            elif virtual_time < share.virtual_time:
                heapq.heapreplace(order, (share.virtual_time, fairness_key))
            else:
                return virtual_time, entry
        return None


class Queue:
    """See the module's docstring. Its virtual time is its owner's affair."""

    __slots__ = ("_levels", "_rank_again", "_ranked", "virtual_time")

    def __init__(self, virtual_time: float) -> None:
        self.virtual_time = virtual_time
        self._levels: dict[int, _Level] = {}
        self._ranked: dict[frozenset[str], list[_Level]] = {}
        """By task types: the levels in the order in which they are served, for a while."""
        self._rank_again: Micros = 0

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing is left in it, as far as `pop` has looked."""
        return not any(level.shares for level in self._levels.values())

    def push(self, task: Task) -> None:
        """Take in a task that is ready."""
        due_time = task.progress.due_time
        assert due_time is not None, "an ended task is not ready"
        level = self._levels.get(task.lane.priority)
        if level is None:
            level = self._levels[task.lane.priority] = _Level()
            self._ranked.clear()
        level.push(task, due_time)

    def pop(self, task_types: frozenset[str], now: Micros) -> Task | None:
        """Take the next task of these types."""
        levels = self._levels.values()
        for level in levels if len(levels) == 1 else self._by_urgency(task_types, now):
            task = level.pop(task_types)
            if task is not None:
                return task
        return None

    def count(self, task_types: frozenset[str], most: int) -> int:
        """Count the tasks of these types, up to `most`; some of them may no longer be ready, but not all."""
        found = 0
        for level in self._levels.values():
            found += level.count(task_types, most - found)
            if found >= most:
                return most
        return found

    def prune(self) -> int:
        """Drop what is no longer ready; return how much is left."""
        return sum(level.prune() for level in self._levels.values())

    def _by_urgency(self, task_types: frozenset[str], now: Micros) -> list[_Level]:
        if now >= self._rank_again:
            self._ranked.clear()
            self._rank_again = now + _RANKING
            self._levels = {priority: level for priority, level in self._levels.items() if level.shares}
        ranked = self._ranked.get(task_types)
        if ranked is None:
            urgency = []
            for priority, level in self._levels.items():
                oldest = level.oldest(task_types)
                age = 0 if oldest is None else max(0, now - oldest)
                urgency.append((priority + age / AGEING, priority, level))
            urgency.sort(key=lambda entry: entry[:2], reverse=True)
            ranked = self._ranked[task_types] = [level for _, _, level in urgency]
        return ranked
