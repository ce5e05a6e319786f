"""`duecourse dev`, from the outside: ready in one command, its data kept, and nothing left of it however it ends."""

import asyncio
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from services.ports import free_ports_apart

from duecourse import client as sdk
from duecourse.cli.launcher import ports
from duecourse.cli.launcher.cluster import PORT_STEP
from duecourse.model import bounds
from duecourse.timing.clock import SystemClock

DUECOURSE = [sys.executable, "-m", "duecourse.cli.main"]

pytestmark = pytest.mark.timeout(180)


class Dev:
    """A `duecourse dev` that a test started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "data"
        self.log = folder / "dev.log"
        self.port, self.admin_port = free_ports_apart(PORT_STEP, 3), free_ports_apart(PORT_STEP, 3)
        self.command = [*DUECOURSE, "dev", "--data", str(self.folder)]
        self.command += ["--port", str(self.port), "--admin-port", str(self.admin_port)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, until: str = "Duecourse is ready", *, nodes: int = 1) -> None:
        command = [*self.command, "--nodes", str(nodes)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.wait_for(until)

    def pid_of(self, node: str) -> int:
        """Return the process id of a node, as it was told."""
        told = self.log.read_text().partition(f"{node}: process ")[2]
        return int(told.partition(",")[0])

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
        first = (self.port, self.admin_port)
        served = [one + number * PORT_STEP for one in first for number in range(3)]
        left = [f"port {port}" for port in served if is_served(port)]
        return left + [str(pid) for pid in servers_on(self.folder)]


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Dev]:
    one = Dev(tmp_path)
    yield one
    if one.process is not None and one.process.poll() is None:
        one.end(signal.SIGTERM)


def is_served(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((ports.HOST, port)) == 0


def servers_on(folder: Path, kind: str = "") -> list[int]:
    """Return the processes of Postgres and etcd on a folder, or those of one `kind`."""
    options = {"postgres": f"-D\0{folder}/postgres\0", "etcd": f"--data-dir\0{folder}/etcd\0"}
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if any(option.encode() in command for name, option in options.items() if kind in ("", name)):
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


def test_the_store_of_a_dev_can_be_checked_with_the_command_that_it_tells(dev: Dev) -> None:
    dev.start(until="Ctrl-C stops everything")
    command = next(line for line in dev.log.read_text().splitlines() if "store fsck" in line)
    _, *arguments = shlex.split(command)
    checked = subprocess.run([*DUECOURSE, *arguments], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr.partition(":")[0]) == (0, "the store is sound")
    assert stat.S_IMODE((dev.folder / "dsn").stat().st_mode) == 0o600


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
    (postgres,) = servers_on(dev.folder, "postgres")
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
    assert "--data names another" in refused.stderr
    same_port = subprocess.run([*other, "--port", str(dev.port)], capture_output=True, text=True)
    assert same_port.returncode == 1
    assert f"port {dev.port} is in use" in same_port.stderr


@pytest.mark.parametrize(("nodes", "port", "admin_port", "both"), [(1, 7600, 7600, 7600), (3, 7600, 7620, 7620)])
def test_one_port_for_two_things_is_refused_before_anything_starts(
    tmp_path: Path, nodes: int, port: int, admin_port: int, both: int
) -> None:
    command = [*DUECOURSE, "dev", "--data", str(tmp_path / "data"), "--nodes", str(nodes)]
    command += ["--port", str(port), "--admin-port", str(admin_port)]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr == f"error: --port and --admin-port both come to {both}: choose another --admin-port\n"
    assert not (tmp_path / "data").exists()


async def leaders(port: int) -> dict[str, int]:
    """Count the shards that each live node leads, as the node on a port sees it."""
    async with sdk.Client(f"{ports.HOST}:{port}") as client:
        cluster = await client.cluster()
        names = [node.node_id for node in cluster.nodes]
        return {name: sum(shard.leader == name for shard in cluster.shards) for name in names}


async def until_led_by(port: int, names: set[str]) -> None:
    """Wait until these nodes, and no others, are there and lead all shards."""
    clock = SystemClock()
    end = clock.elapsed() + 60 * bounds.SECOND
    while set(led := await leaders(port)) != names or not all(led.values()) or sum(led.values()) != 64:
        assert clock.elapsed() < end, led
        await clock.sleep(50 * bounds.MILLISECOND)


def test_three_nodes_share_the_shards_and_lose_one_after_the_other(dev: Dev) -> None:
    dev.start(nodes=3)
    second, third = dev.port + PORT_STEP, dev.port + 2 * PORT_STEP
    # Not only some time later: whoever kills one right away is to see others take over.
    assert sorted(asyncio.run(leaders(third)).values()) in ([20, 22, 22], [21, 21, 22])
    asyncio.run(submit(second))
    os.kill(dev.pid_of("node-1"), signal.SIGKILL)
    dev.wait_for("node-1 was ended by SIGKILL; there are left: node-2, node-3")
    asyncio.run(until_led_by(third, {"node-2", "node-3"}))
    drain = [*DUECOURSE, "node", "drain", "node-2", "--address", f"{ports.HOST}:{third}"]
    drained = subprocess.run(drain, capture_output=True, text=True)
    assert drained.returncode == 0, drained.stderr
    assert drained.stdout == "node-2 has gone\n"
    dev.wait_for("node-2 ended with exit code 0; there are left: node-3")
    asyncio.run(until_led_by(third, {"node-3"}))
    assert asyncio.run(get(third)).state is sdk.TaskState.PENDING
    os.kill(dev.pid_of("node-3"), signal.SIGKILL)
    assert dev.process is not None
    assert dev.process.wait(60) == 1
    dev.wait_until_nothing_is_left()


def test_data_is_kept_when_the_number_of_nodes_changes(dev: Dev) -> None:
    dev.start()
    asyncio.run(submit(dev.port))
    for nodes in (3, 2, 1):
        assert dev.end(signal.SIGINT) == 0
        dev.start(nodes=nodes)
        assert asyncio.run(get(dev.port)).state is sdk.TaskState.PENDING
        assert ("the store was run otherwise before" in dev.log.read_text()) is (nodes != 2)
    assert dev.end(signal.SIGINT) == 0
    assert dev.what_is_left() == []


def test_nothing_of_a_cluster_outlives_a_killed_dev(dev: Dev) -> None:
    dev.start(nodes=2)
    assert len(servers_on(dev.folder, "etcd")) == 1
    dev.end(signal.SIGKILL)
    dev.wait_until_nothing_is_left()


def test_dev_stops_the_nodes_and_says_so_when_etcd_ends(dev: Dev) -> None:
    dev.start(nodes=2)
    (etcd,) = servers_on(dev.folder, "etcd")
    os.kill(etcd, signal.SIGKILL)
    assert dev.process is not None
    assert dev.process.wait(60) == 1
    assert "etcd was ended by SIGKILL" in dev.log.read_text()
    dev.wait_until_nothing_is_left()
