"""`Beginnings`: raises the epochs of shards and loads them, as their claims allow.

::

           ┌───────┐ raised, loaded                ┌─────┐ broke soon after
    want ─▶│ fresh │ ────────────────────────────▶ │ led │ ───────┐
           └───────┘                               └─────┘        │
             │  load failed      ┌────────┐ loaded    ▲           │
             └─────────────────▶ │ failed │ ──────────┘           │
                                 └────────┘ ◀─────────────────────┘

Fresh shards are begun some at a time, failed ones one by one beside them, each after a wait of its own that grows: a
shard that cannot be loaded keeps no other from being led. A store that does not answer a raise fails no shard; all wait
for it. Loads start after the raise has committed.
"""

import asyncio
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Never

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.events import HeldLoaded
from duecourse.server.core.shard import Shard, ShardOptions
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.leadership import Claim
from duecourse.server.shards.buckets import horizon_at, post_buckets
from duecourse.server.shards.corrupt import set_aside
from duecourse.server.shards.loop import Loop
from duecourse.server.storage import Raised, RaiseRefused, RaiseRequest, StoreUnavailable, TaskStore
from duecourse.server.telemetry import logs
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing import backoff

_log = logs.get("shards.terms")

FAILURES_TOLD: Final = 3
"""So many in a row, and the other nodes are told that this one cannot load a shard."""
FAILING_FOR: Final[Micros] = bounds.MINUTE
"""How long they are told, after the last failure."""

_TOGETHER: Final = 16
_HOLDERS_KEPT: Final = 16
"""Of a claim, for as long as a raise whose answer was lost can still take effect."""
_FIRST_RETRY: Final[Micros] = 50 * bounds.MILLISECOND
_LONGEST_RETRY: Final[Micros] = 2 * bounds.SECOND
_LONGEST_FAILED_RETRY: Final[Micros] = 10 * bounds.SECOND
_PROVEN: Final[Micros] = 10 * bounds.SECOND
"""A term that has lasted for so long shows that its shard can be loaded."""


def _delays(longest: Micros = _LONGEST_RETRY) -> Iterator[Micros]:
    return backoff.delays(_FIRST_RETRY, longest, random.Random())


@dataclass(slots=True)
class _Failure:
    """A shard that could not be loaded, or broke soon after."""

    count: int = 0
    last: Micros = 0
    due: Micros = 0
    loaded: Micros | None = None
    waits: Iterator[Micros] = field(default_factory=lambda: _delays(_LONGEST_FAILED_RETRY))


