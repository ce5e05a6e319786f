"""`LocalNode`: a node as a child process that can be killed and started again, on the same ports."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from duecourse.cli.launcher import ports
from duecourse.cli.launcher.children import Child, Nursery
from duecourse.cli.launcher.errors import LaunchError
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import Clock

_LOOK_EVERY: Final = 10 * bounds.MILLISECOND
_READY_LIMIT: Final = 60 * bounds.SECOND
_LOG_SHOWN: Final = 2_000
# Where a node's neighbours are is ours to say, whatever the environment says of another cluster.
_NOT_INHERITED: Final = ("DUECOURSE_POSTGRES_", "DUECOURSE_ETCD_", "DUECOURSE_ADVERTISE")


class LocalNode:
    """One node on this machine."""

    def __init__(
        self, nursery: Nursery, clock: Clock, name: str, api_port: int, admin_port: int, log: Path | None
    ) -> None:
        """Take its ports, and the file of its log: without one, its output goes where ours goes."""
        self.name = name
        self.api_port = api_port
        self.admin_port = admin_port
        self._nursery = nursery
        self._clock = clock
        self._log = log
        self._process: Child | None = None
        self._began: Micros = 0

    @property
    def address(self) -> str:
        """Where clients and workers reach it."""
        return f"{ports.HOST}:{self.api_port}"

    @property
    def process(self) -> Child:
        """Its process, the latest one."""
        assert self._process is not None
        return self._process

    def launch(self, settings: Mapping[str, str]) -> None:
        """Start its process, with settings by name beside those of its place."""
        self._began = self._clock.elapsed()
        own = {
            "node_id": self.name,
            "api_listen": self.address,
            "admin_listen": f"{ports.HOST}:{self.admin_port}",
            "peer_listen": f"{ports.HOST}:0",
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        # By the environment: everybody on the machine can read a command line, and some of it is secret.
        environment = {f"DUECOURSE_{name.upper()}": value for name, value in (own | dict(settings)).items()}
        self._process = self._nursery.spawn(
            self.name,
            [sys.executable, "-m", "duecourse.cli.main", "server"],
            environment=inherited | environment,
            output=self._log,
        )

    async def ready(self) -> Micros:
        """Wait until it serves; return how long that took since its launch. Raises LaunchError."""
        while not await ports.is_ready(self.admin_port):
            if (ended := self.what_ended()) is not None:
                raise LaunchError(ended)
            if self._clock.elapsed() - self._began > _READY_LIMIT:
                raise LaunchError(f"{self.name} is not ready after a minute{self._end_of_log()}")
            await self._clock.sleep(_LOOK_EVERY)
        return self._clock.elapsed() - self._began

    async def stop(self) -> None:
        """Ask it to end, and wait for that."""
        if self._process is not None:
            await self._process.stop(bounds.DRAIN + 5 * bounds.SECOND)

    def what_ended(self) -> str | None:
        """Tell, for people, that it has ended; None while it runs."""
        if self.process.is_running:
            return None
        return f"{self.name} {self.process.how_it_ended()}{self._end_of_log()}"

    def _end_of_log(self) -> str:
        if self._log is None or not self._log.exists():
            return ""
        return f"; the end of its log:\n{self._log.read_text(errors='replace')[-_LOG_SHOWN:].strip()}"
