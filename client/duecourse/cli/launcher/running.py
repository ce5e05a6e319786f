"""Runs a command that has something to clean up: a signal cancels it, a second one cuts the cleaning up short."""

import asyncio
import importlib
import importlib.util
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final

from duecourse.cli import exits, output

INTERRUPTED: Final = 130
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(main: Coroutine[Any, Any, int], *, when_interrupted: int = INTERRUPTED) -> int:
    """Run `main` and return its exit code, or `when_interrupted`."""
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_run(main))
    except asyncio.CancelledError:
        return when_interrupted


async def _run(main: Coroutine[Any, Any, int]) -> int:
    this = asyncio.current_task()
    assert this is not None
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        # A hangup that our starter had us ignore is still ignored.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, _stop, this)
    return await main


def _stop(main: asyncio.Task[Any]) -> None:
    if not main.cancelling():
        output.tell("stopping")
    main.cancel()


def fail(error: Exception) -> exits.ExitCode:
    """Tell why it did not work; the end of a log, below the reason, keeps its lines."""
    reason, *log = str(error).splitlines()
    code = exits.fail(reason)
    for line in log:
        output.tell(line)
    return code


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the faster event loop, if it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory
