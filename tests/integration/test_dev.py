"""`duecourse dev`, from the outside: ready in one command, its data kept, and nothing left of it however it ends."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from duecourse import client as sdk
from duecourse.cli.launcher import ports
from duecourse.model import bounds
from duecourse.timing.clock import SystemClock

DUECOURSE = [sys.executable, "-m", "duecourse.cli.main"]

pytestmark = pytest.mark.timeout(180)


class Dev:
    """A `duecourse dev` that a test started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "data"
        self.log = folder / "dev.log"
        self.port, self.admin_port = ports.free_port(), ports.free_port()
        self.command = [*DUECOURSE, "dev", "--data", str(self.folder)]
        self.command += ["--port", str(self.port), "--admin-port", str(self.admin_port)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, until: str = "Duecourse is ready") -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.wait_for(until)

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def wait_for(self, text: str) -> None:
        asyncio.run(self._wait_for(text))

    async def _wait_for(self, text: str) -> None:
        clock = SystemClock()
        end = clock.elapsed() + 60 * bounds.SECOND
        while text not in (log := self.log.read_text(errors="replace")):
            assert self.process is not None
            assert self.process.poll() is None, log
            assert clock.elapsed() < end, log
            await clock.sleep(50 * bounds.MILLISECOND)

    def wait_until_nothing_is_left(self) -> None:
        asyncio.run(self._wait_until_nothing_is_left())

    async def _wait_until_nothing_is_left(self) -> None:
        clock = SystemClock()
        end = clock.elapsed() + 60 * bounds.SECOND
        while left := self.what_is_left():
            assert clock.elapsed() < end, left
            await clock.sleep(50 * bounds.MILLISECOND)

    def what_is_left(self) -> list[str]:
        left = [f"port {port}" for port in (self.port, self.admin_port) if is_served(port)]
        return left + [str(pid) for pid in postgres_servers_on(self.folder)]


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Dev]:
    one = Dev(tmp_path)
    yield one
    if one.process is not None and one.process.poll() is None:
        one.end(signal.SIGTERM)


def is_served(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((ports.HOST, port)) == 0


def postgres_servers_on(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if f"-D\0{folder}/postgres\0".encode() in command:
            found.append(int(entry.name))
    return found


async def submit(port: int) -> None:
    async with sdk.Client(f"{ports.HOST}:{port}") as client:
        await client.submit(sdk.NewTask("greeting", task_id="kept"))


async def get(port: int) -> sdk.Task:
    async with sdk.Client(f"{ports.HOST}:{port}") as client:
        return await client.get("kept")


def test_ctrl_c_stops_everything_and_the_data_is_kept(dev: Dev) -> None:
    dev.start()
    asyncio.run(submit(dev.port))
    assert dev.end(signal.SIGINT) == 0
    assert dev.what_is_left() == []
    dev.start()
    assert asyncio.run(get(dev.port)).state is sdk.TaskState.PENDING
    assert dev.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("step", ["starting Postgres", "migrating the store", "starting the node"])
def test_ctrl_c_while_it_starts_stops_in_good_order_too(dev: Dev, step: str) -> None:
    dev.start(until=step)
    assert dev.end(signal.SIGINT) == 0
    assert dev.what_is_left() == []
    log = dev.log.read_text()
    assert "stopping" in log
    assert "warning" not in log


def test_nothing_outlives_a_killed_dev(dev: Dev) -> None:
    dev.start()
    dev.end(signal.SIGKILL)
    dev.wait_until_nothing_is_left()


def test_dev_stops_the_rest_and_says_so_when_a_child_ends(dev: Dev) -> None:
    dev.start()
    (postgres,) = postgres_servers_on(dev.folder)
    os.kill(postgres, signal.SIGKILL)
    assert dev.process is not None
    assert dev.process.wait(60) == 1
    assert "Postgres has ended" in dev.log.read_text()
    dev.wait_until_nothing_is_left()


def test_a_second_dev_on_the_same_data_is_refused(dev: Dev) -> None:
    dev.start()
    other = [*DUECOURSE, "dev", "--data", str(dev.folder)]
    other += ["--port", str(ports.free_port()), "--admin-port", str(ports.free_port())]
    refused = subprocess.run(other, capture_output=True, text=True)
    assert refused.returncode == 1
    assert f"{dev.folder} is in use by another process" in refused.stderr
    same_port = subprocess.run([*other, "--port", str(dev.port)], capture_output=True, text=True)
    assert same_port.returncode == 1
    assert f"port {dev.port} is in use" in same_port.stderr
