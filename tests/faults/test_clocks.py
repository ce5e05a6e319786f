"""Clocks that are wrong or are set: the node's own, and the one that all follow, that of the store.

The store's clock is set by another function in its place, the node's by a file that it reads; the worker's and the
test's are the machine's, and right.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from faults.cluster import Cluster, NodeProcess
from faults.conftest import StartCluster
from faults.recording_client import Ask

from duecourse.cli.launcher.children import Nursery
from duecourse.cli.launcher.ports import HOST
from duecourse.model import bounds
from duecourse.model.instants import Micros

JUMPS = pytest.mark.parametrize("jump", [bounds.HOUR, -bounds.HOUR], ids=["forward", "back"])
PROMPT = 5 * bounds.SECOND
"""On a machine that is busy: what is off in these tests is off by more."""

_REFERENCE = """
    CREATE OR REPLACE FUNCTION duecourse.reference_time() RETURNS bigint LANGUAGE sql VOLATILE BEGIN ATOMIC
        SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + ({});
    END
"""


@dataclass
class Clocks:
    """A cluster, and the clocks of its store and its node."""

    cluster: Cluster
    dsn: str
    error_file: Path

    async def set_store(self, ahead: Micros) -> None:
        await self.cluster.store.execute(_REFERENCE.format(ahead))

    def set_node(self, ahead: Micros) -> None:
        # In one step: the node reads it at any moment.
        whole = self.error_file.with_suffix(".new")
        whole.write_text(f"{ahead}")
        whole.replace(self.error_file)

    async def accept(self) -> None:
        """Do as an operator does."""
        environment = {**os.environ, "DUECOURSE_POSTGRES_DSN": self.dsn}
        command = (sys.executable, "-m", "duecourse.cli.main", "cluster", "accept-clock")
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        told, _ = await process.communicate()
        assert process.returncode == 0, told
        assert b"accepted" in told

    async def admin(self, path: str, node: NodeProcess | None = None) -> str:
        """Return what the admin port of a node, of the first, answers; empty: nothing."""
        try:
            reader, writer = await asyncio.open_connection(HOST, (node or self.cluster.node).admin_port)
        except OSError:
            return ""
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            return (await reader.read()).decode()
        finally:
            writer.close()

    async def metric(self, name: str) -> float:
        lines = (await self.admin("/metrics")).splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith(f"duecourse_{name} ")]
        return float(value)

    async def until_alarmed(self, text: str, *nodes: NodeProcess, is_ready: bool = True) -> None:
        """Wait until the health of these nodes, or of the first, says so."""
        status = "HTTP/1.1 200" if is_ready else "HTTP/1.1 503"
        await self._until(lambda told: told.startswith(status) and text in told, nodes)

    async def until_quiet(self, *nodes: NodeProcess) -> None:
        """Wait until health has nothing to say."""
        await self._until(lambda told: told.endswith("\r\n\r\nready\n"), nodes)

    async def _until(self, is_so: Callable[[str], bool], nodes: Sequence[NodeProcess]) -> None:
        began = self.cluster.clock.elapsed()
        for node in nodes or [self.cluster.node]:
            while not is_so(told := await self.admin("/readyz", node)):
                assert self.cluster.clock.elapsed() - began < 30 * bounds.SECOND, told
                await self.cluster.clock.sleep(10 * bounds.MILLISECOND)

    def logged(self, event: str) -> list[dict[str, Any]]:
        return self.cluster.node.logged(event)

    def lateness(self, *task_ids: str) -> Micros:
        """Return the largest one, by the machine's clock."""
        run_at = {one.task_id: one.run_at or one.invoked for one in self.cluster.recorded().operations}
        return max(self.cluster.starts(task_id)[0].wall - run_at[task_id] for task_id in task_ids)


@pytest_asyncio.fixture
async def clocks(tmp_path: Path, postgres_dsn: str, nursery: Nursery, source: Random) -> AsyncIterator[Clocks]:
    error_file = tmp_path / "wall_clock_error"
    error_file.write_text("0")
    settings = {"wall_clock_error_file": str(error_file)}
    async with Cluster(tmp_path, postgres_dsn, nursery, source, settings) as cluster:
        yield Clocks(cluster, postgres_dsn, error_file)


async def _fires_on_time(clocks: Clocks, name: str) -> None:
    """Have some tasks run, and hold their starts against the machine's clock; never early is the checker's affair."""
    cluster = clocks.cluster
    await cluster.recovers(f"what was before {name}")
    async with cluster.client() as client:
        asks = cluster.ask_many(name, 20, bounds.SECOND, after=bounds.SECOND)
        await client.submit(*asks)
    task_ids = [ask.task_id for ask in asks]
    await cluster.until_started(*task_ids)
    assert clocks.lateness(*task_ids) < PROMPT


