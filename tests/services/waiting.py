"""Waiting for a condition, with a limit: never for a duration."""

import asyncio
from collections.abc import Awaitable, Callable

from duecourse.model import bounds
from duecourse.timing.clock import SystemClock


async def until(condition: Callable[[], Awaitable[object]], within_seconds: float = 30) -> None:
    """Return once an asynchronous condition holds; raise TimeoutError if it does not in time."""
    clock = SystemClock()
    async with asyncio.timeout(within_seconds):
        while not await condition():
            await clock.sleep(10 * bounds.MILLISECOND)
