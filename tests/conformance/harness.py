"""A store under test, with what the suite needs to look into it and to damage it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from conformance import writes
from services.postgres import SHARDS

from duecourse.server.core.fence import Fence
from duecourse.server.core.task import Epoch, ShardId, Task, TaskKey
from duecourse.server.core.writes import Insert, Update
from duecourse.server.storage import CommitAnswer, Raised, RaiseRequest, StoredTask, TaskStore


@dataclass(slots=True)
class Harness:
    store: TaskStore
    snapshot: Callable[[], Awaitable[bytes]]
    """Everything that is stored, to be compared byte by byte."""
    spoil: Callable[[TaskKey], Awaitable[None]]
    """Make the record of a task one that does not decode."""
    shards: int = SHARDS

    async def lead(self, *shards: int, holder: bytes = b"holder") -> list[Fence]:
        """Begin a term of each of the shards."""
        requests = [RaiseRequest(ShardId(shard), holder) for shard in shards]
        answers = await self.store.raise_epochs("solo", requests, writes.NOW)
        return [answer.fence for answer in answers.values() if isinstance(answer, Raised)]

    async def commit(self, fence: Fence, *of_shard: Insert | Update) -> CommitAnswer:
        return (await self.store.commit([writes.batch(fence, *of_shard)]))[fence.shard]

    async def apply(self, fence: Fence, *of_shard: Insert | Update) -> None:
        await writes.apply(self.store, fence, *of_shard)

    async def insert(self, fence: Fence, count: int = 1) -> list[Task]:
        """Store some tasks that are due now."""
        inserts = [writes.insert(self.shards, fence.shard) for _ in range(count)]
        await self.apply(fence, *inserts)
        return [insert.task for insert in inserts]

    async def read(self, task: Task) -> StoredTask:
        stored = await self.store.read_task(task.key, full=True)
        assert isinstance(stored, StoredTask), stored
        return stored


def older(fence: Fence) -> Fence:
    return Fence(fence.shard, Epoch(fence.epoch - 1), fence.holder)


def stale_forms(fence: Fence) -> Sequence[Fence]:
    """Return fences that are not, or no longer, those of the shard's row."""
    return (
        older(fence),
        Fence(fence.shard, Epoch(fence.epoch + 1), fence.holder),
        Fence(fence.shard, fence.epoch, b"somebody else"),
        Fence(fence.shard, fence.epoch, b""),
    )
