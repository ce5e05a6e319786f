"""One shard, as this node stands for it.

::

    outside ──▶ standing ──▶ elected ──▶ handing over ──▶ outside
                   ▲            │
                   └────────────┘ etcd says that the election is over: the term ends at once;
                                  the store refuses the claim: resign, and wait before standing again

While it is elected it holds a `Claim`, under which the shard is taken, and taken again when a term ends though nobody
else has begun one. What etcd does not say changes nothing: if it is silent, terms go on.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import ShardId
from duecourse.server.etcd.keys import Cluster
from duecourse.server.leadership import Claim, Member, Taking
from duecourse.server.leadership.election import Elected, Election
from duecourse.server.leadership.identity import REBIND, first_epoch
from duecourse.server.leadership.standings import Standings
from duecourse.server.storage import RaiseRefused, Stale
from duecourse.server.telemetry import logs
from duecourse.timing import backoff
from duecourse.timing.clock import Clock

ELECTION_LOST: Final = "election_lost"

_FIRST_PAUSE: Final[Micros] = 100 * bounds.MILLISECOND
_LONGEST_PAUSE: Final[Micros] = 30 * bounds.SECOND

_log = logs.get("leadership")


class Seat:
    """See the module's docstring."""

    def __init__(
        self,
        shard: ShardId,
        cluster: Cluster,
        election: Election,
        *,
        clock: Clock,
        standings: Standings,
    ) -> None:
        self.shard = shard
        self.successor: Member | None = None
        """To whom the shard is being handed over."""
        self._cluster = cluster
        self._election = election
        self._clock = clock
        self._standings = standings
        self._claim: Claim | None = None
        self._claimed: tuple[int, Claim] | None = None
        """The latest claim, with the revision of the key that it goes with."""
        self._refused_by: Stale | RaiseRefused | None = None
        self._is_at_odds = False
        self._told: Stale | RaiseRefused | None = None
        self._told_ahead: Stale | RaiseRefused | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_elected(self) -> bool:
        """Whether this node was elected, and leads the shard or is about to."""
        return self._claim is not None

    @property
    def is_occupied(self) -> bool:
        """Whether this node stands or is elected."""
        return self._task is not None and not self._task.done()

    @property
    def is_at_odds(self) -> bool:
        """Whether the store refuses this node what etcd gives it, until an operator mends that."""
        return self._is_at_odds and self.is_occupied

    @property
    def is_handing_over(self) -> bool:
        """Whether what was begun is still to be answered before the next in line gets the shard."""
        return self.is_elected and self.successor is not None

    @property
    def is_standing(self) -> bool:
        """Whether this node stands, or waits before it stands again."""
        return self.is_occupied and self._claim is None and self.successor is None

    def take(self, group: asyncio.TaskGroup, taking: Taking, on_end: Callable[[], None]) -> None:
        """Stand for the shard, and lead it while elected, until it is left or was handed over; then call `on_end`."""
        self.successor = None
        self._is_at_odds = False
        self._task = group.create_task(self._occupy(taking), name=f"seat {self.shard}")
        self._task.add_done_callback(lambda _: on_end())

    def leave(self) -> None:
        """Stand no more. Not for one who is elected: that one hands over."""
        assert not self.is_elected, "whoever is elected hands over"
        if self._task is not None:
            self._task.cancel()

    def hand_over(self, successor: Member) -> None:
        """Let the next in line have the shard, once what was begun is answered."""
        self.successor = successor
        self._news.set()

    def ended(self, taking: Taking) -> None:
        """Take the shard again: a term is over, though nobody else has begun one."""
        if self._claim is None:
            return
        if self._claim.is_spent:
            self._news.set()
        else:
            taking.take({self.shard: self._claim})

    def superseded(self, by: Stale | RaiseRefused) -> None:
        """Note that the store holds what this claim cannot raise."""
        if self._claim is not None:
            self._refused_by = by
            self._news.set()

    async def _occupy(self, taking: Taking) -> None:
        pauses = self._pauses()
        while self.successor is None:
            elected = await self._election.campaign()
            claim = self._claim = self._claim_by(elected)
            try:
                taking.take({self.shard: claim})
                is_over = await self._lead(elected, claim, taking)
            finally:
                self._claim = None
            if is_over:
                pauses = self._pauses()
                continue
            await self._election.resign(elected)
            if self.successor is None:
                await self._clock.sleep(next(pauses))
        # An etcd that was restored may still hold the key of an election that is over.
        self._standings.give_up(self.shard)

    def _claim_by(self, elected: Elected) -> Claim:
        """Return what an election entitles to; a key that outlived its resignation is no new claim."""
        if self._claimed is None or self._claimed[0] != elected.revision:
            self._claimed = elected.revision, Claim(first_epoch(self._cluster, elected.revision))
            self._look_at_last_refusal(self._claimed[1])
        return self._claimed[1]

    async def _lead(self, elected: Elected, claim: Claim, taking: Taking) -> bool:
        """Keep the shard until the election is over (True), or until it is to be resigned (False)."""
        with self._standings.telling(self.shard, self._news.set):
            while True:
                self._news.clear()
                over = self._election.why_over(elected)
                if over is not None:
                    taking.give_up(self.shard, ELECTION_LOST, over)
                    return True
                if self.successor is not None:
                    await taking.hand_over(self.shard)
                    return False
                if self._refused_by is not None or claim.is_spent:
                    taking.give_up(self.shard, ELECTION_LOST, "the store refuses the claim")
                    self._tell_refusal()
                    return False
                await self._news.wait()

    def _tell_refusal(self) -> None:
        """Tell who refused, once for each."""
        by = self._refused_by
        is_foreign = isinstance(by, RaiseRefused) and by.coordination not in ("", self._cluster.id)
        self._is_at_odds = self._is_at_odds or is_foreign
        if by == self._told:
            return
        self._told = by
        if isinstance(by, RaiseRefused) and is_foreign:
            _log.error(
                "shard_foreign",
                shard=self.shard,
                coordination=by.coordination,
                advice=f"the store belongs to another cluster; if this one is to lead it from now on, {REBIND}",
            )
        elif by is not None:
            _log.warning("shard_led_by_another", shard=self.shard, epoch=by.epoch, holder=by.holder.hex())

    def _look_at_last_refusal(self, claim: Claim) -> None:
        """Tell if even a new claim is lower than the row that refused the last one."""
        by, self._refused_by = self._refused_by, None
        if by is None or claim.first is None or claim.first > by.epoch:
            return
        self._is_at_odds = True
        if by != self._told_ahead:
            self._told_ahead = by
            _log.error(
                "store_ahead_of_etcd",
                shard=self.shard,
                epoch=by.epoch,
                given=claim.first,
                advice=f"etcd was restored from an older copy, and gives epochs that were given before: {REBIND}",
            )

    def _pauses(self) -> Iterator[Micros]:
        return backoff.delays(_FIRST_PAUSE, _LONGEST_PAUSE, random.Random())
