"""Any node of a cluster carries out any request, also while nodes come and go."""

import asyncio
import re
import signal
from datetime import timedelta

import pytest
from faults.cluster import NodeProcess
from faults.cluster_of_nodes import STEADY, ClusterOfNodes, Link
from faults.conftest import StartCluster

from duecourse import client as sdk
from duecourse.cli.launcher.ports import HOST
from duecourse.client import CancelResult, NewTask, SubmittedTask, TaskState
from duecourse.model import bounds

LATER = timedelta(hours=1)


def a_task(task_id: str) -> NewTask:
    return NewTask("later", task_id=task_id, delay=LATER)


async def passed_on(node: NodeProcess) -> int:
    """Return how many batches of tasks a node got from others."""
    reader, writer = await asyncio.open_connection(HOST, node.admin_port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    found = re.search(rb'rpc_requests_total{method="peer/SubmitTasks",code="OK"} (\d+)', await reader.read())
    writer.close()
    return int(found[1]) if found else 0


async def test_each_node_submits_reads_and_cancels_what_others_lead(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    for number, node in enumerate(cluster.nodes):
        async with sdk.Client(node.address, follows_leaders=False) as client:
            results = await client.submit_many([a_task(f"many-{number}-{index}") for index in range(200)])
            assert all(isinstance(result, SubmittedTask) and result.created for result in results)
            for index in range(16):
                assert (await client.submit(a_task(f"one-{number}-{index}"))).created
    for number in range(3):
        other = cluster.nodes[number - 1]
        async with sdk.Client(other.address, follows_leaders=False) as client:
            for index in range(16):
                task_id = f"one-{number}-{index}"
                assert not (await client.submit(a_task(task_id))).created, "the same request by way of another node"
                assert (await client.get(task_id)).state is TaskState.PENDING
                assert (await client.cancel(task_id)).result is CancelResult.PREVENTED


async def test_a_client_goes_straight_to_the_leaders(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(session=STEADY)
    async with sdk.Client(cluster.nodes[0].address) as client:
        await client.submit(a_task("first"))
        await client.submit_many([a_task(f"early-{index}") for index in range(100)])
        tasks = [a_task(f"t{index}") for index in range(100)]
        addresses = {node.address for node in cluster.nodes}
        async with asyncio.timeout(20):
            while {client._router.pick(slot).address for slot in range(0, bounds.SLOTS, 64)} != addresses:
                await cluster.clock.sleep(20 * bounds.MILLISECOND)
        before = [await passed_on(node) for node in cluster.nodes]
        results = await client.submit_many(tasks)
        assert all(isinstance(result, SubmittedTask) and result.created for result in results)
        assert [await passed_on(node) for node in cluster.nodes] == before


async def test_no_request_fails_while_all_nodes_are_restarted_in_turn(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    over = asyncio.Event()
    submitted = 0

    async def submit(name: str, client: sdk.Client) -> None:
        nonlocal submitted
        while not over.is_set():
            task_id = f"{name}-{submitted}"
            submitted += 1
            await client.submit(a_task(task_id))
            assert (await client.cancel(task_id)).result is CancelResult.PREVENTED
            results = await client.submit_many([a_task(f"{task_id}-{index}") for index in range(20)])
            assert all(isinstance(result, SubmittedTask) for result in results), results

    addresses = [node.address for node in cluster.nodes]
    async with (
        sdk.Client(addresses) as following,
        sdk.Client(addresses, follows_leaders=False) as led_on,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(submit("following", following))
        group.create_task(submit("led-on", led_on))
        for node in cluster.nodes:
            node.signal(signal.SIGTERM)
            assert await node.ended() == 0
            await node.start()
            await cluster.until_led(*cluster.nodes)
        over.set()
    assert submitted > 20


async def test_a_leader_that_other_nodes_do_not_reach_is_named_to_clients_that_do(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(links={"node-3": (Link.PEERS,)}, session=STEADY)
    asked, _, cut_off = cluster.nodes
    lonely = sorted(await cluster.leads(cut_off))
    async with sdk.Client(asked.address) as client, sdk.Client(asked.address, follows_leaders=False) as led_on:
        await client.submit(a_task(cluster.id_in(lonely[0], "before")))
        cluster.links[cut_off.name][Link.PEERS].cut()
        for shard in lonely:
            assert (await client.submit(a_task(cluster.id_in(shard, "direct")))).created
        with pytest.raises((sdk.Unavailable, sdk.OutcomeUncertain)):
            await led_on.submit(a_task(cluster.id_in(lonely[0], "led-on")), timeout=timedelta(seconds=3))
        node = next(node for node in (await client.cluster()).nodes if node.node_id == cut_off.name)
        assert not node.answered
        assert cluster.links[cut_off.name][Link.PEERS].faults["cut"]
        cluster.links[cut_off.name][Link.PEERS].heal()
        assert await led_on.submit(a_task(cluster.id_in(lonely[0], "led-on")), timeout=timedelta(seconds=20))


async def test_a_node_is_drained_by_way_of_another(start_cluster: StartCluster) -> None:
    cluster = await start_cluster()
    first, second, third = cluster.nodes
    async with sdk.Client(first.address) as client:
        await client.drain_node(third.name)
        assert await third.ended() == 0
        await cluster.until_led(first, second)
        await _submits_everywhere(cluster, client)


async def _submits_everywhere(cluster: ClusterOfNodes, client: sdk.Client) -> None:
    for task_id in cluster._probes():
        assert (await client.submit(a_task(task_id))).created
