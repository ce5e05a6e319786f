"""Who should lead a shard. The store disposes (its row is the proof), coordination proposes.

`Leadership` is the seam: it decides which shards this node should take and what to do when a term has ended, and has
`Terms` take them. `solo` is for one node alone, `clustered` for several that meet in etcd.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Never, Protocol

from duecourse.model.instants import Micros
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.storage import RaiseRefused, ShardRow, Stale


class Superseded(Exception):
    """Another node took a shard, and this node cannot go on; the message says what to do."""

    def __init__(self, shard: ShardId, epoch: Epoch) -> None:
        super().__init__(
            f"another solo node took shard {shard}, at epoch {epoch}, and goes on in place of this one: a store is for"
            " one of them. If it is not meant to, stop it: pg_stat_activity in Postgres tells from where the"
            " connections named duecourse come"
        )


class DuplicateNode(Exception):
    """Another live node has the name of this one."""

    def __init__(self, node_id: str, address: str) -> None:
        super().__init__(
            f"another node is called {node_id}, and serves at {address or 'an unknown address'}: give each node a"
            " DUECOURSE_NODE_ID of its own"
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

    def is_current(self) -> bool:
        """Tell whether what the view shows was seen lately; else others may know better who leads."""
        ...

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a listener called whenever members or leaders have changed, on the node's event loop."""
        ...


RAISES_PER_CLAIM: Final = 65_536


class Claim:
    """What entitles a node to raise a shard's epoch, again and again, as long as nobody else has raised it.

    A claim by election has numbers of its own to give to terms, each only once. A solo node's has none: its terms take
    the number after the row's.
    """

    def __init__(self, first: Epoch | None = None) -> None:
        self.holders: tuple[bytes, ...] = ()
        """The latest holders that terms under this claim had, or may yet have."""
        self._first = first
        self._raises = 0

    @property
    def first(self) -> Epoch | None:
        """The lowest epoch that it gives."""
        return self._first

    @property
    def is_spent(self) -> bool:
        """Whether it has no further epoch."""
        return self._first is not None and self._raises >= RAISES_PER_CLAIM

    def next_epoch(self) -> Epoch | None:
        """Give an epoch that was never given before; None: the row's + 1."""
        if self._first is None:
            return None
        assert not self.is_spent, "a spent claim raises nothing"
        self._raises += 1
        return Epoch(self._first + self._raises - 1)


class Taking(Protocol):
    """How shards are taken and given up; `shards.Terms` does it."""

    def take(self, claims: Mapping[ShardId, Claim]) -> None:
        """Raise the epoch of shards and load them, in the background, until it succeeds or is refused."""
        ...

    def give_up(self, shard: ShardId, reason: str, detail: str) -> None:
        """End a term, or what was to become one, at once."""
        ...

    async def hand_over(self, shard: ShardId) -> None:
        """End a term once what it has begun is answered, within a bounded time; from now on it begins nothing."""
        ...

    def failing(self) -> frozenset[ShardId]:
        """Return the shards that could not be loaded several times in a row, lately, though the store answers."""
        ...

    def store_missed_for(self) -> Micros:
        """Return for how long the store has not answered; 0 if it does."""
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

    def why_not_ready(self, led: Collection[ShardId]) -> str | None:
        """Tell what is missing while a node that leads these shards should lead more; None: nothing."""
        ...

    async def drain(self, until: Micros) -> None:
        """Hand all shards over to other nodes, if there are any, until an elapsed time at most; take none any more."""
        ...

    async def run(self, taking: Taking, shards: Sequence[ShardRow]) -> Never:
        """Take and keep what this node should lead. Raises Superseded, DuplicateNode."""
        ...
