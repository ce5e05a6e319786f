"""Processes that are stopped in their tracks, as if they got no time to run."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from duecourse.model import bounds
from duecourse.timing.clock import SystemClock

_STOPPED: Final = frozenset("TZX")
"""The states of a thread that does nothing any more: stopped, or ended."""


def freeze(pid: int) -> bool:
    """Stop a process, and wait until none of its threads runs: they stop one by one. False: it has ended."""
    if not _told(pid, signal.SIGSTOP):
        return False
    clock = SystemClock()
    until = clock.elapsed() + 10 * bounds.SECOND
    while not (states := _states(pid)) <= _STOPPED:
        assert clock.elapsed() < until, f"process {pid} does not stop: {states}"
        # Not awaited: nothing is to happen in between.
        os.sched_yield()
    return True


def thaw(pid: int) -> None:
    """Let a process go on, if it has not ended."""
    _told(pid, signal.SIGCONT)


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """Stop processes, and let them go on; who has ended meanwhile is passed over."""
    try:
        stopped = [pid for pid in pids if freeze(pid)]
        yield
        states = set().union(*map(_states, stopped))
        # One that was about to end has ended, and its parent is frozen.
        assert "T" in states, "none was stopped"
        assert states <= _STOPPED, states
    finally:
        for pid in pids:
            thaw(pid)


def _told(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False if there is no such process any more."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _states(pid: int) -> set[str]:
    """Return the states of a process's threads, of which there is none once it has ended."""
    states = set()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        # It may end while it is looked at.
        with suppress(OSError):
            states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states
