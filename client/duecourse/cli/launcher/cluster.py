"""`LocalCluster`: an embedded Postgres, migrated, and one node as a child process that can be killed and started again.

A child that ends by itself is a failure that says what ended and how; the node's log, where it has one, tells why.
"""

import asyncio
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, Self

from duecourse.cli.launcher.children import Child, Nursery
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import SystemClock

if TYPE_CHECKING:
    from duecourse.server.storage.embedded import EmbeddedPostgres

HOST: Final = "127.0.0.1"
_LOOK_EVERY: Final = 10 * bounds.MILLISECOND
_READY_LIMIT: Final = 60 * bounds.SECOND
_LOG_SHOWN: Final = 2_000


class LaunchError(Exception):
    """The cluster does not start or has ended; the message says what happened and what to do."""


class LocalCluster:
    """One node and its store on this machine; as an async context manager it is ready inside."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        *,
        store: str = "postgres",
        api_port: int = 0,
        admin_port: int = 0,
        settings: Mapping[str, str] | None = None,
        node_log: Path | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Take the settings of the node, by name, and where its output goes: without `node_log`, where ours goes."""
        self._nursery = nursery
        self._folder = folder
        self._store = store
        self._settings = dict(settings or {})
        self._node_log = node_log
        self._tell = tell
        self._clock = SystemClock()
        self._stack = AsyncExitStack()
        self._postgres: EmbeddedPostgres | None = None
        self._node: Child | None = None
        self.api_port = api_port or free_port()
        self.admin_port = admin_port or free_port()

    @property
    def address(self) -> str:
        """Where clients and workers reach the node."""
        return f"{HOST}:{self.api_port}"

    @property
    def node(self) -> Child:
        """The node's process, the latest one."""
        assert self._node is not None
        return self._node

    @property
    def postgres_pid(self) -> int | None:
        """The process id of the Postgres server; None if the store is another."""
        if self._postgres is None:
            return None
        return int(self._pid_file.read_text().split("\n", 1)[0])

    @property
    def _pid_file(self) -> Path:
        return self._folder.resolve() / "postgres" / "postmaster.pid"

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self._store == "postgres":
                await self._start_postgres(stack)
            stack.push_async_callback(self._stop_node)
            await self.start_node()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start_node(self) -> Micros:
        """Start the node, or start it again; returns how long it took until it was ready."""
        began = self._clock.elapsed()
        self._tell("starting the node")
        self._node = node = self._nursery.spawn(
            "node",
            [sys.executable, "-m", "duecourse.cli.main", "server"],
            environment=self._environment(),
            output=self._node_log,
        )
        while not await is_ready(self.admin_port):
            if not node.is_running:
                raise LaunchError(f"the node {node.how_it_ended()}{self._end_of_log()}")
            if self._clock.elapsed() - began > _READY_LIMIT:
                raise LaunchError(f"the node is not ready after a minute{self._end_of_log()}")
            await self._clock.sleep(_LOOK_EVERY)
        return self._clock.elapsed() - began

    def kill_node(self) -> None:
        """End the node by SIGKILL."""
        self.node.kill()

    def what_ended(self) -> str | None:
        """Tell, for people, what has ended by itself; None if all is well."""
        if not self.node.is_running:
            return f"the node {self.node.how_it_ended()}{self._end_of_log()}"
        if self._postgres is not None and not self._postgres.is_running:
            return f"Postgres has ended, see {self._folder / 'postgres.log'}"
        return None

    async def _stop_node(self) -> None:
        if self._node is not None:
            await self._node.stop(bounds.DRAIN + 5 * bounds.SECOND)

    async def _start_postgres(self, stack: AsyncExitStack) -> None:
        embedded, migrate = _import_server()
        self._tell("starting Postgres")
        self._postgres = postgres = embedded.EmbeddedPostgres(self._folder)
        who = str(self._pid_file)
        self._nursery.hold(who, signal.SIGINT)
        stack.callback(self._nursery.drop, who)
        try:
            await stack.enter_async_context(postgres)
        except embedded.EmbeddedPostgresError as error:
            raise LaunchError(str(error)) from error
        self._tell("migrating the store")
        storage = importlib.import_module("duecourse.server.storage")
        try:
            await migrate.migrate(postgres.dsn)
        except (storage.StoreUnavailable, storage.StoreRefused) as error:
            raise LaunchError(f"the store in {self._folder} cannot be used: {error} (--data names another)") from error

    def _environment(self) -> dict[str, str]:
        settings = {
            "api_listen": self.address,
            "admin_listen": f"{HOST}:{self.admin_port}",
            "store": self._store,
            "coordination": "solo",
            **self._settings,
        }
        if self._postgres is not None:
            # By the environment: everybody on the machine can read a command line.
            settings["postgres_dsn"] = self._postgres.dsn
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DUECOURSE_POSTGRES_")}
        return inherited | {f"DUECOURSE_{name.upper()}": value for name, value in settings.items()}

    def _end_of_log(self) -> str:
        if self._node_log is None or not self._node_log.exists():
            return ""
        return f"; the end of its log:\n{self._node_log.read_text(errors='replace')[-_LOG_SHOWN:].strip()}"


def _import_server() -> tuple[ModuleType, ModuleType]:
    try:
        return (
            importlib.import_module("duecourse.server.storage.embedded"),
            importlib.import_module("duecourse.server.storage.migrate"),
        )
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed: pip install 'duecourse[server,embedded]'"
        raise LaunchError(message) from error


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """Tell whether a node could listen on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


async def is_ready(admin_port: int) -> bool:
    """Ask a node whether it serves."""
    try:
        async with asyncio.timeout(1):
            reader, writer = await asyncio.open_connection(HOST, admin_port)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
