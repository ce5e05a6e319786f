"""How long a call is tried, and how it waits between tries.

A call has one deadline for all its tries. A try gets half of the time that is left, so that a lost answer leaves time
to ask again, and none is begun that could hardly be answered any more: it would only turn a certain failure into an
uncertain one. What is sent again is the same request with the same ids. Waits double and are drawn at random; a server
that names a delay is not asked before it is over. A call that is given up since its leader was replaced has lost its
answer.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Final, TypeVar

import grpc

from duecourse.client import errors
from duecourse.client.routing import Call, Route, Router
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing import backoff
from duecourse.timing.clock import Clock

_FIRST_WAIT: Final = 50 * bounds.MILLISECOND
_LONGEST_WAIT: Final = 2 * bounds.SECOND
_SHORTEST_TRY: Final = 500 * bounds.MILLISECOND
_RETRY_AFTER_SPREAD: Final = 0.2
_NOT_LEADER: Final = "NOT_SHARD_LEADER"

_Answer = TypeVar("_Answer")


class Patience:
    """What is left of one call's deadline, and what its tries have told so far."""

    def __init__(
        self, clock: Clock, timeout: Micros, source: random.Random, *, changes: bool, at_least: Micros
    ) -> None:
        """Begin to count. `changes`: the call changes something; `at_least`: what a try needs to be answered."""
        self._clock = clock
        self._until = clock.elapsed() + timeout
        self._source = source
        self._waits = backoff.delays(_FIRST_WAIT, _LONGEST_WAIT, source)
        self._changes = changes
        self._shortest = max(_SHORTEST_TRY, at_least)
        self._is_uncertain = False

    def try_seconds(self) -> float:
        """Return how long the next try may take."""
        left = self._until - self._clock.elapsed()
        return max(0, min(left, max(left // 2, self._shortest))) / bounds.SECOND

    def note(self, failure: errors.DuecourseError) -> None:
        """Remember that an answer was lost, if it was."""
        if isinstance(failure, errors.OutcomeUncertain):
            self._is_uncertain = True

    async def allows_retry(self, failure: errors.DuecourseError) -> bool:
        """Wait before the next try; False at once if it is not worth one, or there is no time to have it answered."""
        if not failure.is_worth_retrying:
            return False
        self.note(failure)
        wait = next(self._waits)
        if failure.retry_after is not None:
            asked = int(failure.retry_after.total_seconds() * bounds.SECOND)
            wait = max(wait, int(asked * (1 + _RETRY_AFTER_SPREAD * self._source.random())))
        if self._clock.elapsed() + wait + self._shortest > self._until:
            return False
        await self._clock.sleep(wait)
        return True

    def verdict(self, failure: errors.DuecourseError) -> errors.DuecourseError:
        """Turn the last failure into what all tries together say: one lost answer leaves the outcome open."""
        if self._changes and self._is_uncertain and isinstance(failure, errors.Unavailable):
            failure = failure.as_kind(errors.OutcomeUncertain)
        elif not self._changes and type(failure) is errors.OutcomeUncertain:
            failure = failure.as_kind(errors.Unavailable)
        failure.is_of_change = self._changes
        return failure


class Caller:
    """Makes calls until they are answered, refused, or out of time."""

    def __init__(self, router: Router, clock: Clock, source: random.Random) -> None:
        self._router = router
        self._clock = clock
        self._source = source

    def patience(self, timeout: Micros, *, changes: bool, at_least: Micros = 0) -> Patience:
        """Begin a call's deadline."""
        return Patience(self._clock, timeout, self._source, changes=changes, at_least=at_least)

    async def call(
        self, attempt: Callable[[Route, float], Call[_Answer]], patience: Patience, slot: int | None = None
    ) -> _Answer:
        """Call `attempt` with a way and a time-out in seconds until it answers; raise what all tries came to.

        With a `slot` the way is that to its leader. What waits between two tries when the client is closed has failed.
        """
        hint = ""
        cancelled_before = _times_cancelled()
        while True:
            route = self._router.pick(slot, hint)
            cause: BaseException
            failure: errors.DuecourseError
            call = attempt(route, patience.try_seconds())
            self._router.begin(route, call, slot)
            try:
                return await call
            except grpc.aio.AioRpcError as error:
                cause, failure = error, errors.from_call(error, route.address)
            except asyncio.CancelledError as cancelled:
                if _times_cancelled() > cancelled_before or not self._router.has_given_up(call):
                    raise
                cause = cancelled
                failure = errors.OutcomeUncertain(f"{route.address} did not answer before another node took its place")
            finally:
                self._router.end(route, call)
            hint = failure.metadata.get("leader", "") if failure.reason == _NOT_LEADER else ""
            if failure.is_worth_retrying and not isinstance(failure, errors.Overloaded):
                # A reason is the node's own word: it has answered.
                is_silent = isinstance(failure, errors.OutcomeUncertain) and not failure.reason
                self._router.avoid(route, is_silent=is_silent)
            if not await patience.allows_retry(failure) or self._router.is_closed:
                try:
                    raise patience.verdict(failure) from cause
                finally:
                    del failure, cause  # their tracebacks refer to this frame


def _times_cancelled() -> int:
    """Count how often the caller's task was cancelled: what still cleans up after that may make calls, too."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
