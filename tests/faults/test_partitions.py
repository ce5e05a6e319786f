"""Nodes that are cut off, silently: from etcd, from the store, from their workers, from all; and one stream alone.

Also what networks do short of that: connections that are ended by age, forgotten, or narrow, and addresses that change.
"""

import asyncio
from contextlib import suppress
from datetime import timedelta

import pytest
from faults.cluster import HEARTBEAT, Cluster
from faults.cluster_of_nodes import EVERYTHING, SESSION, STEADY, TAKEN_OVER, ClusterOfNodes, Link
from faults.conftest import StartCluster
from faults.recording_client import Ask
from services.freezing import frozen
from services.name_server import NameServer
from services.tcp_proxy import Direction

from duecourse import client as sdk
from duecourse.model import bounds

SILENT = bounds.SILENT_INTERVALS * HEARTBEAT + 8 * bounds.SECOND
"""After so long a stream that is silent is given up, on a machine that is busy."""


async def _until_moved(cluster: ClusterOfNodes, shards: set[int], to: set[str], limit: int = TAKEN_OVER) -> None:
    """Wait until these nodes lead the shards."""
    async with asyncio.timeout(limit / bounds.SECOND):
        while True:
            with suppress(sdk.DuecourseError):
                found = await cluster.picture()
                if all(shard.leader in to for shard in found.shards if shard.shard in shards):
                    return
            await cluster.clock.sleep(20 * bounds.MILLISECOND)


