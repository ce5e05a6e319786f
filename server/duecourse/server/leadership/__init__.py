"""Who should lead a shard. The store disposes (its row is the proof), coordination proposes.

`Leadership` is the seam: it decides which shards this node should take and what to do when a term has ended, and has
`Terms` take them. `solo` is for one node alone.
"""

from collections.abc import Sequence
from typing import Never, Protocol

from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.storage import RaiseRefused, ShardRow, Stale


class Superseded(Exception):
    """Another node took a shard, and this node cannot go on; the message says who and what to do."""

    def __init__(self, shard: ShardId, epoch: Epoch, holder: bytes) -> None:
        super().__init__(
            f"shard {shard} was taken by another node: epoch {epoch}, holder {holder.hex()}. Two solo nodes were"
            " pointed at one store; stop one of them"
        )


class Taking(Protocol):
    """How shards are taken; `shards.Terms` does it."""

    def take(self, shards: Sequence[ShardId]) -> None:
        """Raise the epoch of shards and load them, in the background, until it succeeds or is refused."""
        ...


class Leadership(Protocol):
    """See the module's docstring."""

    coordination: str
    """As the shard rows hold it."""

    def ended(self, shard: ShardId) -> None:
        """Note that a term of this node is over, though nobody else has begun one."""
        ...

    def superseded(self, shard: ShardId, by: Stale | RaiseRefused) -> None:
        """Note that somebody else leads a shard."""
        ...

    async def run(self, taking: Taking, shards: Sequence[ShardRow]) -> Never:
        """Take and keep what this node should lead. Raises Superseded."""
        ...
