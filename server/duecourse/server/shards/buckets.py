"""Moves the horizon: every shard's near buckets are in memory before they are due.

The horizon advances first and the buckets that it uncovers are read then, so that what is submitted meanwhile enters
memory by itself. A read that fails is tried again until it succeeds or the shard's term is over.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping
from typing import Never

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.events import BucketsLoaded
from duecourse.server.core.shard import Shard
from duecourse.server.core.task import DueKey, Lane, ShardId, Task
from duecourse.server.shards.corrupt import set_aside
from duecourse.server.shards.loop import Loop
from duecourse.server.storage import LoadedBuckets, StoreUnavailable, TaskStore
from duecourse.server.telemetry import logs
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing import backoff

_log = logs.get("shards.buckets")

_FIRST_RETRY: Micros = 50 * bounds.MILLISECOND
_LONGEST_RETRY: Micros = bounds.SECOND


def horizon_at(now: Micros, ahead: Micros) -> Micros:
    """Return up to where buckets should be in memory, the end of a bucket."""
    return (now + ahead) // bounds.BUCKET * bounds.BUCKET + bounds.BUCKET


def post_buckets(loop: Loop, shards: Mapping[ShardId, Shard], loaded: LoadedBuckets, due_from: Micros = 0) -> None:
    """Hand what was loaded to the shards that it belongs to, and drop what is of others: they were given up."""
    tasks: defaultdict[ShardId, list[Task]] = defaultdict(list)
    for task in loaded.tasks:
        tasks[task.shard].append(task)
    cuts: defaultdict[ShardId, dict[Lane, DueKey]] = defaultdict(dict)
    for (number, lane), key in loaded.cut.items():
        cuts[number][lane] = key
    for number, shard in shards.items():
        loop.post_to(shard, BucketsLoaded(tasks[number], cuts[number], due_from))


class Horizon:
    """Advances the horizon of all led shards, a bucket at a time."""

    def __init__(self, store: TaskStore, loop: Loop, ahead: Micros, head: int, metrics: Metrics) -> None:
        self._store = store
        self._loop = loop
        self._ahead = ahead
        self._head = head
        self._metrics = metrics

    async def run(self) -> Never:
        """Advance for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                target = horizon_at(self._loop.clock.now().latest, self._ahead)
                behind: defaultdict[Micros, dict[ShardId, Shard]] = defaultdict(dict)
                for number, shard in self._loop.shards.items():
                    if shard.near.horizon < target:
                        behind[shard.near.advance(target)][number] = shard
                for reached, shards in behind.items():
                    group.create_task(self._load(shards, reached, target), name="load buckets")
                await self._loop.clock.sleep(bounds.LONGEST_SLEEP)
        raise AssertionError("the loop above does not end")

    async def _load(self, shards: dict[ShardId, Shard], due_from: Micros, due_before: Micros) -> None:
        waits = backoff.delays(_FIRST_RETRY, _LONGEST_RETRY, random.Random())
        while True:
            led = self._loop.shards
            shards = {number: shard for number, shard in shards.items() if led.get(number) is shard}
            if not shards:
                return
            try:
                loaded = await self._store.load_buckets(sorted(shards), due_from, due_before, self._head)
            except StoreUnavailable as error:
                _log.warning("buckets_not_loaded", detail=str(error))
                await self._loop.clock.sleep(next(waits))
                continue
            self._metrics.loads["bucket"] += 1
            post_buckets(self._loop, shards, loaded, due_from)
            await set_aside(self._store, self._loop, self._metrics, loaded.corrupt)
            return
