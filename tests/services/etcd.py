"""etcd for tests: real servers, of one member or three, to be stopped, killed, frozen, and set back to an older copy.

The binary is that of `duecourse.server.etcd.embedded`. Whatever a test does as an outsider (delete a key, revoke a
lease, compact) goes through etcd's JSON gateway, not through the client that is tested.

`etcd` is one member for each test process, shared by all tests that do it no harm: they use keys of their own.
`own_etcd` is one member for one test alone. `etcd_of_three` is shared, too, and healed after each test.
"""

import asyncio
import base64
import json
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import pytest
import pytest_asyncio
from services import freezing
from services.ports import free_port

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.etcd import embedded
from duecourse.server.etcd.embedded import HOST, EmbeddedEtcdError
from duecourse.server.etcd.keys import end_of
from duecourse.timing.clock import SystemClock

START_LIMIT: Final = 30 * bounds.SECOND
STOP_LIMIT_SECONDS: Final = 10
POLL: Final = 20 * bounds.MILLISECOND
TRIES: Final = 5

_LARGE_VALUE: Final = 1024 * 1024

_clock = SystemClock()


class EtcdError(Exception):
    """The server did not do what a test needs; ends with its log."""


class EtcdMember:
    """One server process on one folder."""

    def __init__(
        self,
        name: str,
        folder: Path,
        client_port: int,
        peer_port: int,
        *,
        tls: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        """`options` are put on its command line."""
        self._options = options
        self.name = name
        self.embedded = embedded.Member(name, folder, client_port, peer_port, tls=tls)
        self.port = client_port
        self.endpoint = self.embedded.endpoint
        self.data_dir = self.embedded.data_dir
        self._log_path = folder / f"{name}.log"
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, members: Sequence["EtcdMember"]) -> None:
        """Start the process, without waiting for it to serve."""
        assert not self.is_running
        command = [*self.embedded.command([member.embedded for member in members]), *self._options]
        self._log = self._log_path.open("ab")
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)

    @property
    def certificate(self) -> Path:
        """What it shows with TLS, and signed itself."""
        return self.data_dir / "fixtures" / "client" / "cert.pem"

    @property
    def is_running(self) -> bool:
        """Whether there is a process, be it frozen."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Ask it to end, and wait for that."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it without a chance to do anything."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Let it do nothing any more, its connections stay open."""
        assert self._process is not None
        freezing.freeze(self._process.pid)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        freezing.thaw(self._process.pid)

    async def ask(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call a method of the JSON gateway, `kv/put` for instance. Bytes are base64 there; see `text`."""
        return await self.embedded.http("POST", f"/v3/{method}", json.dumps(body).encode())

    async def is_healthy(self) -> bool:
        """Tell whether it serves linearizable reads."""
        return self.is_running and await self.embedded.is_healthy()

    async def messages_received(self) -> int:
        """Return how many messages clients have sent it: calls, and what is said on streams."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
            lines = (await reader.read()).decode().splitlines()
        finally:
            writer.close()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("grpc_server_msg_received_total"))

    def log_tail(self) -> str:
        """Return the end of its log."""
        return self._log_path.read_text(errors="replace")[-4_000:]

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if self.is_running:
            self._process.send_signal(number)
            if number is not signal.SIGKILL:
                self._process.send_signal(signal.SIGCONT)
        self._process.wait(STOP_LIMIT_SECONDS)
        self._process = None
        if self._log is not None:
            self._log.close()