@pytest.mark.parametrize("directions", [(), (Direction.TO_CLIENT,)], ids=["both ways", "one way"])
async def test_a_leader_that_is_cut_off_from_etcd_is_replaced_and_refused(
    start_cluster: StartCluster, directions: tuple[Direction, ...], is_long: bool
) -> None:
    cluster = await start_cluster(links={"node-1": (Link.ETCD,)})
    cut_off, etcd = cluster.nodes[0], cluster.links["node-1"][Link.ETCD]
    cluster.start_worker("one")
    cluster.start_worker("two")
    async with cluster.load():
        for _ in range(10 if is_long else 1):
            await cluster.recovers("the start")
            led = await cluster.leads(cut_off)
            ended = len(cut_off.logged("term_ended"))
            etcd.cut(*directions)
            until = cluster.clock.elapsed() + TAKEN_OVER
            while len(cut_off.logged("term_ended")) - ended < len(led):
                await cluster.recovers("a cut from etcd, still cut off")
                assert cluster.clock.elapsed() < until, f"it was not replaced: {cut_off.end_of_log()}"
                await cluster.clock.sleep(bounds.SECOND // 2)
            assert {line["reason"] for line in cut_off.logged("term_ended")[ended:]} == {"stale"}
            assert etcd.faults["cut"]
            etcd.heal()
            await cluster.until_led(*cluster.nodes)
    await cluster.settle()


async def test_a_leader_that_is_cut_off_from_the_store_gives_its_shards_away(
    start_cluster: StartCluster, is_long: bool
) -> None:
    cluster = await start_cluster(links={"node-1": (Link.STORE,)})
    store = cluster.links["node-1"][Link.STORE]
    cluster.start_worker("one")
    cluster.start_worker("two")
    async with cluster.load():
        for _ in range(10 if is_long else 1):
            await cluster.recovers("the start")
            led = await cluster.leads(cluster.nodes[0])
            store.cut()
            await _until_moved(cluster, led, {"node-2", "node-3"}, 2 * TAKEN_OVER)
            await cluster.recovers("a cut from the store, still cut off", TAKEN_OVER)
            assert store.faults["cut"]
            store.heal()
            await cluster.until_led(*cluster.nodes)
    await cluster.settle()
    assert cluster.nodes[0].child.is_running


async def test_a_node_and_workers_that_no_longer_hear_each_other_both_notice(
    start_cluster: StartCluster, is_long: bool
) -> None:
    cluster = await start_cluster(links={"node-1": (Link.API,)})
    cut_off, api = cluster.nodes[0], cluster.links["node-1"][Link.API]
    worker = cluster.start_worker()
    async with cluster.client() as client:
        for number in range(10 if is_long else 1):
            await cluster.recovers("the start")
            (shard, *_) = await cluster.leads(cut_off)
            running = [cluster.id_in(shard, f"running-{number}-{index}") for index in range(5)]
            await client.submit(*[Ask(task_id, seconds=2) for task_id in running])
            await cluster.until_started(*running)
            api.cut()
            await _until_streams(cluster, cut_off.name, 0, SILENT)
            await cluster.clock.sleep(SESSION)
            assert api.faults["cut"]
            api.heal()
            await _until_streams(cluster, cut_off.name, 1, 15 * bounds.SECOND)
            await cluster.recovers("a cut from the worker")
    await cluster.settle()
    assert worker.is_running


async def test_a_stream_that_is_swallowed_beside_others_is_replaced(start_cluster: StartCluster, is_long: bool) -> None:
    cluster = await start_cluster(links={"node-1": (Link.API,)})
    (proxy,) = cluster.links["node-1"][Link.API].each
    cluster.start_worker()
    async with cluster.load():
        for _ in range(10 if is_long else 1):
            await cluster.recovers("the start")
            proxy.swallow()
            # Submissions are served all the while, and what is due at this node waits for a new stream.
            await cluster.recovers("a swallowed stream", 15 * bounds.SECOND)
    assert proxy.faults["swallowed"]
    assert not proxy.faults["reset"]
    await cluster.settle()


async def test_a_node_that_is_cut_off_from_everything_does_nothing_and_comes_back(
    start_cluster: StartCluster, is_long: bool
) -> None:
    cluster = await start_cluster(links={"node-1": EVERYTHING})
    cut_off, links = cluster.nodes[0], cluster.links["node-1"]
    cluster.start_worker("one")
    cluster.start_worker("two")
    async with cluster.load():
        for _ in range(10 if is_long else 1):
            await cluster.recovers("the start")
            for link in links.values():
                link.cut()
            await cluster.recovers("a cut from everything, still cut off", TAKEN_OVER)
            await cluster.clock.sleep(cluster.source.randrange(2 * SESSION))
            for link in links.values():
                link.heal()
            await cluster.until_led(*cluster.nodes)
    assert all(link.faults["cut"] for link in links.values())
    await cluster.settle()
    assert cut_off.child.is_running


async def test_a_node_that_is_cut_off_again_and_again_keeps_nobody_from_working(
    start_cluster: StartCluster, is_long: bool
) -> None:
    cluster = await start_cluster(links={"node-1": (Link.ETCD, Link.STORE)})
    links = cluster.links["node-1"]
    cluster.start_worker("one")
    cluster.start_worker("two")
    async with cluster.load():
        await cluster.recovers("the start")
        for _ in range(100 if is_long else 3):
            link = links[cluster.source.choice([Link.ETCD, Link.STORE])]
            link.cut(*cluster.source.choice([(), (Direction.TO_CLIENT,), (Direction.TO_SERVER,)]))
            await cluster.clock.sleep(cluster.source.randrange(bounds.SECOND, 3 * bounds.SECOND))
            link.heal()
            await cluster.clock.sleep(cluster.source.randrange(bounds.SECOND, 3 * bounds.SECOND))
        assert sum(link.faults["cut"] for link in links.values()), "the fault did not fire"
        await cluster.recovers("the last cut", 20 * bounds.SECOND)
        await cluster.until_led(*cluster.nodes)
    await cluster.settle()


async def test_connections_that_are_ended_by_age_cost_nothing(start_cluster: StartCluster, is_long: bool) -> None:
    cluster = await start_cluster(2, links={"node-1": (Link.API, Link.PEERS)}, lease="12s", session=STEADY)
    proxies = [proxy for link in cluster.links["node-1"].values() for proxy in link.each]
    cluster.start_worker()
    async with cluster.load(), cluster.client() as client:
        await cluster.recovers("the start")
        ages = 20 if is_long else 3
        before = await cluster.epochs()
        running = [f"running-{number}" for number in range(20)]
        await client.submit(*[Ask(task_id, seconds=2 * ages) for task_id in running])
        await cluster.until_started(*running)
        for _ in range(ages):
            for proxy in proxies:
                await proxy.say_goodbye()
            await cluster.recovers("a goodbye to all connections", 10 * bounds.SECOND)
            # What was begun may end before the connection does, and leases are renewed: no connection is that short.
            await cluster.clock.sleep(2 * HEARTBEAT)
            for proxy in proxies:
                proxy.end()
            await cluster.recovers("the end of all connections", 10 * bounds.SECOND)
    assert await cluster.epochs() == before, "shards moved"
    recorded = await cluster.settle(5 * bounds.MINUTE)
    assert all(proxy.faults["goodbye"] and proxy.faults["ended"] for proxy in proxies)
    assert not any(proxy.faults["reset"] for proxy in proxies)
    outcomes = {one.new.outcome for one in recorded.transitions if one.new} - {None}
    assert outcomes <= {"succeeded", "returned"}, "an attempt was lost"


@pytest.mark.parametrize("who", ["the node", "the worker"])
async def test_connections_that_were_forgotten_during_a_long_freeze_are_given_up(
    start_cluster: StartCluster, who: str, is_long: bool
) -> None:
    cluster = await start_cluster(links={"node-1": EVERYTHING})
    links = cluster.links["node-1"]
    worker = cluster.start_worker()
    async with cluster.load():
        await cluster.recovers("the start")
        with frozen(worker.pid if who == "the worker" else cluster.nodes[0].child.pid):
            # As by a firewall on the way: its other side is told nothing, nor is the one that wakes up.
            for proxy in (proxy for link in links.values() for proxy in link.each):
                proxy.forget()
            await cluster.clock.sleep((120 if is_long else 5) * bounds.SECOND)
        await cluster.until_led(*cluster.nodes)
        await _until_streams(cluster, "node-1", 1, SILENT + 10 * bounds.SECOND)
        await cluster.recovers("a long freeze")
    assert all(link.faults["forgotten"] for link in links.values())
    await cluster.settle()


@pytest.mark.parametrize("how", ["narrow", "far away"])
async def test_a_slow_link_to_a_worker_costs_no_attempt(start_cluster: StartCluster, how: str, is_long: bool) -> None:
    cluster = await start_cluster(1, links={"node-1": (Link.API,)}, lease="12s", heartbeat="2s")
    (proxy,) = cluster.links["node-1"][Link.API].each
    # What a worker may hold has to come through the link within a lease: it takes some 2 s here.
    cluster.start_worker(slots=20)
    async with cluster.client() as client:
        await cluster.recovers("the start")
        if how == "narrow":
            proxy.narrow(8_000)
        else:
            proxy.delay(500 * bounds.MILLISECOND)
        asks = [Ask(f"task-{number}", seconds=1, payload_bytes=400) for number in range(300 if is_long else 60)]
        await client.submit(*asks)
        await cluster.until_started(*(ask.task_id for ask in asks))
    recorded = await cluster.settle()
    assert proxy.faults["narrowed"] or proxy.faults["delayed"]
    outcomes = {one.new.outcome for one in recorded.transitions if one.new} - {None}
    assert outcomes <= {"succeeded", "returned"}, "an attempt was lost"


async def test_nodes_whose_addresses_change_are_found_by_those_that_knew_the_old_ones(
    start_cluster: StartCluster, is_long: bool
) -> None:
    cluster = await start_cluster()
    worker = cluster.start_worker()
    old = {node.address for node in cluster.nodes}
    # Its client, like the worker, was given the first addresses and no other.
    async with cluster.load():
        for _ in range(5 if is_long else 1):
            await cluster.recovers("the start")
            for node in cluster.nodes:
                node.kill()
                node.move()
                await node.start()
                await cluster.until_led(*cluster.nodes)
                await _until_streams(cluster, node.name, 1, 15 * bounds.SECOND)
                await cluster.recovers(f"another address of {node.name}")
    assert old.isdisjoint(node.address for node in cluster.nodes)
    await cluster.settle()
    assert worker.is_running


async def test_a_name_that_leads_elsewhere_is_asked_for_again(cluster: Cluster, is_long: bool) -> None:
    node = cluster.node
    async with NameServer("127.0.0.1") as names:
        node.known_as = names.target(node.port)
        cluster.start_worker()
        async with cluster.load(), cluster.client(timedelta(seconds=10)) as client:
            await cluster.recovers("the start")
            await client.submit(Ask("before"))
            for number in range(2, 22 if is_long else 4):
                node.kill()
                names.leads_to = f"127.0.0.{number}"
                node.settings["api_listen"] = f"{names.leads_to}:{node.port}"
                await node.start()
                asks = cluster.ask_many(f"moved-{number}", 20, bounds.SECOND)
                answers = await client.submit(*asks)
                assert all(isinstance(answer, sdk.SubmittedTask) for answer in answers), answers
                await cluster.until_started(*(ask.task_id for ask in asks), limit=10 * bounds.SECOND)
        await cluster.settle()
    assert names.asked


async def _until_streams(cluster: ClusterOfNodes, name: str, count: int, limit: int) -> None:
    async with asyncio.timeout(limit / bounds.SECOND):
        while True:
            # The node that is asked may be the one that is not heard.
            with suppress(sdk.DuecourseError):
                found = await cluster.picture()
                if any(node.node_id == name and node.answered and node.worker_streams == count for node in found.nodes):
                    return
            await cluster.clock.sleep(20 * bounds.MILLISECOND)
