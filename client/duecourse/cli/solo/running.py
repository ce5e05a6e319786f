"""Runs a command that has something to clean up: a signal cancels it, a second one cuts the cleaning up short."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, Final

INTERRUPTED: Final = 130
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(main: Coroutine[Any, Any, int], *, when_interrupted: int = INTERRUPTED) -> int:
    """Run `main` and return its exit code, or `when_interrupted`."""
    try:
        return asyncio.run(_run(main))
    except asyncio.CancelledError:
        return when_interrupted


async def _run(main: Coroutine[Any, Any, int]) -> int:
    this = asyncio.current_task()
    assert this is not None
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, this.cancel)
    return await main
