"""`Matcher`: which ready task goes to which worker's stream. One for a node, over all its shards.

Order: queues share by start-time fair queueing; within a queue the highest effective priority goes first, which grows
by one for each `AGEING` that the oldest task of the level has waited; within a level the fairness keys share by
start-time fair queueing; within a key the earlier (due time, sequence) goes first. A queue or key that had nothing to
do does not save up: it re-enters at the virtual time of the one served last. Backlog and fresh work are not told apart.

Start-time fair queueing: Goyal, Vin, Cheng, SIGCOMM 1996; every task counts as one unit of work.

Streams with the same queues and task types form a *pool*; within it the stream with the most credit is served first, so
that work spreads evenly. A credit is used up by the match; it comes back only if the grant comes to nothing.
"""

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.lease import Holder
from duecourse.server.core.task import Lane, Task

AGEING: Micros = 30 * bounds.SECOND

_Ready = tuple[Micros, int, int, Task]
_SLACK = 1_024


class _Line:
    """The ready tasks of one lane; ones that are no longer ready are passed over."""

    __slots__ = ("bound", "heap", "task_type")

    def __init__(self, task_type: str) -> None:
        self.task_type = task_type
        self.heap: list[_Ready] = []
        self.bound = _SLACK

    def push(self, task: Task, due_time: Micros) -> None:
        heapq.heappush(self.heap, (due_time, task.sequence, task.shard, task))
        if len(self.heap) > self.bound:
            self.heap = [entry for entry in self.heap if entry[3].is_ready]
            heapq.heapify(self.heap)
            self.bound = 2 * len(self.heap) + _SLACK

    def first(self) -> _Ready | None:
        """Return the first entry that is still ready, leaving it there."""
        heap = self.heap
        while heap:
            entry = heap[0]
            if entry[3].is_ready and entry[3].progress.due_time == entry[0]:
                return entry
            heapq.heappop(heap)
        return None


class _Share:
    """A fairness key within a level: its lines by task type, and its virtual time."""

    __slots__ = ("lines", "virtual_time")

    def __init__(self, virtual_time: float) -> None:
        self.virtual_time = virtual_time
        self.lines: dict[str, _Line] = {}

    def first(self, task_types: frozenset[str]) -> tuple[_Ready, _Line] | None:
        best: tuple[_Ready, _Line] | None = None
        for task_type, line in list(self.lines.items()):
            entry = line.first()
            if entry is None:
                del self.lines[task_type]
            elif task_type in task_types and (best is None or entry < best[0]):
                best = (entry, line)
        return best


class _Level:
    """The ready tasks of one priority in a queue, by fairness key."""

    __slots__ = ("order", "shares", "virtual_time")

    def __init__(self) -> None:
        self.shares: dict[str, _Share] = {}
        self.order: list[tuple[float, str]] = []
        """A heap of (virtual time, fairness key), one entry for each share."""
        self.virtual_time = 0.0

    def push(self, task: Task, due_time: Micros) -> None:
        fairness_key = task.lane.fairness_key
        share = self.shares.get(fairness_key)
        if share is None:
            share = self.shares[fairness_key] = _Share(self.virtual_time)
            heapq.heappush(self.order, (share.virtual_time, fairness_key))
        line = share.lines.get(task.lane.task_type)
        if line is None:
            line = share.lines[task.lane.task_type] = _Line(task.lane.task_type)
        line.push(task, due_time)

    def pop(self, task_types: frozenset[str]) -> Task | None:
        """Take the next task of these types."""
        passed: list[tuple[float, str]] = []
        task = None
        while self.order and task is None:
            virtual_time, fairness_key = self.order[0]
            share = self.shares[fairness_key]
            found = share.first(task_types)
            if found is not None:
                task = found[0][3]
                heapq.heappop(found[1].heap)
                self.virtual_time = max(self.virtual_time, virtual_time)
                share.virtual_time = self.virtual_time + 1
                heapq.heapreplace(self.order, (share.virtual_time, fairness_key))
            elif share.lines:
                passed.append(heapq.heappop(self.order))
            else:
                heapq.heappop(self.order)
                del self.shares[fairness_key]
        for entry in passed:
            heapq.heappush(self.order, entry)
        return task

    def oldest(self) -> Micros | None:
        """Return the earliest due time of the level."""
        firsts = (line.first() for share in self.shares.values() for line in share.lines.values())
        return min((entry[0] for entry in firsts if entry is not None), default=None)


@dataclass(slots=True, eq=False)
class _Queue:
    """The ready tasks of a queue, by priority."""

    virtual_time: float
    levels: dict[int, _Level] = field(default_factory=dict)
    by_urgency: list[_Level] | None = None
    """The levels in the order in which they are served, as of this turn."""

    def pop(self, task_types: frozenset[str], now: Micros) -> Task | None:
        if self.by_urgency is None:
            self.by_urgency = self._by_urgency(now)
        for level in self.by_urgency:
            task = level.pop(task_types)
            if task is not None:
                return task
        return None

    def _by_urgency(self, now: Micros) -> list[_Level]:
        if len(self.levels) == 1:
            return list(self.levels.values())
        ranked = []
        for priority, level in list(self.levels.items()):
            oldest = level.oldest()
            if oldest is None:
                del self.levels[priority]
            else:
                ranked.append((priority + max(0, now - oldest) / AGEING, priority, level))
        ranked.sort(key=lambda entry: entry[:2], reverse=True)
        return [level for _, _, level in ranked]


