"""Nodes of a cluster that are told to end: one after the other under load, by DrainNode, and while etcd is away."""

import signal

from faults.cluster_of_nodes import ClusterOfNodes
from faults.conftest import StartCluster
from faults.recording_client import Ask
from services.etcd import EtcdCluster

from duecourse import client as sdk
from duecourse.model import bounds

_DRAINED = 2 * bounds.DRAIN
_LEASES = {"lease": "12s", "heartbeat": "2s"}
"""As many heartbeat intervals as by default, and so long that no worker loses one because it got no time to run."""


def _lost_nothing(cluster: ClusterOfNodes, running: list[str]) -> None:
    """Nothing that ran while a node was drained has been lost, or started again."""
    for task_id in running:
        assert [start.attempt for start in cluster.starts(task_id)] == [1]


async def test_a_rolling_restart_under_load_loses_nothing_and_starts_nothing_twice(
    start_cluster: StartCluster, is_long: bool
) -> None:
    cluster = await start_cluster(**_LEASES)
    cluster.start_worker("one")
    cluster.start_worker("two")
    running = [f"running-{number}" for number in range(20)]
    async with cluster.load(), cluster.client() as client:
        await client.submit(*[Ask(task_id, seconds=20) for task_id in running])
        await cluster.until_started(*running)
        for _ in range(5 if is_long else 1):
            for node in cluster.nodes:
                began = cluster.clock.elapsed()
                node.signal(signal.SIGTERM)
                assert await node.ended(_DRAINED) == 0
                print(f"drained in {(cluster.clock.elapsed() - began) // bounds.MILLISECOND} ms")
                await cluster.recovers(f"the end of {node.name}")
                await node.start()
                await cluster.until_led(*cluster.nodes)
    recorded = await cluster.settle()
    _lost_nothing(cluster, running)
    outcomes = {one.new.outcome for one in recorded.transitions if one.new} - {None}
    assert outcomes <= {"succeeded", "returned"}, "an attempt was lost"
    started = [event.task_id for event in recorded.events if event.kind == "start"]
    assert len(started) == len(set(started)), "something was started twice"


async def test_a_node_that_is_drained_by_another_ends_and_leaves_its_shards_to_the_others(
    start_cluster: StartCluster,
) -> None:
    cluster = await start_cluster(**_LEASES)
    cluster.start_worker()
    first, second, third = cluster.nodes
    async with cluster.load():
        await cluster.recovers("the start")
        async with sdk.Client([first.address]) as client:
            await client.drain_node(third.name)
        assert await third.ended(_DRAINED) == 0
        await cluster.until_led(first, second)
        await cluster.recovers("a drained node")
    recorded = await cluster.settle()
    assert not any(one.new and one.new.outcome == "lease_lost" for one in recorded.transitions)


async def test_nodes_that_are_told_to_end_while_etcd_is_away_end_in_time(
    start_cluster: StartCluster, own_etcd: EtcdCluster
) -> None:
    cluster = await start_cluster(2, own_etcd=own_etcd, drain="3s")
    first, second = cluster.nodes
    cluster.start_worker()
    async with cluster.load():
        await cluster.recovers("the start")
        own_etcd.kill()
        first.signal(signal.SIGTERM)
        assert await first.ended(10 * bounds.SECOND) == 0
        second.signal(signal.SIGTERM)
        second.signal(signal.SIGTERM)
        assert await second.ended(10 * bounds.SECOND) in (0, -signal.SIGTERM)
        # Nor does one hang that has never met another.
        first.spawn()
        await cluster.clock.sleep(2 * bounds.SECOND)
        first.signal(signal.SIGTERM)
        assert await first.ended(10 * bounds.SECOND) in (0, -signal.SIGTERM)
        await own_etcd.start()
        await first.start()
        await second.start()
        await cluster.until_led(first, second)
        await cluster.recovers("an etcd that was away")
    await cluster.settle()
