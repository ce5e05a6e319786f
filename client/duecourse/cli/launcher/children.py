"""Child processes: started, watched, ended, and never left behind.

A `Nursery` starts them, each in a session of its own, so that Ctrl-C in a terminal reaches only us, who then end them
in good order. It also runs the leash, which ends them should we die without a word.
"""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import Clock, SystemClock

_LOOK_EVERY: Final = 10 * bounds.MILLISECOND


class Child:
    """A process that we started."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], nursery: "Nursery", clock: Clock) -> None:
        self.name = name
        self._process = process
        self._nursery = nursery
        self._clock = clock
        self._is_held = True

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        code = self._process.poll()
        if code is not None and self._is_held:
            self._is_held = False
            self._nursery.drop(str(self.pid))
        return code

    @property
    def is_running(self) -> bool:
        """It has not ended."""
        return self.returncode is None

    @property
    def stdin(self) -> IO[bytes]:
        """Its standard input, if it was asked for."""
        assert self._process.stdin is not None
        return self._process.stdin

    async def wait(self) -> int:
        """Return its return code once it has ended."""
        while (code := self.returncode) is None:
            await self._clock.sleep(_LOOK_EVERY)
        return code

    async def stop(self, grace: Micros) -> None:
        """Ask it to end, and kill it if it has not after the grace, or when we are cancelled."""
        if not self.is_running:
            return
        self._process.send_signal(signal.SIGTERM)
        waited = 0
        try:
            while self.is_running and waited < grace:
                await self._clock.sleep(_LOOK_EVERY)
                waited += _LOOK_EVERY
        finally:
            self.kill()

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self.is_running:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Kill it if it still runs, and let go of its pipe."""
        self.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def how_it_ended(self) -> str:
        """Describe its end for people."""
        code = self.returncode
        if code is None:
            return "still runs"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class Nursery:
    """Starts children; as a context manager it ends with none of them left."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._children: list[Child] = []
        self._leash: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # Without site packages and environment: all it needs is the standard library, and it has to start quickly.
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("leash.py"))]
        self._leash = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, cwd="/"
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            child.close()
        if self._leash is not None:
            assert self._leash.stdin is not None
            self._leash.stdin.close()
            self._leash.wait()
            self._leash = None

    def spawn(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
        takes_input: bool = False,
    ) -> Child:
        """Start a child, in our environment if none is given.

        Its output goes to a file, or where ours goes; one that `takes_input` has a pipe as stdin.
        """
        log = output.open("ab") if output else None
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE if takes_input else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        finally:
            if log is not None:
                log.close()
        self.hold(str(process.pid), signal.SIGTERM)
        child = Child(name, process, self, self._clock)
        self._children.append(child)
        return child

    def hold(self, who: str, number: signal.Signals) -> None:
        """Have the leash end somebody: a process id, or the file that will hold one."""
        self._tell(f"hold {int(number)} {who}")

    def drop(self, who: str) -> None:
        """Tell the leash that somebody has ended."""
        self._tell(f"drop {who}")

    def _tell(self, command: str) -> None:
        if self._leash is None:
            return
        assert self._leash.stdin is not None
        try:
            self._leash.stdin.write(command.encode() + b"\n")
            self._leash.stdin.flush()
        except BrokenPipeError:
            # Somebody killed the leash; we still end our children ourselves.
            pass