@dataclass(slots=True, eq=False)
class _Stream:
    holder: Holder
    pool: "_Pool"
    credit: int = 0
    task_type_credit: dict[str, int] = field(default_factory=dict)

    def takes(self, task_type: str) -> bool:
        return self.credit > 0 and self.task_type_credit.get(task_type, 1) > 0

    def use(self, task_type: str, count: int) -> None:
        self.credit -= count
        if task_type in self.task_type_credit:
            self.task_type_credit[task_type] -= count


@dataclass(slots=True, eq=False)
class _Pool:
    """Streams that subscribed to the same."""

    namespace: str
    queues: frozenset[str]
    task_types: frozenset[str]
    streams: dict[int, _Stream] = field(default_factory=dict)

    def takers(self) -> dict[frozenset[str], list[_Stream]]:
        """Group the streams that have credit by the task types that they take now."""
        groups: dict[frozenset[str], list[_Stream]] = {}
        for stream in self.streams.values():
            if stream.credit <= 0:
                continue
            exhausted = [task_type for task_type, credit in stream.task_type_credit.items() if credit <= 0]
            task_types = self.task_types.difference(exhausted) if exhausted else self.task_types
            if task_types:
                groups.setdefault(task_types, []).append(stream)
        return groups


class Matcher:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, str], _Queue] = {}
        self._pools: dict[tuple[str, frozenset[str], frozenset[str]], _Pool] = {}
        self._streams: dict[int, _Stream] = {}
        self._virtual_time = 0.0
        self._turn = itertools.count()

    def subscribe(self, holder: Holder, queues: frozenset[str], task_types: frozenset[str]) -> None:
        """Make a stream known, without credit."""
        key = (holder.namespace, queues, task_types)
        pool = self._pools.setdefault(key, _Pool(holder.namespace, queues, task_types))
        self._streams[holder.stream_id] = pool.streams[holder.stream_id] = _Stream(holder, pool)

    def unsubscribe(self, holder: Holder) -> None:
        """Forget a stream and its credit."""
        stream = self._streams.pop(holder.stream_id, None)
        if stream is None:
            return
        pool = stream.pool
        del pool.streams[holder.stream_id]
        if not pool.streams:
            del self._pools[(pool.namespace, pool.queues, pool.task_types)]

    def add_credit(self, holder: Holder, delta: int, task_type_deltas: Mapping[str, int]) -> int:
        """Change a stream's credit; return how much of a withdrawal was still unused."""
        stream = self._streams.get(holder.stream_id)
        if stream is None:
            return 0
        for task_type, change in task_type_deltas.items():
            stream.task_type_credit[task_type] = max(0, stream.task_type_credit.get(task_type, 0) + change)
        before = stream.credit
        stream.credit = min(bounds.MAX_CREDIT, max(0, before + delta))
        return before - stream.credit if delta < 0 else 0

    def unmatched(self, lane: Lane, holder: Holder) -> None:
        """Give back the credit of a match that came to nothing."""
        stream = self._streams.get(holder.stream_id)
        if stream is not None:
            stream.use(lane.task_type, -1)

    def add(self, tasks: list[Task]) -> None:
        """Take in tasks that are ready."""
        queues = self._queues
        for task in tasks:
            lane = task.lane
            queue = queues.get((lane.namespace, lane.queue))
            if queue is None:
                queue = queues[(lane.namespace, lane.queue)] = _Queue(self._virtual_time)
            level = queue.levels.get(lane.priority)
            if level is None:
                level = queue.levels[lane.priority] = _Level()
            due_time = task.progress.due_time
            assert due_time is not None, "an ended task is not ready"
            level.push(task, due_time)

    def credits(self) -> int:
        """Return the credit of all streams together."""
        return sum(stream.credit for stream in self._streams.values())

    def match(self, now: Micros, limit: int) -> Iterator[tuple[Task, Holder]]:
        """Yield up to `limit` matches; a task that is yielded is gone from here, a credit is used."""
        if not self._queues or not self._streams:
            return
        for queue in self._queues.values():
            queue.by_urgency = None
        pools = list(self._pools.values())
        first = next(self._turn) % len(pools)
        for pool in pools[first:] + pools[:first]:
            for task_types, streams in pool.takers().items():
                for match in self._serve(pool, task_types, streams, now, limit):
                    yield match
                    limit -= 1
                if limit <= 0:
                    return

    def _serve(
        self, pool: _Pool, task_types: frozenset[str], streams: list[_Stream], now: Micros, limit: int
    ) -> Iterator[tuple[Task, Holder]]:
        by_credit = [(-stream.credit, stream.holder.stream_id, stream) for stream in streams]
        heapq.heapify(by_credit)
        while limit > 0 and by_credit:
            _, stream_id, stream = by_credit[0]
            task = self._next(pool, task_types, now)
            if task is None:
                return
            task_type = task.lane.task_type
            stream.use(task_type, 1)
            if stream.credit <= 0 or stream.task_type_credit.get(task_type, 1) <= 0:
                heapq.heappop(by_credit)
            elif len(by_credit) > 1:
                heapq.heapreplace(by_credit, (-stream.credit, stream_id, stream))
            limit -= 1
            yield task, stream.holder

    def _next(self, pool: _Pool, task_types: frozenset[str], now: Micros) -> Task | None:
        """Take the next task for a pool, from the queue of its that is furthest behind."""
        queues = self._queues
        active = [key for name in pool.queues if (key := (pool.namespace, name)) in queues]
        if len(active) > 1:
            active.sort(key=lambda key: (queues[key].virtual_time, key))
        for key in active:
            queue = queues[key]
            task = queue.pop(task_types, now)
            if task is not None:
                self._virtual_time = max(self._virtual_time, queue.virtual_time)
                queue.virtual_time = self._virtual_time + 1
                return task
            if not any(level.shares for level in queue.levels.values()):
                del queues[key]
        return None
