"""Ends the processes that another process started, when that one is gone, even by SIGKILL.

Run as a program, it reads from its standard input, a pipe whose other end only the owner holds:

    hold SIGNAL WHO     WHO is a process id, or the path of a file whose first line will be one
    drop WHO            it has ended; forget it

At the end of the input the owner has died or is done. Whoever is still held gets its signal, the last held first, and
what has not ended after the grace is killed. A file that is older than this program names a process of the past.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

GRACE_SECONDS: Final = 8.0
_APPEARANCE_SECONDS: Final = 2.0
"""How long a file that does not exist yet is looked for: the owner may have died while its writer started."""
_LOOK_EVERY: Final = 0.05


def gather(commands: Iterable[str]) -> dict[str, signal.Signals]:
    """Follow the owner's commands until they end; returns who is still held, and by what signal each is ended."""
    held: dict[str, signal.Signals] = {}
    for command in commands:
        match command.rstrip("\n").split(" ", 2):
            case ["hold", number, who]:
                held[who] = signal.Signals(int(number))
            case ["drop", who]:
                held.pop(who, None)
            case _:
                raise ValueError(f"not a command: {command!r}")
    return held


def end(held: dict[str, signal.Signals], born: float, grace_seconds: float = GRACE_SECONDS) -> None:
    """End all of them: each by its signal, and after the grace by SIGKILL. `born`: when the first could be held."""
    asked: dict[str, int] = {}
    began = _seconds()
    while held and (waited := _seconds() - began) < grace_seconds:
        for who, number in reversed(list(held.items())):
            pid = asked.get(who) or _pid_of(who, born)
            if pid is None:
                if who.isdigit() or waited > _APPEARANCE_SECONDS:
                    del held[who]
            elif not _is_alive(pid):
                del held[who]
            elif who not in asked:
                asked[who] = pid
                _send(pid, number)
        select.select([], [], [], _LOOK_EVERY)
    for pid in (asked[who] for who in held if who in asked):
        _send(pid, signal.SIGKILL)


def _pid_of(who: str, born: float) -> int | None:
    if who.isdigit():
        return int(who)
    try:
        file = Path(who)
        return int(file.read_text().split("\n", 1)[0]) if file.stat().st_mtime > born - 1 else None
    except (OSError, ValueError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # A process that has ended but that nobody reaped still takes signals.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return not Path("/proc/self").exists()


def _send(pid: int, number: signal.Signals) -> None:
    try:
        # Each leads a session of its own; whoever it started goes with it.
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def _seconds() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def main() -> None:
    """Hold until the owner is gone, then end what it left."""
    born = time.clock_gettime(time.CLOCK_REALTIME)
    # Signals of the terminal are for the owner; this one goes last.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end(gather(sys.stdin), born)


if __name__ == "__main__":
    main()
