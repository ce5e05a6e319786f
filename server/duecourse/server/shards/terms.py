"""`Terms`: begins terms (raise, load, hand to the loop) and ends them.

A term is a `Shard` in the loop; ending it drops the shard, and a new term makes a new one. There is no repair path
beside raise and load: when a commit's answer was lost, what the store holds is read again under a higher epoch.

Loads start after the raise has committed. Raises and loads that fail are tried again with a growing, jittered wait.
"""

import asyncio
import os
import random
from collections.abc import Mapping, Sequence
from typing import Never, Protocol

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.events import HeldLoaded
from duecourse.server.core.shard import Shard, ShardOptions
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.core.writes import Write
from duecourse.server.leadership import Leadership
from duecourse.server.shards.buckets import horizon_at, post_buckets
from duecourse.server.shards.corrupt import set_aside
from duecourse.server.shards.lanes import CommitLanes
from duecourse.server.shards.loop import Loop
from duecourse.server.storage import Raised, RaiseRefused, RaiseRequest, ShardRow, Stale, StoreUnavailable, TaskStore
from duecourse.server.telemetry import logs
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing import backoff

_log = logs.get("shards.terms")

_FIRST_RETRY: Micros = 50 * bounds.MILLISECOND
_LONGEST_RETRY: Micros = 2 * bounds.SECOND
_HOLDERS_KEPT = 16
"""Of a shard, for as long as a raise whose answer was lost can still take effect."""


class TermsChecked(Protocol):
    """Who is told that the node's terms were held against the store: the streams tell their workers."""

    def check_began(self) -> None:
        """Note that a check begins."""
        ...

    def check_succeeded(self) -> None:
        """Note that the store confirmed all terms as of the last `check_began`."""
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
        self.loading: dict[ShardId, Epoch] = {}
        """Shards whose term was raised and that are being loaded."""
        self._store = store
        self._loop = loop
        self._leadership = leadership
        self._options = options
        self._horizon = horizon
        self._metrics = metrics
        self._lanes: CommitLanes
        self._wanted: set[ShardId] = set()
        self._raising: dict[ShardId, bytes] = {}
        """The holders of terms that are being raised; the same for all tries at one."""
        self._held: dict[ShardId, tuple[bytes, ...]] = {}
        """The holders of this process's terms: once it had one, a further raise must find one of ours in the row."""
        self._wake = asyncio.Event()

    def connect(self, lanes: CommitLanes) -> None:
        """Name the lanes whose writes end with a term."""
        self._lanes = lanes

    # Ending.

    def superseded(self, shard: Shard, answer: Stale, unapplied: Sequence[Write] = ()) -> None:
        """End a term because another has begun; `unapplied` were not applied."""
        number = shard.fence.shard
        if self._end(shard, "stale", f"epoch {answer.epoch}, holder {answer.holder.hex()}", (), unapplied):
            if answer.holder in self._held.get(number, ()):
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
            self._leadership.ended(shard.fence.shard)

    def _end(
        self, shard: Shard, reason: str, detail: str, uncertain: Sequence[Write], unapplied: Sequence[Write]
    ) -> bool:
        """Drop a shard, and what it still has in its lane; False if it was dropped before."""
        if not self._loop.end(shard, uncertain, [*unapplied, *self._lanes.withdraw(shard)]):
            return False
        self._metrics.terms_ended[reason] += 1
        _log.warning("term_ended", shard=shard.fence.shard, epoch=shard.fence.epoch, reason=reason, detail=detail)
        return True

    # Beginning.

    def take(self, shards: Sequence[ShardId]) -> None:
        """Raise the epoch of shards and load them, in the background, until it succeeds or is refused."""
        self._wanted.update(shards)
        self._wake.set()

    async def run(self) -> Never:
        """Take what is wanted, for ever."""
        waits = backoff.delays(_FIRST_RETRY, _LONGEST_RETRY, random.Random())
        while True:
            while not self._wanted:
                self._wake.clear()
                await self._wake.wait()
            wanted = sorted(self._wanted)
            try:
                raised = await self._raise(wanted)
                if raised:
                    await self._load(raised)
                waits = backoff.delays(_FIRST_RETRY, _LONGEST_RETRY, random.Random())
            except StoreUnavailable as error:
                _log.warning("shards_not_taken", shards=len(wanted), detail=str(error))
                await self._loop.clock.sleep(next(waits))
            finally:
                self.loading.clear()

    async def _raise(self, wanted: Sequence[ShardId]) -> Mapping[ShardId, Raised]:
        requests = []
        for shard in wanted:
            holder = self._raising.setdefault(shard, os.urandom(16))
            held = self._held.get(shard)
            requests.append(RaiseRequest(shard, holder, None, held and (*held, holder)))
        answers = await self._store.raise_epochs(self._leadership.coordination, requests, self._loop.clock.now().latest)
        raised = {}
        for shard, answer in answers.items():
            if isinstance(answer, RaiseRefused):
                self._wanted.discard(shard)
                self._leadership.superseded(shard, answer)
            else:
                raised[shard] = answer
                self.loading[shard] = answer.fence.epoch
                self._held[shard] = (*self._held.get(shard, ()), self._raising.pop(shard))[-_HOLDERS_KEPT:]
        return raised

    async def _load(self, raised: Mapping[ShardId, Raised]) -> None:
        began = self._loop.elapsed()
        shards = sorted(raised)
        horizon = horizon_at(self._loop.clock.now().latest, self._horizon)
        held = await self._store.load_held(shards)
        waiting = await self._store.load_buckets(shards, 0, horizon, self._options.head)
        self._metrics.loads["term"] += 1
        now = self._loop.clock.now()
        begun = {
            number: Shard(term.fence, term.first_sequence, horizon, self._options, now)
            for number, term in raised.items()
        }
        self._loop.begin(begun.values())
        for number, shard in begun.items():
            self._loop.post_to(
                shard,
                HeldLoaded([task for task in held.tasks if task.shard == number], raised[number].raises),
            )
        post_buckets(self._loop, begun, waiting)
        self._wanted.difference_update(shards)
        self._metrics.terms_begun += len(begun)
        _log.info(
            "terms_begun",
            shards=len(begun),
            held=len(held.tasks),
            near=len(waiting.tasks),
            milliseconds=(self._loop.elapsed() - began) // bounds.MILLISECOND,
        )
        await set_aside(self._store, self._loop, self._metrics, [*held.corrupt, *waiting.corrupt])

    # Watching.

    async def watch(self, interval: Micros, checked: TermsChecked) -> Never:
        """Hold all terms against the store's rows, again and again: an idle leader notices, too."""
        while True:
            await self._loop.clock.sleep(interval)
            shards = list(self._loop.shards.values())
            checked.check_began()
            try:
                rows = {row.shard: row for row in await self._store.shards()}
            except StoreUnavailable as error:
                _log.warning("terms_not_checked", detail=str(error))
                continue
            stale = [shard for shard in shards if not _is_proven(shard, rows.get(shard.fence.shard))]
            for shard in stale:
                row = rows.get(shard.fence.shard)
                self.superseded(shard, Stale(row.epoch, row.holder) if row else Stale(Epoch(0), b""))
            if not stale:
                checked.check_succeeded()


def _is_proven(shard: Shard, row: ShardRow | None) -> bool:
    return row is not None and row.epoch == shard.fence.epoch and row.holder == shard.fence.holder
