"""Waiting for a condition, with a limit, and running services for as long as a test needs them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import SystemClock

_POLL = 5 * bounds.MILLISECOND
_clock = SystemClock()


async def until(condition: Callable[[], object], limit: Micros = 10 * bounds.SECOND) -> Micros:
    """Wait until a condition holds, and return how long that took."""
    start = _clock.elapsed()
    while not condition():
        waited = _clock.elapsed() - start
        assert waited < limit, f"not within {limit / bounds.SECOND} s"
        await _clock.sleep(_POLL)
    return _clock.elapsed() - start


async def eventually(condition: Callable[[], Awaitable[object]], limit: Micros = 30 * bounds.SECOND) -> None:
    """Wait until a condition that has to be asked for holds."""
    start = _clock.elapsed()
    while not await condition():
        assert _clock.elapsed() - start < limit, f"not within {limit / bounds.SECOND} s"
        await _clock.sleep(2 * _POLL)


@asynccontextmanager
async def running(*services: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run services that do not end by themselves."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(service) for service in services]
        yield
        for task in tasks:
            task.cancel()
