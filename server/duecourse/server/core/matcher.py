"""`Matcher`: which ready task goes to which worker's stream. One for a node, over all its shards.

Queues share by start-time fair queueing, every task as one unit of work; a queue that had nothing to do does not save
up: it re-enters at the virtual time of the one served last. Within a queue the order is `ready.Queue`'s. Backlog and
fresh work are not told apart.

Streams with the same queues and task types form a *pool*; within it the stream with the most credit is served first, so
that work spreads evenly. A credit is used up by the match; it comes back only if the grant comes to nothing.

What then waits for lack of credit is told to the pool's streams (`demand`), so that workers move idle credit here from
other nodes. That is looked at now and then, never for each task.
"""

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core import demand
from duecourse.server.core.lease import Holder
from duecourse.server.core.ready import Queue
from duecourse.server.core.task import Lane, Task

_SLACK = 16_384


@dataclass(slots=True, eq=False)
class _Stream:
    holder: Holder
    pool: "_Pool"
    credit: int = 0
    task_type_credit: dict[str, int] = field(default_factory=dict)

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
    queue_keys: list[tuple[str, str]]
    streams: dict[int, _Stream] = field(default_factory=dict)
    demanding: demand.Demand = field(default_factory=demand.Demand)

    def lacking(self) -> frozenset[str]:
        """Return the task types that none of its streams takes now, for lack of credit."""
        lacking = self.task_types
        for stream in self.streams.values():
            if stream.credit > 0:
                lacking = lacking.intersection(
                    [task_type for task_type, credit in stream.task_type_credit.items() if credit <= 0]
                )
                if not lacking:
                    break
        return lacking

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
        self._queues: dict[tuple[str, str], Queue] = {}
        self._pools: dict[tuple[str, frozenset[str], frozenset[str]], _Pool] = {}
        self._streams: dict[int, _Stream] = {}
        self._virtual_time = 0.0
        self._turn = itertools.count()
        self._added = 0
        self._bound = _SLACK
        self._is_demanding = False
        """Some stream was told that work waits."""
        self._demands_at: Micros = 0
        self._look_again = False

    def subscribe(self, holder: Holder, queues: frozenset[str], task_types: frozenset[str]) -> None:
        """Make a stream known, without credit."""
        key = (holder.namespace, queues, task_types)
        pool = self._pools.get(key)
        if pool is None:
            queue_keys = [(holder.namespace, queue) for queue in sorted(queues)]
            pool = self._pools[key] = _Pool(holder.namespace, queues, task_types, queue_keys)
        self._streams[holder.stream_id] = pool.streams[holder.stream_id] = _Stream(holder, pool)

    def unsubscribe(self, holder: Holder) -> None:
        """Forget a stream and its credit."""
        stream = self._streams.pop(holder.stream_id, None)
        if stream is None:
            return
        pool = stream.pool
        del pool.streams[holder.stream_id]
        pool.demanding.forget(holder.stream_id)
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
                queue = queues[(lane.namespace, lane.queue)] = Queue(self._virtual_time)
            queue.push(task)
        self._added += len(tasks)
        if self._added > self._bound:
            self._prune()

    def credits(self) -> int:
        """Return the credit of all streams together."""
        return sum(stream.credit for stream in self._streams.values())

    def demands(self, elapsed: Micros) -> list[tuple[Holder, int]]:
        """Return which streams are to be told how many tasks wait for their credit; to be called after matching.

        It looks only now and then, and less often the more streams it has told.
        """
        if not self._queues and not self._is_demanding:
            self._look_again = False
            return []
        if elapsed < self._demands_at:
            self._look_again = True
            return []
        self._look_again = self._is_demanding = False
        news: list[tuple[Holder, int]] = []
        for pool in self._pools.values():
            waiting = self._waiting(pool)
            if not waiting and not pool.demanding.told:
                continue
            for stream_id in pool.demanding.tell(waiting, pool.streams, elapsed):
                news.append((pool.streams[stream_id].holder, waiting))
            self._is_demanding |= waiting > 0
            self._look_again |= waiting > 0 and len(pool.demanding.told) < len(pool.streams)
        self._demands_at = elapsed + max(demand.INTERVAL, len(news) * demand.INTERVAL_PER_STREAM)
        return news

    def until_demands(self, elapsed: Micros) -> Micros:
        """Return how long `demands` need not be called if nothing else happens."""
        return max(0, self._demands_at - elapsed) if self._look_again else demand.REPEAT

    def match(self, now: Micros, limit: int) -> Iterator[tuple[Task, Holder]]:
        """Yield up to `limit` matches; a task that is yielded is gone from here, a credit is used."""
        if not self._queues or not self._streams:
            return
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
        active = [key for key in pool.queue_keys if key in queues]
        if len(active) > 1:
            active.sort(key=lambda key: (queues[key].virtual_time, key))
        for key in active:
            queue = queues[key]
            task = queue.pop(task_types, now)
            if task is not None:
                self._virtual_time = max(self._virtual_time, queue.virtual_time)
                queue.virtual_time = self._virtual_time + 1
                return task
            if queue.is_empty:
                del queues[key]
        return None

    def _waiting(self, pool: _Pool) -> int:
        """Count, up to a bound, the tasks that wait for the credit of a pool."""
        queues = [self._queues[key] for key in pool.queue_keys if key in self._queues]
        lacking = pool.lacking() if queues else frozenset()
        waiting = 0
        for queue in queues if lacking else ():
            waiting += queue.count(lacking, demand.MOST - waiting)
            if waiting >= demand.MOST:
                break
        return waiting

    def _prune(self) -> None:
        """Drop what is no longer ready: there is never much more of it than of what is, even if no worker comes."""
        left = 0
        for key, queue in list(self._queues.items()):
            of_queue = queue.prune()
            left += of_queue
            if not of_queue:
                del self._queues[key]
        self._added = 0
        self._bound = left + _SLACK
