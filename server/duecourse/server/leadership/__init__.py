"""Who should lead a shard. The store disposes (its row is the proof), coordination proposes.

`Leadership` is the seam: it decides which shards this node should take and what to do when a term has ended, and has
`Terms` take them. `solo` is for one node alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Never, Protocol

from duecourse.model.instants import Micros
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.storage import RaiseRefused, ShardRow, Stale


class Superseded(Exception):
    """Another node took a shard, and this node cannot go on; the message says who and what to do."""

    def __init__(self, shard: ShardId, epoch: Epoch, holder: bytes) -> None:
        super().__init__(
            f"shard {shard} was taken by another node: epoch {epoch}, holder {holder.hex()}. Two solo nodes were"
            " pointed at one store; stop one of them"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A live node, as it describes itself to the others."""

    node_id: str
    address: str
    """Where clients and workers reach it."""
    peer_address: str
    """Where the other nodes reach it; empty: nowhere, it is alone."""
    version: str
    ineligible_reason: str = ""
    """Why it is to lead nothing: it drains, or is without its store. Empty: it is eligible."""
    failing_shards: frozenset[ShardId] = frozenset()
    """Shards that it cannot load, for the time being."""
    wall_clock_offset: Micros = 0
    """Its own wall clock minus the cluster clock as it knows it."""


class ClusterView(Protocol):
    """Who is there and who leads, as far as this node knows. Hints, like all of coordination."""

    coordination: str
    """As the shard rows hold it."""

    def members(self) -> Sequence[Member]:
        """Return the live nodes by name, this one included."""
        ...

    def leader(self, shard: ShardId) -> Member | None:
        """Return who leads a shard, or is about to; None: nobody, or nobody knows."""
        ...

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a listener called whenever members or leaders have changed, on the node's event loop."""
        ...


class Taking(Protocol):
    """How shards are taken; `shards.Terms` does it."""

    def take(self, shards: Sequence[ShardId]) -> None:
        """Raise the epoch of shards and load them, in the background, until it succeeds or is refused."""
        ...


class Leadership(ClusterView, Protocol):
    """See the module's docstring. Who leads is also who knows of the others: it is the node's view of the cluster."""

    def introduce(self, member: Member) -> None:
        """Make this node known under addresses that are served from now on, or known anew when they have changed."""
        ...

    def ended(self, shard: ShardId) -> None:
        """Note that a term of this node is over, though nobody else has begun one."""
        ...

    def superseded(self, shard: ShardId, by: Stale | RaiseRefused) -> None:
        """Note that somebody else leads a shard."""
        ...

    async def run(self, taking: Taking, shards: Sequence[ShardRow]) -> Never:
        """Take and keep what this node should lead. Raises Superseded."""
        ...
