"""What proves that a node may write a shard: the fence that every write carries."""

from dataclasses import dataclass

from duecourse.server.core.task import Epoch, ShardId


@dataclass(frozen=True, slots=True)
class Fence:
    """A term, as the store compares it with the shard's row."""

    shard: ShardId
    epoch: Epoch
    holder: bytes
    """The term's random id, 16 bytes."""
