"""What a node tells of its cluster, to those who ask and to those who watch, and how a node is drained by another."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from grpc import aio
from rpc.edge import Edge, Told, told, told_by_stream
from rpc.several import LONG, SHARDS, Several, SmallNode, several
from services import waiting
from services.garbage import none_left
from services.tcp_proxy import Http2, TcpProxy

from duecourse.model import bounds
from duecourse.server.core.errors import DomainError
from duecourse.server.core.task import ShardId
from duecourse.server.rpc.cluster_service import MAX_ASKING
from duecourse.timing.clock import SystemClock
from duecourse.v1 import cluster_service_pb2 as pb

Watch = aio.UnaryStreamCall[pb.WatchClusterRequest, pb.WatchClusterResponse]


@pytest_asyncio.fixture
async def three() -> AsyncIterator[Several]:
    """Three nodes: shard 0 is led by the first, 1 by the second, 2 and 3 by the third."""
    async with several(3) as nodes:
        for shard, node in enumerate([*nodes.nodes, nodes.nodes[2]]):
            nodes.lead(node, shard)
        yield nodes


async def ask(node: SmallNode, seconds: float = LONG) -> pb.GetClusterResponse:
    return await node.cluster.GetCluster(pb.GetClusterRequest(), timeout=seconds)


async def drain(node: SmallNode, node_id: str) -> None:
    await node.cluster.DrainNode(pb.DrainNodeRequest(node_id=node_id), timeout=LONG)


async def refused_drain(node: SmallNode, node_id: str) -> Told:
    with pytest.raises(aio.AioRpcError) as caught:
        await drain(node, node_id)
    return told(caught.value)


def watch(node: SmallNode) -> Watch:
    return node.cluster.WatchCluster(pb.WatchClusterRequest(), timeout=LONG)


async def read(call: Watch) -> pb.WatchClusterResponse:
    picture = await call.read()
    assert isinstance(picture, pb.WatchClusterResponse)
    return picture


def leaders(picture: pb.WatchClusterResponse | pb.GetClusterResponse) -> list[str]:
    return [shard.leader for shard in picture.shards]


# GetCluster.


async def test_each_node_is_described_by_itself_and_each_shard_by_its_leader(three: Several) -> None:
    a = three.nodes[0]
    found = await ask(a)
    assert (found.coordination, found.answering_node, found.worker_streams) == ("c1", "a", 2)
    assert [node.node_id for node in found.nodes] == ["a", "b", "c"]
    for node, small in zip(found.nodes, three.nodes, strict=True):
        assert node.answered
        assert (node.address, node.version, node.ready_tasks, node.worker_streams) == (small.address, "9.9", 5, 2)
        assert node.wall_clock_offset.ToMicroseconds() == -1
    assert leaders(found) == ["a", "b", "c", "c"]
    assert [shard.tasks_in_memory for shard in found.shards] == [10, 11, 12, 13]
    assert {shard.state for shard in found.shards} == {pb.SHARD_STATE_LED}
    assert all(shard.epoch for shard in found.shards)


async def test_a_node_that_does_not_answer_is_listed_without_its_own_words(three: Several) -> None:
    a, b, c = three.nodes
    async with TcpProxy("127.0.0.1", b.peer_port, Http2) as proxy:
        three.introduce(a.member(), b.member(peer_address=f"127.0.0.1:{proxy.port}"), c.member())
        proxy.cut()
        found = await ask(a)
    assert [(node.node_id, node.answered) for node in found.nodes] == [("a", True), ("b", False), ("c", True)]
    assert found.nodes[1].address == b.address
    assert not found.nodes[1].HasField("wall_clock_offset")
    shard = found.shards[1]
    assert (shard.leader, shard.state, shard.epoch) == ("b", pb.SHARD_STATE_LED, 0), "as far as anybody knows"


async def test_another_node_at_a_nodes_peer_address_is_not_taken_for_it(three: Several) -> None:
    a, b, c = three.nodes
    three.introduce(a.member(), b.member(peer_address=c.peer_address), c.member())
    found = await ask(a)
    assert [(node.node_id, node.answered) for node in found.nodes] == [("a", True), ("b", False), ("c", True)]
    assert await b.surfaces.who_answers(c.peer_address) == ("c", "c's start")


async def test_a_caller_in_a_hurry_is_answered_without_the_silent(three: Several) -> None:
    a, b, c = three.nodes
    async with TcpProxy("127.0.0.1", b.peer_port, Http2) as proxy:
        three.introduce(a.member(), b.member(peer_address=f"127.0.0.1:{proxy.port}"), c.member())
        proxy.cut()
        found = await ask(a, 0.7)
    assert [node.answered for node in found.nodes] == [True, False, True]


async def test_why_a_node_is_not_eligible_is_told(three: Several) -> None:
    a, b, c = three.nodes
    three.introduce(a.member(), b.member(), c.member(ineligible_reason="draining"))
    assert [node.ineligible_reason for node in (await ask(a)).nodes] == ["", "", "draining"]


async def test_of_two_that_claim_a_shard_the_higher_epoch_is_believed(three: Several) -> None:
    a, b, _ = three.nodes
    a.loop.shards[ShardId(1)] = 1_000
    assert (await ask(b)).shards[1].leader == "a"
    b.loop.shards[ShardId(1)] = 1_001
    assert (await ask(a)).shards[1].leader == "b"


async def test_a_shard_whose_leader_has_not_begun_is_loading_and_one_without_a_leader_unled(three: Several) -> None:
    a, b, _ = three.nodes
    del b.loop.shards[ShardId(1)]
    three.lead(None, 2)
    found = await ask(a)
    assert (found.shards[1].leader, found.shards[1].state) == ("b", pb.SHARD_STATE_LOADING)
    assert (found.shards[2].leader, found.shards[2].state) == ("", pb.SHARD_STATE_UNLED)


async def test_a_peer_is_told_of_the_asked_node_alone(three: Several) -> None:
    a = three.nodes[0]
    found = await a.peer_cluster.GetCluster(pb.GetClusterRequest(), timeout=LONG)
    assert [node.node_id for node in found.nodes] == ["a"]
    assert leaders(found) == ["a", "", "", ""]
    assert a.peer_calls == 0


async def test_descriptions_that_cost_calls_of_others_are_bounded(three: Several) -> None:
    a, b, c = three.nodes
    async with TcpProxy("127.0.0.1", b.peer_port, Http2) as proxy:
        three.introduce(a.member(), b.member(peer_address=f"127.0.0.1:{proxy.port}"), c.member())
        proxy.cut()
        calls = [a.cluster.GetCluster(pb.GetClusterRequest(), timeout=LONG) for _ in range(MAX_ASKING + 5)]
        codes = [await call.code() for call in calls]
    assert codes.count(grpc.StatusCode.OK) == MAX_ASKING
    assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 5


# DrainNode.


async def test_a_node_drains_itself_or_passes_the_request_on(three: Several) -> None:
    a, b, c = three.nodes
    await drain(a, "a")
    await drain(a, "c")
    await drain(a, "c")
    assert [node.drained for node in (a, b, c)] == [1, 0, 2]


async def test_a_node_that_nobody_knows_is_not_found(three: Several) -> None:
    a = three.nodes[0]
    found = await refused_drain(a, "z")
    assert (found.code, found.reason) == (grpc.StatusCode.NOT_FOUND, "NODE_NOT_FOUND")
    assert (await refused_drain(a, "")).field == "node_id"
    with pytest.raises(aio.AioRpcError) as caught:
        await a.peer_cluster.DrainNode(pb.DrainNodeRequest(node_id="b"), timeout=LONG)
    assert told(caught.value).reason == "NODE_NOT_FOUND", "what came from another node is not passed on"


async def test_draining_a_node_that_is_not_reached_surely_did_nothing_and_may_be_tried_again(three: Several) -> None:
    a, b, c = three.nodes
    three.introduce(a.member(), b.member(peer_address="127.0.0.1:1"), c.member())
    found = await refused_drain(a, "b")
    assert (found.code, found.reason) == (grpc.StatusCode.UNAVAILABLE, "NODE_NOT_REACHED")
    assert found.retry_after is not None


# WatchCluster.


async def test_who_watches_is_told_at_once_and_whenever_it_changes(three: Several) -> None:
    a, b, c = three.nodes
    call = watch(a)
    first = await read(call)
    assert [(node.node_id, node.address) for node in first.nodes] == [(node.name, node.address) for node in (a, b, c)]
    assert leaders(first) == ["a", "b", "c", "c"]
    assert [(shard.slot_from, shard.slot_until) for shard in first.shards] == [
        (bounds.SLOTS // SHARDS * shard, bounds.SLOTS // SHARDS * (shard + 1)) for shard in range(SHARDS)
    ]
    three.lead(b, 3)
    assert leaders(await read(call)) == ["a", "b", "c", "b"]
    three.lead(None, 0)
    third = await read(call)
    assert (third.shards[0].leader, third.shards[0].state) == ("", pb.SHARD_STATE_UNLED)
    three.introduce(a.member(), b.member())
    assert [node.node_id for node in (await read(call)).nodes] == ["a", "b"]
    call.cancel()


async def test_many_changes_are_told_in_one(three: Several) -> None:
    a, b, c = three.nodes
    call = watch(a)
    await read(call)
    for number in range(50):
        three.lead(b if number % 2 else c, 3)
    assert leaders(await read(call)) == ["a", "b", "c", "b"]
    three.lead(a, 0)
    three.lead(c, 1)
    assert leaders(await read(call)) == ["a", "c", "c", "b"], "and nothing in between"
    call.cancel()


async def test_changes_that_change_nothing_are_not_told(three: Several) -> None:
    a, b, _ = three.nodes
    call = watch(a)
    await read(call)
    three.introduce(*[node.member(wall_clock_offset=7) for node in three.nodes])
    await SystemClock().sleep(2 * bounds.CLUSTER_NEWS_INTERVAL)
    three.lead(b, 3)
    assert leaders(await read(call)) == ["a", "b", "c", "b"]
    call.cancel()


async def test_watching_ends_with_the_node(three: Several) -> None:
    a = three.nodes[0]
    call = watch(a)
    await read(call)
    async with asyncio.TaskGroup() as group:
        group.create_task(a.api.stop(10 * bounds.SECOND))
        async with asyncio.timeout(5):
            assert await call.read() is aio.EOF
            assert await call.code() is grpc.StatusCode.OK


async def test_watchers_are_bounded_and_those_that_leave_make_room(edge: Edge) -> None:
    calls = [edge.cluster.WatchCluster(pb.WatchClusterRequest(), timeout=LONG) for _ in range(2)]
    for call in calls:
        await call.read()
    with none_left(DomainError):
        third = edge.cluster.WatchCluster(pb.WatchClusterRequest(), timeout=LONG)
        assert await third.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await told_by_stream(third)).reason == "OVERLOADED"  # type: ignore[arg-type]
    assert edge.metrics.admission_refusals == {"cluster_watchers": 1}
    calls[0].cancel()
    await waiting.until(lambda: edge.metrics.rpc_requests["WatchCluster", "CANCELLED"] == 1)
    again = edge.cluster.WatchCluster(pb.WatchClusterRequest(), timeout=LONG)
    assert isinstance(await again.read(), pb.WatchClusterResponse)


async def test_a_node_alone_is_watched_and_drained_like_any_other(edge: Edge) -> None:
    call = edge.cluster.WatchCluster(pb.WatchClusterRequest(), timeout=LONG)
    picture = await call.read()
    assert isinstance(picture, pb.WatchClusterResponse)
    assert leaders(picture) == ["n1", "n1"]
    await edge.cluster.DrainNode(pb.DrainNodeRequest(node_id="n1"), timeout=LONG)
    assert edge.drained == 1
    assert [node.node_id for node in (await edge.cluster.GetCluster(pb.GetClusterRequest())).nodes] == ["n1"]


async def test_a_watch_request_that_does_not_decode_is_refused(edge: Edge) -> None:
    method: aio.UnaryStreamMultiCallable[bytes, bytes] = edge.channel.unary_stream(
        "/duecourse.v1.ClusterService/WatchCluster"
    )
    call = method(b"\xff\xff", timeout=LONG)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