class EtcdCluster:
    """Some members; as an async context manager they are started and ended."""

    def __init__(self, folder: Path, size: int = 1, *, tls: bool = False, options: Sequence[str] = ()) -> None:
        """Prepare for so many members, with these `options` on their command lines."""
        self._folder = folder
        self._size = size
        self._tls = tls
        self._options = options
        self._filling: list[bytes] = []
        self.members: list[EtcdMember] = []

    @property
    def endpoints(self) -> list[str]:
        """Where clients reach the members, in order."""
        return [member.endpoint for member in self.members]

    async def __aenter__(self) -> Self:
        for attempt in range(TRIES):
            # Somebody else may have taken a port in between.
            self._choose(self._folder / f"try-{attempt}")
            try:
                await self.start()
            except EtcdError:
                self.end()
                if attempt == TRIES - 1:
                    raise
            else:
                return self
        raise AssertionError

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    async def start(self) -> None:
        """Start the members that do not run, and wait until all serve."""
        self.launch()
        await self.wait_healthy()

    def launch(self) -> None:
        """Start the members that do not run."""
        for member in self.members:
            if not member.is_running:
                member.launch(self.members)

    def stop(self) -> None:
        """Stop all members."""
        for member in self.members:
            member.stop()

    def kill(self) -> None:
        """Kill all members."""
        for member in self.members:
            member.kill()

    end = kill

    async def heal(self) -> None:
        """Undo what was done to the members."""
        for member in self.members:
            if member.is_running:
                member.thaw()
        await self.start()

    async def wait_healthy(self, limit: Micros = START_LIMIT) -> None:
        """Wait until all members serve."""
        deadline = _clock.elapsed() + limit
        for member in self.members:
            while not await member.is_healthy():
                if not member.is_running or _clock.elapsed() > deadline:
                    raise EtcdError(f"etcd {member.name} does not serve:\n{member.log_tail()}")
                await _clock.sleep(POLL)

    async def leader(self) -> EtcdMember:
        """Return the member that leads."""
        deadline = _clock.elapsed() + START_LIMIT
        while True:
            for member in self.members:
                status = await member.ask("maintenance/status", {})
                if status.get("leader") == status["header"]["member_id"]:
                    return member
            if _clock.elapsed() > deadline:
                raise EtcdError("no member leads")
            await _clock.sleep(POLL)

    def save(self, copy: Path) -> None:
        """Copy the data of a stopped member."""
        (member,) = self.members
        assert not member.is_running
        shutil.copytree(member.data_dir, copy)

    def set_back(self, copy: Path) -> None:
        """Put a copy in the place of a stopped member's data: all that was written since is lost."""
        (member,) = self.members
        assert not member.is_running
        shutil.rmtree(member.data_dir)
        shutil.copytree(copy, member.data_dir)

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """Write a key, as an outsider. Returns its revision.

        Of several members one may apply it and answer too late, and the next one apply it once more.
        """
        answer = await self._ask("kv/put", {"key": text(key), "value": text(value), "lease": str(lease)})
        return int(answer["header"]["revision"])

    async def delete(self, key: bytes) -> int:
        """Delete a key, as an outsider. Returns how many were deleted."""
        return int((await self._ask("kv/deleterange", {"key": text(key)})).get("deleted", 0))

    async def revoke(self, lease: int) -> None:
        """Revoke a lease, as an outsider."""
        await self._ask("lease/revoke", {"ID": str(lease)})

    async def compact(self, revision: int) -> None:
        """Forget all that was before a revision."""
        await self._ask("kv/compaction", {"revision": str(revision), "physical": True})

    async def fill(self) -> None:
        """Write until the quota is used up."""
        value = b"x" * _LARGE_VALUE
        while True:
            key = f"/filling/{len(self._filling)}".encode()
            try:
                await self.put(key, value)
            except EmbeddedEtcdError as error:
                if "space exceeded" not in str(error):
                    raise
                return
            self._filling.append(key)

    async def make_room(self) -> None:
        """Undo `fill`, and do what an operator then does: compact, defragment, disarm the alarm."""
        while self._filling:
            await self.delete(self._filling.pop())
        await self.compact(int((await self._ask("kv/range", {"key": text(b"/")}))["header"]["revision"]))
        for member in self.members:
            await member.ask("maintenance/defragment", {})
        for alarm in (await self._ask("maintenance/alarm", {"action": "GET"}))["alarms"]:
            await self._ask("maintenance/alarm", {"action": "DEACTIVATE", **alarm})

    async def value(self, key: bytes) -> bytes | None:
        """Read a key, as an outsider."""
        found = (await self._ask("kv/range", {"key": text(key)})).get("kvs")
        return base64.b64decode(found[0].get("value", "")) if found else None

    async def first(self, prefix: bytes) -> tuple[bytes, int]:
        """Return the key that was made first of those that begin so, and the lease that it goes with."""
        body = {"key": text(prefix), "range_end": text(end_of(prefix)), "sort_target": "CREATE", "sort_order": "ASCEND"}
        found = (await self._ask("kv/range", body))["kvs"][0]
        return base64.b64decode(found["key"]), int(found.get("lease", 0))

    async def _ask(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        # The first that answers: others may be frozen or down.
        for member in self.members:
            try:
                return await member.ask(method, body)
            except (OSError, TimeoutError):
                continue
        raise EtcdError(f"no member answers {method}")

    def _choose(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        ports = [free_port() for _ in range(2 * self._size)]
        self.members = [
            EtcdMember(
                f"member-{number}",
                folder,
                ports[2 * number],
                ports[2 * number + 1],
                tls=self._tls,
                options=self._options,
            )
            for number in range(self._size)
        ]


def text(data: bytes) -> str:
    """Return bytes as the JSON gateway wants them."""
    return base64.b64encode(data).decode()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdCluster]:
    """Run one member as long as the session lasts."""
    async with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def own_etcd(tmp_path: Path) -> AsyncIterator[EtcdCluster]:
    """Run one member for one test alone."""
    async with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _etcd_of_three(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdCluster]:
    async with EtcdCluster(tmp_path_factory.mktemp("etcd-of-three"), size=3) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def etcd_of_three(_etcd_of_three: EtcdCluster) -> AsyncIterator[EtcdCluster]:
    """Run three members as long as the session lasts, all healthy at the start of each test."""
    await _etcd_of_three.heal()
    yield _etcd_of_three
    await _etcd_of_three.heal()
