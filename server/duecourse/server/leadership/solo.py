"""Coordination `solo`: one node alone leads every shard, and the epoch rules alone keep it safe.

It takes all shards once, at its start, over any earlier solo node. When a term turns stale later, another solo node has
started: this one gives up.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Never

from duecourse.server.core.task import ShardId
from duecourse.server.leadership import Member, Superseded, Taking
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

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a listener called when this node is introduced."""
        self._listeners.append(listener)

    def ended(self, shard: ShardId) -> None:
        """Take the shard again."""
        self._ended.append(shard)
        self._news.set()

    def superseded(self, shard: ShardId, by: Stale | RaiseRefused) -> None:
        """Give up."""
        self._superseded = Superseded(shard, by.epoch, by.holder)
        self._news.set()

    async def run(self, taking: Taking, shards: Sequence[ShardRow]) -> Never:
        """Take every shard, and again what ends. Raises Superseded."""
        taking.take([row.shard for row in shards])
        while True:
            await self._news.wait()
            self._news.clear()
            if self._superseded is not None:
                raise self._superseded
            ended, self._ended = self._ended, []
            taking.take(ended)
