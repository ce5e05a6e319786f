"""`Terms`: begins terms (`Beginnings`) and ends them, and holds them against the store's rows.

A term is a `Shard` in the loop; ending it drops the shard, and a new term makes a new one. There is no repair path
beside raise and load: when a commit's answer was lost, what the store holds is read again under a higher epoch.

A term ends because the store says that another has begun, because a commit's answer was lost, because its shard broke,
or because whoever decides who should lead says so: at once (`give_up`), or after all that it has begun was answered
(`hand_over`).
"""

from collections.abc import Mapping, Sequence
from typing import Final, Never, Protocol

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.shard import Shard, ShardOptions
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.core.writes import Write
from duecourse.server.leadership import Claim, Leadership
from duecourse.server.shards.beginnings import Beginnings
from duecourse.server.shards.lanes import CommitLanes
from duecourse.server.shards.loop import Loop
from duecourse.server.storage import ShardRow, Stale, StoreUnavailable, TaskStore
from duecourse.server.telemetry import logs
from duecourse.server.telemetry.metrics import Metrics

HAND_OVER_LIMIT: Final[Micros] = 250 * bounds.MILLISECOND
"""How long a shard that is handed over may take to answer what it has begun."""
HANDED_OVER: Final = "handed_over"

_log = logs.get("shards.terms")


class TermsChecked(Protocol):
    """Who is told that the node's terms were held against the store: the streams tell their workers."""

    def check_began(self) -> None:
        """Note that a check begins."""
        ...

    def check_succeeded(self) -> None:
        """Note that the store confirmed all terms that were led at the last `check_began` and still are."""
        ...


class Terms:
    """See the module's docstring. Implements `lanes.TermEnds` and `leadership.Taking`."""

    def __init__(
        self,
        store: TaskStore,
        loop: Loop,
        leadership: Leadership,
        options: ShardOptions,
        horizon: Micros,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._loop = loop
        self._leadership = leadership
        self._metrics = metrics
        self._lanes: CommitLanes
        self._unanswered_since: Micros | None = None
        """When the first check began that the store has not answered since."""
        self._beginnings = Beginnings(
            store,
            loop,
            leadership.coordination,
            leadership.superseded,
            leadership.ended,
            options,
            horizon,
            metrics,
        )

    def connect(self, lanes: CommitLanes) -> None:
        """Name the lanes whose writes end with a term."""
        self._lanes = lanes

    @property
    def loading(self) -> Mapping[ShardId, Epoch]:
        """Shards whose term was raised and that are being loaded."""
        return self._beginnings.loading

    def failing(self) -> frozenset[ShardId]:
        """Return the shards that could not be loaded several times in a row, lately, though the store answers."""
        return self._beginnings.failing()

    def store_missed_for(self) -> Micros:
        """Return for how long the store has not answered; 0 if it does."""
        return 0 if self._unanswered_since is None else self._loop.elapsed() - self._unanswered_since

    # Ending.

    def superseded(self, shard: Shard, answer: Stale, unapplied: Sequence[Write] = ()) -> None:
        """End a term because another has begun; `unapplied` were not applied."""
        number = shard.fence.shard
        if self._end(shard, "stale", f"epoch {answer.epoch}, holder {answer.holder.hex()}", (), unapplied):
            claim = self._beginnings.claims.get(number)
            if claim is not None and answer.holder in claim.holders:
                # A raise of ours whose answer had been lost has taken effect late.
                self._leadership.ended(number)
            else:
                self._leadership.superseded(number, answer)

    def uncertain(self, shard: Shard, detail: str, uncertain: Sequence[Write]) -> None:
        """End a term because the answer to `uncertain` was lost."""
        if self._end(shard, "unknown", detail, uncertain, ()):
            self._leadership.ended(shard.fence.shard)

    def failed(self, shard: Shard, unapplied: Sequence[Write]) -> None:
        """End the term of a shard that broke."""
        if self._end(shard, "failed", "", (), unapplied):
            self._beginnings.broke(shard.fence.shard)
            self._leadership.ended(shard.fence.shard)

    def give_up(self, shard: ShardId, reason: str, detail: str) -> None:
        """End a term, or what was to become one, at once."""
        self._beginnings.drop(shard)
        led = self._loop.shards.get(shard)
        if led is not None:
            self._end(led, reason, detail, (), ())

    async def hand_over(self, shard: ShardId) -> None:
        """End a term once what it has begun is answered; from now on it begins nothing."""
        began = self._loop.elapsed()
        led = self._loop.shards.get(shard)
        is_settled = led is None or await self._loop.settle(led, HAND_OVER_LIMIT)
        self.give_up(shard, HANDED_OVER, "")
        _log.info(
            "shard_handed_over",
            shard=shard,
            is_settled=is_settled,
            milliseconds=(self._loop.elapsed() - began) // bounds.MILLISECOND,
        )

    def _end(
        self, shard: Shard, reason: str, detail: str, uncertain: Sequence[Write], unapplied: Sequence[Write]
    ) -> bool:
        """Drop a shard, and what it still has in its lane; False if it was dropped before."""
        if not self._loop.end(shard, uncertain, [*unapplied, *self._lanes.withdraw(shard)]):
            return False
        self._metrics.terms_ended[reason] += 1
        if reason != HANDED_OVER:
            _log.warning("term_ended", shard=shard.fence.shard, epoch=shard.fence.epoch, reason=reason, detail=detail)
        return True

    # Beginning.

    def take(self, claims: Mapping[ShardId, Claim]) -> None:
        """Raise the epoch of shards and load them, in the background, until it succeeds or is refused."""
        self._beginnings.want(claims)

    async def run(self) -> Never:
        """Take what is wanted, for ever."""
        await self._beginnings.run()

    # Watching.

    async def watch(self, interval: Micros, checked: TermsChecked) -> Never:
        """Hold all terms against the store's rows, again and again: an idle leader notices, too."""
        while True:
            await self._loop.clock.sleep(interval)
            shards = list(self._loop.shards.values())
            checked.check_began()
            if self._unanswered_since is None:
                self._unanswered_since = self._loop.elapsed()
            try:
                rows = {row.shard: row for row in await self._store.shards()}
            except StoreUnavailable as error:
                _log.warning("terms_not_checked", detail=str(error))
                continue
            self._unanswered_since = None
            # Whose term has ended meanwhile has no part in it: a shard that was handed over may have another holder.
            still = [shard for shard in shards if self._loop.shards.get(shard.fence.shard) is shard]
            stale = [shard for shard in still if not _is_proven(shard, rows.get(shard.fence.shard))]
            for shard in stale:
                row = rows.get(shard.fence.shard)
                self.superseded(shard, Stale(row.epoch, row.holder) if row else Stale(Epoch(0), b""))
            if not stale:
                checked.check_succeeded()


def _is_proven(shard: Shard, row: ShardRow | None) -> bool:
    return row is not None and row.epoch == shard.fence.epoch and row.holder == shard.fence.holder
