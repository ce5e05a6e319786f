"""The client follows who leads: where its calls go, and that they go somewhere whatever it was told."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import grpc
import pytest
from services import waiting
from services.scripted import ScriptedNode, Silence, Status, answer_all
from services.tcp_proxy import Http2, TcpProxy

from duecourse.client import Client, NewTask, SubmittedTask, Unavailable
from duecourse.client.shard_map import ShardMap
from duecourse.model import bounds, slots
from duecourse.v1 import cluster_service_pb2 as pb
from duecourse.v1 import task_service_pb2

NOWHERE = "127.0.0.1:1"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@asynccontextmanager
async def nodes(count: int) -> AsyncIterator[list[ScriptedNode]]:
    async with ScriptedNode().serving() as first:
        if count == 1:
            yield [first]
            return
        async with nodes(count - 1) as others:
            yield [first, *others]


def picture(*addresses: str, leaders: Sequence[int | None] | None = None) -> pb.WatchClusterResponse:
    """Tell of nodes by their addresses; each leads an equal share of the slots, or as is said by place."""
    told = pb.WatchClusterResponse()
    for number, address in enumerate(addresses):
        told.nodes.add(node_id=f"n{number}", address=address)
    owners = range(len(addresses)) if leaders is None else leaders
    for shard, owner in enumerate(owners):
        first, end = (slots.first_slot(number, len(owners)) for number in (shard, shard + 1))
        leader = "" if owner is None else f"n{owner}"
        told.shards.add(shard=shard, slot_from=first, slot_until=end, leader=leader)
    return told


def ids_of(share: int, shares: int, count: int = 1) -> list[str]:
    """Return ids of tasks in one of equal shares of the slots."""
    found = (f"t{n}" for n in range(10_000))
    mine = (name for name in found if slots.shard_of_slot(slots.slot_of("default", name), shares) == share)
    return [next(mine) for _ in range(count)]


async def follows(client: Client, share: int, shares: int, address: str) -> None:
    """Wait until a share of the slots is known to be led at an address, and calls for it go there."""
    client._follow()
    slot = slots.slot_of("default", ids_of(share, shares)[0])
    router = client._router
    await waiting.until(lambda: router.leader(slot) == router.pick(slot).address == address)


def asked(is_asked: asyncio.Event, *steps: Any) -> Callable[[Any], Any]:
    """Make a step that tells of the call, waits for the events among `steps`, and answers with the last of them."""

    async def step(request: Any) -> Any:
        is_asked.set()
        *events, answer = steps
        for event in events:
            await event.wait()
        return answer(request) if callable(answer) else answer

    return step


def task_ids(node: ScriptedNode) -> list[str]:
    found = []
    for request in node.requests:
        if isinstance(request, task_service_pb2.SubmitTasksRequest):
            found += [task.task_id for task in request.tasks]
        else:
            found.append(request.task.task_id)
    return found


async def test_what_changes_a_task_goes_straight_to_its_leader_and_reads_stay(node: ScriptedNode) -> None:
    async with nodes(1) as [other]:
        node.script("WatchCluster", picture(node.address, other.address), Silence())
        [mine], [theirs] = ids_of(0, 2), ids_of(1, 2)
        async with Client(node.address) as client:
            await follows(client, 1, 2, other.address)
            await client.submit(NewTask("remind", task_id=mine))
            await client.submit(NewTask("remind", task_id=theirs))
            await client.cancel(theirs)
            await client.get(theirs)
        assert [type(request).__name__ for request in node.requests] == ["SubmitTaskRequest", "GetTaskRequest"]
        assert [type(request).__name__ for request in other.requests] == ["SubmitTaskRequest", "CancelTaskRequest"]


async def test_many_tasks_are_put_into_requests_of_their_leaders_and_answered_in_order(node: ScriptedNode) -> None:
    async with nodes(2) as others:
        node.script("WatchCluster", picture(node.address, *[other.address for other in others]), Silence())
        async with Client(node.address) as client:
            await follows(client, 1, 3, others[0].address)
            await follows(client, 2, 3, others[1].address)
            tasks = [NewTask("remind", task_id=f"t{number}") for number in range(100)]
            tasks[7].payload = bytes(bounds.MAX_PAYLOAD_BYTES + 1)
            results = await client.submit_many(iter(tasks), batch_size=10, in_flight=3)
        assert [result.task_id for result in results] == [task.task_id for task in tasks]
        assert [number for number, one in enumerate(results) if not isinstance(one, SubmittedTask)] == [7]
        for share, leader in enumerate((node, *others)):
            sent = set(task_ids(leader))
            assert sent == {name for name in ids_of(share, 3, 40) if int(name[1:]) < 100} - {"t7"}
            sizes = [len(request.tasks) for request in leader.requests]
            assert all(size == 10 for size in sizes[:-1])


async def test_tasks_without_ids_get_one_before_their_leader_is_looked_up(node: ScriptedNode) -> None:
    async with nodes(1) as [other]:
        node.script("WatchCluster", picture(node.address, other.address), Silence())
        async with Client(node.address) as client:
            await follows(client, 1, 2, other.address)
            results = await client.submit_many(NewTask("remind") for _ in range(40))
        ids = {result.task_id for result in results}
        assert len(ids) == 40
        for share, leader in enumerate((node, other)):
            assert {slots.shard_of_slot(slots.slot_of("default", name), 2) for name in task_ids(leader)} == {share}


async def test_a_leader_that_moves_is_followed(node: ScriptedNode) -> None:
    async with nodes(1) as [other]:
        first = picture(node.address, other.address, leaders=[0])
        node.script("WatchCluster", first, picture(node.address, other.address, leaders=[1]), Silence())
        async with Client(node.address) as client:
            await follows(client, 0, 1, other.address)
            await client.submit(NewTask("remind"))
        assert len(other.requests) == 1


async def test_leaders_that_cannot_be_reached_from_here_are_asked_through_the_given_node(node: ScriptedNode) -> None:
    node.script("WatchCluster", picture(NOWHERE, "127.0.0.1:2", leaders=[0, 1]), Silence())
    async with Client(node.address) as client:
        client._follow()
        await waiting.until(lambda: client._router.has_several)
        for number in range(5):
            assert (await client.submit(NewTask("remind", task_id=f"t{number}"))).created
        results = await client.submit_many([NewTask("remind", task_id=f"t{number}") for number in range(5, 40)])
    assert all(isinstance(result, SubmittedTask) for result in results)
    assert sorted(task_ids(node)) == sorted(f"t{number}" for number in range(40))


async def test_a_leader_that_is_gone_costs_one_try(node: ScriptedNode) -> None:
    async with nodes(1) as [other]:
        node.script("WatchCluster", picture(node.address, other.address, leaders=[1]), Silence())
        other.script("SubmitTask", Status(UNAVAILABLE, "DRAINING"))
        async with Client(node.address) as client:
            await follows(client, 0, 1, other.address)
            submitted = await client.submit(NewTask("remind"))
        assert task_ids(other) == task_ids(node) == [submitted.task_id]


async def test_a_leader_that_falls_silent_is_gone_around(node: ScriptedNode) -> None:
    async with nodes(1) as [other]:
        port = int(other.address.rpartition(":")[2])
        async with TcpProxy("127.0.0.1", port, Http2) as proxy:
            address = f"127.0.0.1:{proxy.port}"
            node.script("WatchCluster", picture(node.address, address, leaders=[1]), Silence())
            async with Client(node.address) as client:
                await follows(client, 0, 1, address)
                proxy.cut()
                submitted = await client.submit(NewTask("remind"), timeout=timedelta(seconds=3))
            assert proxy.faults["cut"]
        assert task_ids(node) == [submitted.task_id]


async def test_a_node_that_falls_silent_is_not_listened_to_any_longer(node: ScriptedNode) -> None:
    async with nodes(1) as [other]:
        addresses = (node.address, other.address)
        node.script("WatchCluster", picture(*addresses, leaders=[0]), Silence())
        node.script("SubmitTask", Silence())
        other.script("WatchCluster", picture(*addresses, leaders=[1]), Silence())
        async with Client(node.address) as client:
            await follows(client, 0, 1, node.address)
            await waiting.until(client._router.to(other.address).is_connected)
            submitted = await client.submit(NewTask("remind"), timeout=timedelta(seconds=2))
            assert task_ids(node) == task_ids(other) == [submitted.task_id]
            await follows(client, 0, 1, other.address)
            assert client._router.to(node.address).telling is None
        assert (node.watches, other.watches) == (1, 1)


async def test_a_node_that_answers_that_an_outcome_is_uncertain_is_listened_to(node: ScriptedNode) -> None:
    async with nodes(1) as [other]:
        node.script("WatchCluster", picture(node.address, other.address, leaders=[0]), Silence())
        node.script("SubmitTask", Status(grpc.StatusCode.UNAVAILABLE, "OUTCOME_UNCERTAIN"))
        async with Client(node.address) as client:
            await follows(client, 0, 1, node.address)
            await waiting.until(client._router.to(other.address).is_connected)
            submitted = await client.submit(NewTask("remind"), timeout=timedelta(seconds=9))
            assert task_ids(node) == task_ids(other) == [submitted.task_id]
            assert client._router.to(node.address).telling is not None
        assert (node.watches, other.watches) == (1, 0)


async def test_a_call_that_waits_for_a_leader_goes_to_the_only_node_that_is_left(node: ScriptedNode) -> None:
    async with nodes(1) as [old]:
        is_asked = asyncio.Event()
        old.script("SubmitTask", asked(is_asked, Silence()))
        first, then = picture(node.address, old.address, leaders=[1]), picture(node.address, leaders=[0])
        node.script("WatchCluster", first, is_asked, then, Silence())
        async with Client(node.address) as client:
            await follows(client, 0, 1, old.address)
            async with asyncio.timeout(15):  # A try alone gets half of the call's time.
                submitted = await client.submit(NewTask("remind"), timeout=timedelta(seconds=60))
        assert task_ids(old) == task_ids(node) == [submitted.task_id]


async def test_a_call_that_waits_for_a_leader_which_is_replaced_goes_to_the_new_one(node: ScriptedNode) -> None:
    async with nodes(2) as [old, new]:
        addresses = (node.address, old.address, new.address)
        is_asked = asyncio.Event()
        old.script("SubmitTask", asked(is_asked, Silence()))
        first, then = (picture(*addresses, leaders=[leader]) for leader in (1, 2))
        node.script("WatchCluster", first, is_asked, then, Silence())
        async with Client(node.address) as client:
            await follows(client, 0, 1, old.address)
            await waiting.until(client._router.to(new.address).is_connected)
            submitted = await client.submit(NewTask("remind"), timeout=timedelta(seconds=9))
        assert task_ids(old) == task_ids(new) == [submitted.task_id]
        assert node.requests == []


async def test_a_call_of_one_who_cleans_up_after_its_cancellation_goes_to_the_new_leader_too(
    node: ScriptedNode,
) -> None:
    async with nodes(2) as [old, new]:
        addresses = (node.address, old.address, new.address)
        is_asked = asyncio.Event()
        old.script("SubmitTask", asked(is_asked, Silence()))
        first, then = (picture(*addresses, leaders=[leader]) for leader in (1, 2))
        node.script("WatchCluster", first, is_asked, then, Silence())
        async with Client(node.address) as client, asyncio.TaskGroup() as group:
            await follows(client, 0, 1, old.address)
            await waiting.until(client._router.to(new.address).is_connected)
            has_begun = asyncio.Event()

            async def work() -> None:
                try:
                    has_begun.set()
                    await asyncio.get_running_loop().create_future()
                finally:
                    await client.submit(NewTask("remind"), timeout=timedelta(seconds=9))

            worker = group.create_task(work(), name="work")
            await has_begun.wait()
            worker.cancel()
        [submitted] = task_ids(new)
        assert task_ids(old) == [submitted]


async def test_a_leader_that_is_replaced_in_good_order_answers_what_it_was_asked_before(node: ScriptedNode) -> None:
    async with nodes(2) as [old, new]:
        addresses = (node.address, old.address, new.address)
        is_asked, is_told = asyncio.Event(), asyncio.Event()
        old.script("SubmitTasks", asked(is_asked, is_told, answer_all))
        first, then = (picture(*addresses, leaders=[leader]) for leader in (1, 2))
        node.script("WatchCluster", first, is_asked, then, Silence())
        async with Client(node.address) as client, asyncio.TaskGroup() as group:
            await follows(client, 0, 1, old.address)
            submission = group.create_task(client.submit_many([NewTask("remind")]), name="submit")
            await follows(client, 0, 1, new.address)
            is_told.set()
            [result] = await submission
        assert isinstance(result, SubmittedTask)
        assert task_ids(old) == [result.task_id]
        assert new.requests == node.requests == []


async def test_calls_are_cancelled_with_their_client_and_with_their_caller(node: ScriptedNode) -> None:
    is_asked = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for method in ("SubmitTask", "SubmitTasks"):
            node.script(method, *[asked(is_asked, Silence())] * 2)
            client = Client(node.address)
            for closes in (False, True):
                task = NewTask("remind")
                submitting = client.submit(task) if method == "SubmitTask" else client.submit_many([task])
                call = group.create_task(submitting, name="submit")
                await is_asked.wait()
                is_asked.clear()
                if closes:
                    await client.close()
                else:
                    call.cancel()
                await asyncio.wait((call,))
                assert call.cancelled()
    assert len(node.requests) == 4


async def test_the_leader_that_a_refusal_names_is_asked_next(node: ScriptedNode) -> None:
    async with nodes(2) as [old, new]:
        told = picture(node.address, old.address, new.address, leaders=[1])
        node.script("WatchCluster", told, Silence())
        old.script("SubmitTask", Status(UNAVAILABLE, "NOT_SHARD_LEADER", metadata=(("leader", new.address),)))
        async with Client(node.address) as client:
            await follows(client, 0, 1, old.address)
            new_route = client._router.to(new.address)
            await waiting.until(new_route.is_connected)
            await client.submit(NewTask("remind"))
        assert [len(one.requests) for one in (node, old, new)] == [0, 1, 1]


async def test_when_the_given_node_ends_another_takes_its_place(node: ScriptedNode) -> None:
    async with nodes(1) as [other]:
        async with ScriptedNode().serving() as seed:
            addresses = (seed.address, other.address)
            seed.script("WatchCluster", picture(*addresses, leaders=[None]), Silence())
            client = Client(seed.address)
            await client.submit(NewTask("remind"))
            await waiting.until(lambda: client._router.has_several)
            await waiting.until(client._router.to(other.address).is_connected)
        async with client:
            other.script("WatchCluster", picture(other.address, node.address, leaders=[1]), Silence())
            await client.get("t1")
            assert len(other.requests) == 1
            await follows(client, 0, 1, node.address)


async def test_a_node_alone_is_only_reached_as_it_was_given(node: ScriptedNode) -> None:
    async with nodes(1) as [itself]:
        node.script("WatchCluster", picture(itself.address), Silence())
        async with Client(node.address) as client:
            await client.submit(NewTask("remind"))
            await waiting.until(lambda: client._router._map is not None)
            await client.submit(NewTask("remind"))
            await client.submit_many([NewTask("remind")])
        assert len(node.requests) == 3
        assert itself.requests == []


async def test_a_node_that_tells_nothing_is_used_as_ever(node: ScriptedNode) -> None:
    async with Client(node.address) as client:
        await client.submit(NewTask("remind"))
        await waiting.until(lambda: node.watches)
        await client.submit(NewTask("remind"))
    assert len(node.requests) == 2
    assert node.watches == 1, "it is not asked again soon"


async def test_a_client_that_shall_not_follow_knows_the_given_nodes_only(node: ScriptedNode) -> None:
    async with Client(node.address, follows_leaders=False) as client:
        await client.submit(NewTask("remind"))
        await client.submit_many([NewTask("remind")])
    assert node.watches == 0


async def test_a_call_is_tried_at_one_node_after_the_other_with_one_id(node: ScriptedNode) -> None:
    async with nodes(1) as [other]:
        node.script("WatchCluster", picture(node.address, other.address, leaders=[1]), Silence())
        other.script("SubmitTasks", Status(UNAVAILABLE), answer_all)
        async with Client(node.address) as client:
            await follows(client, 0, 1, other.address)
            [result] = await client.submit_many([NewTask("remind")])
        assert isinstance(result, SubmittedTask)
        assert task_ids(other) == task_ids(node) == [result.task_id]


async def test_a_cluster_without_any_leader_is_unavailable(node: ScriptedNode) -> None:
    node.script("WatchCluster", picture(node.address, NOWHERE, leaders=[None, None]), Silence())
    node.script("SubmitTask", *[Status(UNAVAILABLE, "NO_LEADER")] * 99)
    async with Client(node.address) as client:
        with pytest.raises(Unavailable):
            await client.submit(NewTask("remind"), timeout=timedelta(seconds=1))


def test_a_map_knows_the_leader_of_every_slot_that_has_one() -> None:
    known = ShardMap(picture("a:1", "b:1", leaders=[1, None, 0]))
    ends = [slots.first_slot(shard, 3) for shard in range(4)]
    assert [known.leader(slot) for slot in ends[:3]] == ["b:1", "", "a:1"]
    assert [known.leader(slot - 1) for slot in ends[1:]] == ["b:1", "", "a:1"]
    assert ShardMap(pb.WatchClusterResponse()).leader(0) == ""
    orphan = picture("a:1", leaders=[0])
    orphan.nodes[0].node_id = "other"
    assert ShardMap(orphan).leader(0) == ""