@JUMPS
async def test_a_node_whose_clock_is_wrong_from_the_start_waits_for_an_operator_and_then_fires_by_the_stores(
    clocks: Clocks, jump: Micros
) -> None:
    cluster = clocks.cluster
    cluster.start_worker()
    cluster.node.kill()
    clocks.set_node(jump)
    cluster.node.spawn()
    await clocks.until_alarmed("accept-clock", is_ready=False)
    assert len(clocks.logged("clock_refused")) == 1
    await clocks.accept()
    await clocks.until_alarmed("this machine's wall clock is 3600")
    assert abs(await clocks.metric("wall_clock_offset_seconds") - jump / bounds.SECOND) < 1
    assert len(clocks.logged("wall_clock_off")) == 1
    await _fires_on_time(clocks, "wrong")
    # It knows its clock by now, and the store's is as it was.
    cluster.node.kill()
    await cluster.node.start()
    await _fires_on_time(clocks, "again")
    await cluster.settle()


@JUMPS
async def test_a_jump_of_the_nodes_clock_changes_nothing(clocks: Clocks, jump: Micros) -> None:
    cluster = clocks.cluster
    cluster.start_worker()
    async with cluster.client() as client:
        await client.submit(Ask("running", seconds=8), *cluster.ask_many("later", 20, bounds.MINUTE, after=bounds.HOUR))
        await cluster.until_started("running")
        clocks.set_node(jump)
        await clocks.until_alarmed("this machine's wall clock")
        await _fires_on_time(clocks, "meanwhile")
        clocks.set_node(0)
        await clocks.until_quiet()
        assert not any(cluster.starts(f"later-{number}") for number in range(20))
        for number in range(20):
            await client.cancel(f"later-{number}")
    await cluster.settle()
    assert [start.attempt for start in cluster.starts("running")] == [1]


