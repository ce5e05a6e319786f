"""Terms that begin together, of which one is given up on the way."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.waiting import until

from duecourse.model import bounds, slots
from duecourse.model.instants import Micros
from duecourse.server.core.task import DEFAULT_POLICY, Lane, ShardId, Submission
from duecourse.server.failpoints import Failpoints
from duecourse.server.leadership.solo import Solo
from duecourse.server.scheduler import Options, Scheduler
from duecourse.server.storage import LoadedBuckets
from duecourse.server.storage.memory import MemoryStore
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing.clock import SystemClock

SHARDS = 4
TASKS = 40
LANE = Lane("default", "default", "send", 0, "")


class GatedStore(MemoryStore):
    """A memory store whose answers to loads a test may hold back."""

    def __init__(self) -> None:
        super().__init__(SHARDS)
        self.gate = asyncio.Event()
        self.gate.set()

    async def load_buckets(
        self, shards: Sequence[ShardId], due_from: Micros, due_before: Micros, head: int
    ) -> LoadedBuckets:
        loaded = await super().load_buckets(shards, due_from, due_before, head)
        await self.gate.wait()
        return loaded


@asynccontextmanager
async def running(store: GatedStore) -> AsyncIterator[Scheduler]:
    """Run a scheduler that takes all shards; it ends with the scope."""
    await store.open()
    rows = await store.shards()
    scheduler = Scheduler(Options("node"), store, rows, Solo(), SystemClock(), Metrics(), Failpoints())

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            scheduler.start(group)

    async with asyncio.TaskGroup() as group:
        running_in = group.create_task(run(), name="scheduler")
        yield scheduler
        running_in.cancel()


def submission(task_id: str) -> Submission:
    slot = slots.slot_of("default", task_id)
    shard = ShardId(slots.shard_of_slot(slot, SHARDS))
    uid = task_id.encode().ljust(16, b"\0")
    return Submission(
        "default", task_id, slot, shard, LANE, uid, None, 10 * bounds.SECOND, DEFAULT_POLICY, b"", "", {}, {}, b"\1"
    )


def in_memory(scheduler: Scheduler) -> dict[ShardId, int]:
    return {number: shard.tasks_in_memory for number, shard in scheduler.loop.shards.items()}


async def test_a_shard_that_is_given_up_while_it_loads_takes_nothing_from_those_that_load_with_it() -> None:
    store = GatedStore()
    async with running(store) as scheduler:
        await until(lambda: len(scheduler.loop.shards) == SHARDS)
        await scheduler.commands.submit([submission(f"t{number}") for number in range(TASKS)])
        before = in_memory(scheduler)
    assert sum(before.values()) == TASKS

    store.gate.clear()
    async with running(store) as scheduler:
        await until(lambda: len(scheduler.terms.loading) == SHARDS)
        scheduler.terms.give_up(ShardId(0), "election_lost", "")
        store.gate.set()
        del before[ShardId(0)]
        await until(lambda: in_memory(scheduler) == before)
