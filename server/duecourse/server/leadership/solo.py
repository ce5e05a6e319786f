"""Coordination `solo`: one node alone leads every shard, and the epoch rules alone keep it safe.

It takes all shards once, at its start, over any earlier solo node. When a term turns stale later, another solo node has
started: this one gives up.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final, Never

from duecourse.model.instants import Micros
from duecourse.server.core.task import ShardId
from duecourse.server.leadership import Claim, Member, Superseded, Taking
from duecourse.server.storage import RaiseRefused, ShardRow, Stale

COORDINATION: Final = "solo"
NOWHERE: Final = Member(node_id="", address="", peer_address="", version="")
"""A node that nobody reaches over a network."""


class Solo:
    """Leads everything, and is the only member that it knows of. Implements `Leadership`."""

    coordination = COORDINATION

    def __init__(self, member: Member = NOWHERE) -> None:
        self._member = member
        self._listeners: list[Callable[[], None]] = []
        self._claims: dict[ShardId, Claim] = {}
        self._ended: list[ShardId] = []
        self._superseded: Superseded | None = None
        self._news = asyncio.Event()

    def introduce(self, member: Member) -> None:
        """Be known under other addresses."""
        self._member = member
        for listener in self._listeners:
            listener()

    def members(self) -> Sequence[Member]:
        """Return this node."""
        return [self._member]

    def leader(self, shard: ShardId) -> Member | None:
        """Return this node."""
        return self._member

    def is_current(self) -> bool:
        """There is nobody who could know better."""
        return True

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a listener called when this node is introduced."""
        self._listeners.append(listener)

    def ended(self, shard: ShardId) -> None:
        """Take the shard again."""
        self._ended.append(shard)
        self._news.set()

    def superseded(self, shard: ShardId, by: Stale | RaiseRefused) -> None:
        """Give up."""
        self._superseded = Superseded(shard, by.epoch)
        self._news.set()

    def why_not_ready(self, led: Collection[ShardId]) -> str | None:
        """Tell how many shards are not led."""
        unled = self._claims.keys() - led
        if not self._claims or unled:
            return f"{len(unled)} of {len(self._claims)} shards are not led yet"
        return None

    async def drain(self, until: Micros) -> None:
        """Do nothing: there is nobody to hand shards over to."""

    async def run(self, taking: Taking, shards: Sequence[ShardRow]) -> Never:
        """Take every shard, and again what ends. Raises Superseded."""
        self._claims = {row.shard: Claim() for row in shards}
        taking.take(self._claims)
        while True:
            await self._news.wait()
            self._news.clear()
            if self._superseded is not None:
                raise self._superseded
            ended, self._ended = self._ended, []
            taking.take({shard: self._claims[shard] for shard in ended})
