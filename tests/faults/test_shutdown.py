"""SIGTERM of the node: under load, twice, while its store is frozen, and before it is ready."""

import signal

import pytest
from faults.cluster import Cluster
from faults.test_postgres import OURS
from services.freezing import frozen

from duecourse.model import bounds


# Else a worker that gets no time to run loses its leases, drained or not.
@pytest.mark.parametrize("cluster", [{"lease": "12s"}], indirect=True)
async def test_a_node_that_is_told_to_end_drains_and_exits_0(cluster: Cluster, is_long: bool) -> None:
    cluster.start_worker()
    async with cluster.load():
        for _ in range(10 if is_long else 2):
            await cluster.recovers("the start")
            began = cluster.clock.elapsed()
            cluster.node.signal(signal.SIGTERM)
            assert await cluster.node.ended() == 0
            print(f"drained in {(cluster.clock.elapsed() - began) // bounds.MILLISECOND} ms")
            await cluster.node.start()
    recorded = await cluster.settle()
    lost = [one for one in recorded.transitions if one.new and one.new.outcome == "lease_lost"]
    assert not lost, "a drained node's worker lost its leases"


async def test_a_second_signal_ends_a_draining_node_at_once(cluster: Cluster) -> None:
    cluster.start_worker()
    await cluster.recovers("the start")
    backends = [row["pid"] for row in await cluster.store.fetch(OURS)]
    async with cluster.load():
        with frozen(*backends):
            await cluster.clock.sleep(bounds.SECOND)
            cluster.node.signal(signal.SIGTERM)
            while not cluster.node.logged("node_draining"):
                await cluster.clock.sleep(5 * bounds.MILLISECOND)
            assert cluster.node.child.is_running, "there was nothing to wait for"
            cluster.node.signal(signal.SIGTERM)
            # One that has drained exits 0.
            assert await cluster.node.ended(10 * bounds.SECOND) == -signal.SIGTERM
        await cluster.node.start()
        await cluster.recovers("a second signal")
    await cluster.settle()


async def test_a_node_whose_store_is_frozen_drains_and_exits_0(cluster: Cluster) -> None:
    cluster.start_worker()
    await cluster.recovers("the start")
    backends = [row["pid"] for row in await cluster.store.fetch(OURS)]
    with frozen(*backends):
        cluster.node.signal(signal.SIGTERM)
        assert await cluster.node.ended(2 * bounds.DRAIN) == 0
    await cluster.node.start()
    await cluster.recovers("the end beside a frozen store")
    await cluster.settle()


async def test_a_node_that_is_told_to_end_while_it_starts_never_hangs(cluster: Cluster, is_long: bool) -> None:
    cluster.start_worker()
    cluster.node.kill()
    for _ in range(40 if is_long else 6):
        cluster.node.spawn()
        await cluster.clock.sleep(cluster.source.randrange(1_500 * bounds.MILLISECOND))
        cluster.node.signal(signal.SIGTERM)
        assert await cluster.node.ended() in (0, -signal.SIGTERM)
    await cluster.node.start()
    await cluster.recovers("starts that were broken off")
    await cluster.settle()
