"""`Reads`: carries out what shards want to read, batched, and posts what was found to the very shard that asked.

A read that fails is tried again until it succeeds or its shard's term is over: a key that is being read holds back the
events for it.
"""

import asyncio
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Generic, Never, TypeVar

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.effects import Effects, LaneLoad
from duecourse.server.core.events import AttemptRead, End, Found, LaneLoaded, TasksRead
from duecourse.server.core.shard import Shard
from duecourse.server.core.task import ShardId, TaskKey
from duecourse.server.shards.corrupt import set_aside
from duecourse.server.shards.loop import Loop
from duecourse.server.storage import CorruptRecord, LaneRequest, StoreUnavailable, TaskStore
from duecourse.server.telemetry import logs
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing import backoff

_log = logs.get("shards.reads")

_T = TypeVar("_T")

_KEYS_AT_ONCE = 1_000
_LANES_AT_ONCE = 64
_FIRST_RETRY: Micros = 20 * bounds.MILLISECOND
_LONGEST_RETRY: Micros = bounds.SECOND


class _Line(Generic[_T]):
    """Reads of one kind, in the order in which they were asked for."""

    def __init__(self, loop: Loop, at_once: int, read: Callable[[list[tuple[Shard, _T]]], Awaitable[None]]) -> None:
        self._loop = loop
        self._at_once = at_once
        self._read = read
        self._waiting: deque[tuple[Shard, _T]] = deque()
        self._wake = asyncio.Event()

    def add(self, shard: Shard, request: _T) -> None:
        self._waiting.append((shard, request))
        self._wake.set()

    async def run(self) -> Never:
        source = random.Random()
        waits: Iterator[Micros] | None = None
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            led = self._loop.shards
            taken = list(itertools.islice(self._waiting, self._at_once))
            batch = [entry for entry in taken if led.get(entry[0].fence.shard) is entry[0]]
            try:
                if batch:
                    await self._read(batch)
            except StoreUnavailable as error:
                _log.warning("read_failed", detail=str(error))
                waits = waits or backoff.delays(_FIRST_RETRY, _LONGEST_RETRY, source)
                await self._loop.clock.sleep(next(waits))
                continue
            for _ in taken:
                self._waiting.popleft()
            waits = None


class Reads:
    """See the module's docstring."""

    def __init__(self, store: TaskStore, loop: Loop, metrics: Metrics) -> None:
        self._store = store
        self._loop = loop
        self._metrics = metrics
        self._tasks = _Line(loop, _KEYS_AT_ONCE, self._read_tasks)
        self._attempts = _Line(loop, _KEYS_AT_ONCE, self._read_attempts)
        self._lanes = _Line(loop, _LANES_AT_ONCE, self._read_lanes)

    def submit(self, effects: Effects, shards: Mapping[ShardId, Shard]) -> None:
        """Carry out the reads of a turn, but those of a shard that broke in it."""
        for number, key in effects.task_reads:
            if number in shards:
                self._tasks.add(shards[number], key)
        for number, end in effects.attempt_reads:
            if number in shards:
                self._attempts.add(shards[number], end)
        for load in effects.lane_loads:
            if load.shard in shards:
                self._lanes.add(shards[load.shard], load)

    async def run(self) -> None:
        """Read for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tasks.run(), name="read tasks")
            group.create_task(self._attempts.run(), name="read attempts")
            group.create_task(self._lanes.run(), name="read lanes")

    async def _read_tasks(self, batch: list[tuple[Shard, TaskKey]]) -> None:
        found = await self._store.load_tasks([key for _, key in batch])
        self._metrics.loads["task"] += len(batch)
        by_shard: defaultdict[Shard, list[tuple[TaskKey, Found]]] = defaultdict(list)
        corrupt = []
        for (shard, key), task in zip(batch, found, strict=True):
            if isinstance(task, CorruptRecord):
                corrupt.append(task)
                by_shard[shard].append((key, False))
            else:
                by_shard[shard].append((key, task))
        for shard, tasks in by_shard.items():
            self._loop.post_to(shard, TasksRead(tasks))
        await set_aside(self._store, self._loop, self._metrics, corrupt)

    async def _read_attempts(self, batch: list[tuple[Shard, End]]) -> None:
        found = await self._store.find_attempts([(end.key, end.lease_token) for _, end in batch])
        self._metrics.loads["attempt"] += len(batch)
        for (shard, end), attempt in zip(batch, found, strict=True):
            self._loop.post_to(shard, AttemptRead(end, attempt))

    async def _read_lanes(self, batch: list[tuple[Shard, LaneLoad]]) -> None:
        found = await self._store.load_lanes(
            [LaneRequest(load.shard, load.lane, load.after, load.due_before, load.limit) for _, load in batch]
        )
        self._metrics.loads["lane"] += len(batch)
        for (shard, load), loaded in zip(batch, found, strict=True):
            count = len(loaded.tasks) + len(loaded.corrupt)
            is_end = count < load.limit
            self._loop.post_to(shard, LaneLoaded(load.lane, load.version, loaded.tasks, is_end))
            await set_aside(self._store, self._loop, self._metrics, loaded.corrupt)
