"""`Clock`: all that Duecourse knows of time, so that a test can own it.

`SystemClock` reads the wall clock and CLOCK_BOOTTIME. It never runs backwards: a wall clock that was set back makes it
stand still until the wall clock has caught up, while elapsed time goes on. `ManualClock` moves only when told, and has
fired every timer that became due before `advance` returns.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol

from duecourse.model import bounds
from duecourse.model.instants import Micros, Now


class Clock(Protocol):
    """What time it is, and sleeping until it is later."""

    def now(self) -> Now:
        """Read the clock."""
        ...

    def elapsed(self) -> Micros:
        """Read only the elapsed time, which is cheaper."""
        ...

    async def sleep(self, duration: Micros) -> None:
        """Return when `duration` has elapsed."""
        ...


class LocalClock(Protocol):
    """What a machine knows of time by itself."""

    def wall(self) -> Micros:
        """Read the wall clock as it is, UTC: it may be off, and may be set forward and back."""
        ...

    def elapsed(self) -> Micros:
        """Read the elapsed time."""
        ...

    async def sleep(self, duration: Micros) -> None:
        """Return when `duration` has elapsed."""
        ...


class SystemClock:
    """The machine's clock. Implements `Clock` and `LocalClock`."""

    def __init__(self, error: Callable[[], Micros] = lambda: 0) -> None:
        """Prepare; `error` makes the wall clock wrong by so much, for tests."""
        self._error = error
        self._last = 0

    def now(self) -> Now:
        """Read the wall clock, kept from running backwards, and the time since boot."""
        self._last = utc = max(self._last, self.wall())
        return Now(utc, utc, self.elapsed())

    def wall(self) -> Micros:
        """Read the wall clock as it is."""
        return time.time_ns() // 1_000 + self._error()

    def elapsed(self) -> Micros:
        """Read the time since boot, suspends included."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000

    async def sleep(self, duration: Micros) -> None:
        """Sleep by the event loop, in steps of at most a second, until the elapsed time says so."""
        until = self.elapsed() + duration
        while (left := until - self.elapsed()) > 0:
            await asyncio.sleep(min(left, bounds.LONGEST_SLEEP) / bounds.SECOND)


class ManualClock:
    """A clock for tests: it stands still until `advance` moves it."""

    def __init__(self, utc: Micros = 1_800_000_000 * bounds.SECOND) -> None:
        self._utc = utc
        self._elapsed = 0
        self._order = itertools.count()
        self._sleepers: list[tuple[Micros, int, asyncio.Future[None]]] = []

    def now(self) -> Now:
        """Return the time that it was moved to."""
        return Now(self._utc, self._utc, self._elapsed)

    def elapsed(self) -> Micros:
        """Return the elapsed time that it was moved to."""
        return self._elapsed

    async def sleep(self, duration: Micros) -> None:
        """Return once the clock was advanced far enough."""
        if duration <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed + duration, next(self._order), woken))
        await woken

    async def advance(self, duration: Micros) -> None:
        """Move on, waking sleepers in the order of their times and letting each run before the next."""
        until = self._elapsed + duration
        while self._sleepers and self._sleepers[0][0] <= until:
            at, _, woken = heapq.heappop(self._sleepers)
            self._move_to(at)
            if not woken.done():
                woken.set_result(None)
            await asyncio.sleep(0)
        self._move_to(until)
        await asyncio.sleep(0)

    def jump(self, offset: Micros) -> None:
        """Set the cluster clock forward or back without any time elapsing."""
        self._utc += offset

    def _move_to(self, elapsed: Micros) -> None:
        self._utc += elapsed - self._elapsed
        self._elapsed = elapsed