@JUMPS
async def test_a_jump_of_the_stores_clock_alone_is_not_followed_and_costs_no_lease(
    clocks: Clocks, jump: Micros
) -> None:
    cluster = clocks.cluster
    cluster.start_worker()
    async with cluster.client() as client:
        await client.submit(
            Ask("running", seconds=8), *cluster.ask_many("later", 20, bounds.MINUTE, after=bounds.HOUR // 2)
        )
        await cluster.until_started("running")
        await clocks.set_store(jump)
        await clocks.until_alarmed("the store's clock is 3600")
        assert len(clocks.logged("clock_refused")) == 1
        assert abs(await clocks.metric("reference_offset_seconds") - jump / bounds.SECOND) < 1
        await _fires_on_time(clocks, "meanwhile")
        await clocks.set_store(0)
        await clocks.until_quiet()
        await _fires_on_time(clocks, "after")
        assert not any(cluster.starts(f"later-{number}") for number in range(20))
        for number in range(20):
            await client.cancel(f"later-{number}")
    await cluster.settle()
    assert [start.attempt for start in cluster.starts("running")] == [1]


async def test_a_jump_forward_that_an_operator_accepts_brings_due_what_lies_in_it(clocks: Clocks) -> None:
    cluster = clocks.cluster
    cluster.start_worker()
    async with cluster.client() as client:
        await client.submit(
            Ask("running", seconds=8),
            *cluster.ask_many("within", 20, bounds.MINUTE, after=bounds.HOUR // 2),
            *cluster.ask_many("beyond", 20, bounds.MINUTE, after=2 * bounds.HOUR),
        )
        await cluster.until_started("running")
        await clocks.set_store(bounds.HOUR)
        await clocks.until_alarmed("the store's clock is 3600")
        assert not cluster.starts("within-0")
        await clocks.accept()
        await cluster.until_started(*(f"within-{number}" for number in range(20)), limit=10 * bounds.SECOND)
        assert not any(cluster.starts(f"beyond-{number}") for number in range(20))
        for number in range(20):
            await client.cancel(f"beyond-{number}")
    await cluster.comes_to_rest()
    assert [start.attempt for start in cluster.starts("running")] == [1]


async def test_a_jump_that_the_nodes_clock_has_made_too_is_followed(clocks: Clocks) -> None:
    cluster = clocks.cluster
    cluster.start_worker()
    async with cluster.client() as client:
        await client.submit(Ask("within", cluster.clock.now().latest + bounds.HOUR // 2))
        clocks.set_node(bounds.HOUR)
        await clocks.set_store(bounds.HOUR)
        await cluster.until_started("within", limit=10 * bounds.SECOND)
    await clocks.until_quiet()
    await cluster.comes_to_rest()


async def test_after_a_jump_back_that_was_accepted_tasks_wait_until_the_time_has_come_again(clocks: Clocks) -> None:
    cluster = clocks.cluster
    cluster.start_worker()
    back = 15 * bounds.SECOND
    async with cluster.client() as client:
        await client.submit(Ask("before"))
        await cluster.until_started("before")
        await clocks.set_store(-back)
        await clocks.until_alarmed("the store's clock is 15")
        await clocks.accept()
        await clocks.until_alarmed("this machine's wall clock is 15")
        began = cluster.clock.now().latest
        await client.submit(Ask("soon", began + bounds.SECOND))
        await cluster.until_started("soon")
    assert cluster.starts("soon")[0].wall >= began + bounds.SECOND + back
    assert clocks.lateness("soon") < back + PROMPT
    assert len(cluster.starts("before")) == 1
    await cluster.settle()


async def test_steps_of_200_ms_have_no_effect_beyond_the_step(clocks: Clocks) -> None:
    cluster = clocks.cluster
    cluster.start_worker()
    step = 200 * bounds.MILLISECOND
    async with cluster.client() as client:
        asks = cluster.ask_many("stepped", 200, 4 * bounds.SECOND, after=bounds.SECOND)
        await client.submit(*asks)
        for ahead in (step, 0, -step, 0):
            await clocks.set_store(ahead)
            await cluster.clock.sleep(bounds.SECOND)
        async with asyncio.timeout(30):
            # A node that got no time to run has not seen them all.
            while len(clocks.logged("clock_stepped")) < 2:
                for ahead in (step, 0):
                    await clocks.set_store(ahead)
                    await cluster.clock.sleep(bounds.SECOND)
    task_ids = [ask.task_id for ask in asks]
    await cluster.until_started(*task_ids)
    run_at = {ask.task_id: ask.run_at or 0 for ask in asks}
    late = [cluster.starts(task_id)[0].wall - run_at[task_id] for task_id in task_ids]
    assert min(late) >= -step
    assert max(late) < step + PROMPT
    assert not clocks.logged("clock_refused")
    await cluster.comes_to_rest()


async def test_time_zones_have_no_effect(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = clocks.cluster
    cluster.node.kill()
    monkeypatch.setenv("TZ", "America/Sao_Paulo")
    await cluster.node.start()
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    cluster.start_worker()
    await _fires_on_time(clocks, "zoned")
    await clocks.until_quiet()
    await cluster.settle()


@JUMPS
async def test_a_node_that_starts_beside_others_goes_by_their_clock_whatever_its_own_says(
    start_cluster: StartCluster, postgres_dsn: str, tmp_path: Path, jump: Micros
) -> None:
    cluster = await start_cluster(2)
    clocks = Clocks(cluster, postgres_dsn, tmp_path / "wall_clock_error")
    clocks.set_node(jump)
    cluster.start_worker()
    cluster.node.kill()
    cluster.node.settings["wall_clock_error_file"] = str(clocks.error_file)
    await cluster.node.start()
    await clocks.until_alarmed("this machine's wall clock is 3600")
    await cluster.until_led(*cluster.nodes)
    await _fires_on_time(clocks, "beside")
    assert (await clocks.admin("/readyz", cluster.nodes[1])).endswith("\r\n\r\nready\n")
    await cluster.settle()


async def test_all_nodes_follow_a_jump_once_their_clocks_agree_with_it(
    start_cluster: StartCluster, postgres_dsn: str, tmp_path: Path
) -> None:
    error_file = tmp_path / "wall_clock_error"
    error_file.write_text("0")
    cluster = await start_cluster(wall_clock_error_file=str(error_file))
    clocks = Clocks(cluster, postgres_dsn, error_file)
    cluster.start_worker()
    async with cluster.client() as client:
        asks = cluster.ask_many("within", 20, bounds.MINUTE, after=bounds.HOUR // 2)
        await client.submit(*asks)
        await clocks.set_store(bounds.HOUR)
        await clocks.until_alarmed("the store's clock is 3600", *cluster.nodes)
        await _fires_on_time(clocks, "meanwhile")
        assert not any(cluster.starts(ask.task_id) for ask in asks)
        clocks.set_node(bounds.HOUR)
        await cluster.until_started(*(ask.task_id for ask in asks), limit=10 * bounds.SECOND)
    await clocks.until_quiet(*cluster.nodes)
    await cluster.comes_to_rest()


async def test_nodes_that_all_start_at_once_agree_on_the_clock_though_one_of_their_own_is_wrong(
    start_cluster: StartCluster, postgres_dsn: str, tmp_path: Path
) -> None:
    cluster = await start_cluster()
    clocks = Clocks(cluster, postgres_dsn, tmp_path / "wall_clock_error")
    clocks.set_node(bounds.HOUR)
    cluster.start_worker()
    for node in cluster.nodes:
        node.kill()
    cluster.node.settings["wall_clock_error_file"] = str(clocks.error_file)
    async with asyncio.TaskGroup() as group:
        starts = [group.create_task(node.start(), name=node.name) for node in cluster.nodes]
    print([start.result() // bounds.MILLISECOND for start in starts])
    await clocks.until_alarmed("this machine's wall clock is 3600")
    await _fires_on_time(clocks, "together")
    await cluster.settle()
