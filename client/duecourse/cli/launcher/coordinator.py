"""`LocalEtcd`: an etcd of one member as a child process, for nodes of this machine to agree by who leads."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from duecourse.cli.launcher import ports
from duecourse.cli.launcher.children import Child, Nursery
from duecourse.cli.launcher.errors import LaunchError
from duecourse.model import bounds
from duecourse.timing.clock import Clock

if TYPE_CHECKING:
    from duecourse.server.etcd.embedded import Member

_LOOK_EVERY: Final = 20 * bounds.MILLISECOND
_READY_LIMIT: Final = 30 * bounds.SECOND
_STOP_LIMIT: Final = 10 * bounds.SECOND
_LOG_SHOWN: Final = 2_000


class LocalEtcd:
    """One member on a folder, on ports of its own at every start. What it knows is kept between runs."""

    def __init__(self, nursery: Nursery, clock: Clock, folder: Path) -> None:
        self._nursery = nursery
        self._clock = clock
        self._folder = folder
        self._log = folder / "etcd.log"
        self._member: Member | None = None
        self._process: Child | None = None

    @property
    def endpoint(self) -> str:
        """Where nodes reach it."""
        assert self._member is not None
        return self._member.endpoint

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it, and wait until it serves. Raises LaunchError."""
        from duecourse.server.etcd.embedded import EmbeddedEtcdError, Member

        self._folder.mkdir(parents=True, exist_ok=True)
        self._log.unlink(missing_ok=True)
        self._member = Member("etcd", self._folder, ports.free_port(), ports.free_port())
        try:
            command = self._member.command()
        except EmbeddedEtcdError as error:
            raise LaunchError(str(error)) from error
        self._process = self._nursery.spawn("etcd", command, output=self._log)
        await self._wait_until_it_serves(self._process)

    async def stop(self) -> None:
        """Ask it to end, and wait for that."""
        if self._process is not None:
            await self._process.stop(_STOP_LIMIT)

    def what_ended(self) -> str | None:
        """Tell, for people, that it has ended; None while it runs."""
        assert self._process is not None
        if self._process.is_running:
            return None
        return f"etcd {self._process.how_it_ended()}, see {self._log}"

    async def _wait_until_it_serves(self, process: Child) -> None:
        """Wait until it answers. Raises LaunchError if it has ended, or after the limit."""
        assert self._member is not None
        waited = 0
        while not await self._member.is_healthy():
            if not process.is_running:
                raise LaunchError(f"etcd {process.how_it_ended()}; the end of its log:\n{self._end_of_log()}")
            if waited >= _READY_LIMIT:
                raise LaunchError(f"etcd does not serve; the end of its log:\n{self._end_of_log()}")
            await self._clock.sleep(_LOOK_EVERY)
            waited += _LOOK_EVERY

    def _end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-_LOG_SHOWN:].strip()