class Beginnings:
    """See the module's docstring."""

    def __init__(
        self,
        store: TaskStore,
        loop: Loop,
        coordination: str,
        refused: Callable[[ShardId, RaiseRefused], None],
        spent: Callable[[ShardId], None],
        options: ShardOptions,
        horizon: Micros,
        metrics: Metrics,
    ) -> None:
        """`refused` is told of raises that the store refuses, `spent` of claims that have no epoch left."""
        self.claims: dict[ShardId, Claim] = {}
        """Of all shards that are led or to be led."""
        self.loading: dict[ShardId, Epoch] = {}
        """Shards whose term was raised and that are being loaded."""
        self._store = store
        self._loop = loop
        self._coordination = coordination
        self._refused = refused
        self._spent = spent
        self._options = options
        self._horizon = horizon
        self._metrics = metrics
        self._fresh: set[ShardId] = set()
        self._waiting: set[ShardId] = set()
        """Failed shards that are to be tried again."""
        self._failures: dict[ShardId, _Failure] = {}
        self._raising: dict[ShardId, bytes] = {}
        """The holders of terms that are being raised; the same for all tries at one."""
        self._wake_fresh = asyncio.Event()
        self._wake_failed = asyncio.Event()

    def want(self, claims: Mapping[ShardId, Claim]) -> None:
        """Begin terms under claims, in the background, until it succeeds or is refused, or they are dropped."""
        for shard, claim in claims.items():
            if self.claims.get(shard) is not claim:
                self._raising.pop(shard, None)
            self.claims[shard] = claim
            self._leave(shard)
            failure = self._failures.get(shard)
            if failure is None or self._is_proven(failure):
                self._failures.pop(shard, None)
                self._fresh.add(shard)
            else:
                self._waiting.add(shard)
        self._wake_fresh.set()
        self._wake_failed.set()

    def drop(self, shard: ShardId) -> None:
        """Begin no term of a shard any more; one that is being begun is not handed to the loop."""
        self.claims.pop(shard, None)
        self._raising.pop(shard, None)
        self._leave(shard)

    def broke(self, shard: ShardId) -> None:
        """Note that a term of a shard ended by a fault: it is like a load that failed, if it had just begun."""
        failure = self._failures.get(shard)
        if failure is None or self._is_proven(failure):
            failure = self._failures[shard] = _Failure()
        self._count(failure)

    def failing(self) -> frozenset[ShardId]:
        """Return the shards that failed several times in a row, and lately."""
        now = self._loop.elapsed()
        return frozenset(
            shard
            for shard, failure in self._failures.items()
            if failure.count >= FAILURES_TOLD and now - failure.last < FAILING_FOR and not self._is_proven(failure)
        )

    async def run(self) -> Never:
        """Begin what is wanted, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._begin_fresh(), name="fresh terms")
            group.create_task(self._begin_failed(), name="failed terms")
        raise AssertionError("both go on for ever")

    async def _begin_fresh(self) -> Never:
        waits = _delays()
        while True:
            while not self._fresh:
                self._wake_fresh.clear()
                await self._wake_fresh.wait()
            if await self._try(sorted(self._fresh)[:_TOGETHER]):
                waits = _delays()
            else:
                await self._loop.clock.sleep(next(waits))

    async def _begin_failed(self) -> Never:
        waits = _delays()
        while True:
            shard = await self._next_failed()
            if await self._try([shard]):
                waits = _delays()
            else:
                await self._loop.clock.sleep(next(waits))

    async def _next_failed(self) -> ShardId:
        while True:
            self._wake_failed.clear()
            if self._waiting:
                shard = min(self._waiting, key=lambda shard: self._failures[shard].due)
                left = self._failures[shard].due - self._loop.elapsed()
                if left <= 0:
                    return shard
                await self._loop.clock.sleep(min(left, _FIRST_RETRY))
            else:
                await self._wake_failed.wait()

    async def _try(self, shards: Sequence[ShardId]) -> bool:
        """Raise and load; False if the store does not answer, so that it is of no use to go on with others at once."""
        claims = self._raisable(shards)
        try:
            raised = await self._raise(claims)
        except StoreUnavailable as error:
            _log.warning("shards_not_taken", shards=len(claims), detail=str(error))
            return False
        try:
            if raised:
                await self._load(raised, claims)
        except Exception as error:
            await self._load_failed(raised, error)
        finally:
            for shard in raised:
                self.loading.pop(shard, None)
        return True

    def _raisable(self, shards: Iterable[ShardId]) -> dict[ShardId, Claim]:
        claims = {}
        for shard in shards:
            claim = self.claims[shard]
            if claim.is_spent:
                self._leave(shard)
                self._spent(shard)
            else:
                claims[shard] = claim
        return claims

    async def _raise(self, claims: Mapping[ShardId, Claim]) -> dict[ShardId, Raised]:
        requests = []
        for shard, claim in claims.items():
            holder = self._raising.setdefault(shard, os.urandom(16))
            # Once a term was begun under a claim, a further raise must find one of ours in the row.
            only_over = (*claim.holders, holder) if claim.holders else None
            requests.append(RaiseRequest(shard, holder, claim.next_epoch(), only_over))
        if not requests:
            return {}
        answers = await self._store.raise_epochs(self._coordination, requests, self._loop.clock.now().latest)
        raised = {}
        for shard, answer in answers.items():
            claim = claims[shard]
            is_ours = self.claims.get(shard) is claim
            if isinstance(answer, Raised):
                claim.holders = (*claim.holders, answer.fence.holder)[-_HOLDERS_KEPT:]
                if is_ours:
                    raised[shard] = answer
                    self.loading[shard] = answer.fence.epoch
                    self._raising.pop(shard, None)
            elif is_ours:
                self._leave(shard)
                self._refused(shard, answer)
        return raised

    async def _load(self, raised: Mapping[ShardId, Raised], claims: Mapping[ShardId, Claim]) -> None:
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
            if self.claims.get(number) is claims[number]
        }
        if not begun:
            return
        self._loop.begin(begun.values())
        for number, shard in begun.items():
            self._loop.post_to(
                shard,
                HeldLoaded([task for task in held.tasks if task.shard == number], raised[number].raises),
            )
            self._leave(number)
            if (failure := self._failures.get(number)) is not None:
                failure.loaded = now.elapsed
        post_buckets(self._loop, begun, waiting)
        self._metrics.terms_begun += len(begun)
        _log.info(
            "terms_begun",
            shards=len(begun),
            held=len(held.tasks),
            near=len(waiting.tasks),
            milliseconds=(now.elapsed - began) // bounds.MILLISECOND,
        )
        await set_aside(self._store, self._loop, self._metrics, [*held.corrupt, *waiting.corrupt])

    async def _load_failed(self, raised: Mapping[ShardId, Raised], error: Exception) -> None:
        """Have each of the shards tried again alone. It is the shard's fault if the store answers others."""
        unloaded = [shard for shard in raised if shard in self.claims and shard not in self._loop.shards]
        if isinstance(error, StoreUnavailable):
            _log.warning("shards_not_taken", shards=len(unloaded), detail=str(error))
        else:
            _log.error("shards_not_loaded", shards=unloaded, exc_info=error)
        is_store_away = isinstance(error, StoreUnavailable) and not await self._does_store_answer()
        for shard in unloaded:
            failure = self._failures.setdefault(shard, _Failure())
            if len(raised) == 1 and not is_store_away:
                self._count(failure)
            else:
                failure.due = self._loop.elapsed()
            if shard in self.claims:
                self._fresh.discard(shard)
                self._waiting.add(shard)
        self._wake_failed.set()

    async def _does_store_answer(self) -> bool:
        try:
            await self._store.shards()
        except StoreUnavailable:
            return False
        return True

    def _count(self, failure: _Failure) -> None:
        now = self._loop.elapsed()
        failure.count += 1
        failure.last = now
        failure.due = now + next(failure.waits)
        failure.loaded = None

    def _is_proven(self, failure: _Failure) -> bool:
        return failure.loaded is not None and self._loop.elapsed() - failure.loaded > _PROVEN

    def _leave(self, shard: ShardId) -> None:
        """Note that nothing is to be tried with a shard for now."""
        self._fresh.discard(shard)
        self._waiting.discard(shard)
