"""Worker streams over real gRPC: what the machine decides arrives, and ends come with a status."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
from grpc import aio
from rpc.edge import Edge, told_by_stream
from services.garbage import none_left
from streams.node_side import a_hello, an_assignment, succeeded

from duecourse.model import bounds
from duecourse.server.core.effects import Verdict
from duecourse.server.core.errors import DomainError
from duecourse.server.core.task import ShardId
from duecourse.v1 import worker_service_pb2 as pb

Call = aio.StreamStreamCall[pb.StreamAssignmentsRequest, pb.StreamAssignmentsResponse]


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that a turn of the loop will bring."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.to_thread(lambda: None)


async def hear(call: Call) -> pb.StreamAssignmentsResponse:
    async with asyncio.timeout(20):
        message = await call.read()
    assert isinstance(message, pb.StreamAssignmentsResponse), "the stream goes on"
    return message


async def ending(call: aio.StreamStreamCall[Any, Any]) -> grpc.StatusCode:
    """Read what is still there, and return the status."""
    async with asyncio.timeout(20):
        try:
            while await call.read() is not aio.EOF:
                pass
        except aio.AioRpcError:
            pass
        return await call.code()


async def connect(edge: Edge, worker: str = "w", stream_number: int = 1) -> Call:
    call = edge.workers.StreamAssignments()
    await call.write(pb.StreamAssignmentsRequest(number=1, hello=a_hello(worker, stream_number)))
    assert (await hear(call)).WhichOneof("event") == "welcome"
    return call


async def test_an_attempt_goes_out_and_its_outcome_comes_back(edge: Edge) -> None:
    call = await connect(edge)
    (holder,) = edge.node.port.subscribed
    assert edge.node.hub.assign([an_assignment("a", holder, ShardId(0))]) == []
    (assignment,) = (await hear(call)).assignments.assignments
    assert assignment.task.payload == b"payload"
    await call.write(pb.StreamAssignmentsRequest(number=2, succeeded=succeeded("a")))
    await until(lambda: edge.node.port.ends)
    (end,) = edge.node.port.ends
    edge.node.hub.verdicts([(holder, end.lease_token, Verdict.RECORDED)])
    assert list((await hear(call)).outcomes_recorded.recorded) == [assignment.lease_token]


async def test_all_that_is_decided_in_one_turn_leaves_in_one_message(edge: Edge) -> None:
    call = await connect(edge)
    (holder,) = edge.node.port.subscribed
    for number in range(50):
        edge.node.hub.assign([an_assignment(f"t{number}", holder, ShardId(0))])
    assert len((await hear(call)).assignments.assignments) == 50


async def test_a_worker_that_closes_its_side_ends_the_stream_well(edge: Edge) -> None:
    call = await connect(edge)
    await call.done_writing()
    assert await ending(call) is grpc.StatusCode.OK
    assert edge.node.hub.streams == 0
    assert edge.node.port.subscribed == []
    assert edge.metrics.rpc_requests["StreamAssignments", "OK"] == 1


async def test_a_worker_that_vanishes_leaves_no_stream_behind(edge: Edge) -> None:
    call = await connect(edge)
    call.cancel()
    await until(lambda: edge.node.hub.streams == 0)
    assert edge.node.port.subscribed == []


async def test_a_connection_that_breaks_leaves_no_stream_behind(edge: Edge) -> None:
    channel = aio.insecure_channel(edge.address)
    call: aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/duecourse.v1.WorkerService/StreamAssignments")()
    await call.write(pb.StreamAssignmentsRequest(number=1, hello=a_hello()).SerializeToString())
    await call.read()
    await channel.close()
    await until(lambda: edge.node.hub.streams == 0)


@pytest.mark.parametrize(
    "messages",
    [
        [pb.StreamAssignmentsRequest(number=1, credit=pb.Credit(delta=1))],
        [pb.StreamAssignmentsRequest(number=n, hello=a_hello()) for n in (1, 2)],
        [pb.StreamAssignmentsRequest(number=2, hello=a_hello())],
        [pb.StreamAssignmentsRequest(number=1)],
    ],
    ids=["before hello", "hello twice", "a gap", "nothing"],
)
async def test_a_protocol_error_closes_only_its_stream(edge: Edge, messages: list[pb.StreamAssignmentsRequest]) -> None:
    healthy = await connect(edge, "healthy")
    call = edge.workers.StreamAssignments()
    for message in messages:
        await call.write(message)
    assert await ending(call) is grpc.StatusCode.INVALID_ARGUMENT
    found = await told_by_stream(call)
    assert found.reason == "PROTOCOL_VIOLATION"
    await healthy.write(pb.StreamAssignmentsRequest(number=2, credit=pb.Credit(delta=-1)))
    assert (await hear(healthy)).HasField("credit_returned")


async def test_a_message_that_does_not_decode_ends_its_stream(edge: Edge) -> None:
    call: aio.StreamStreamCall[bytes, bytes] = edge.channel.stream_stream(
        "/duecourse.v1.WorkerService/StreamAssignments"
    )()
    await call.write(b"\xff\xff\xff\xff")
    assert await ending(call) is grpc.StatusCode.INVALID_ARGUMENT
    assert (await told_by_stream(call)).reason == "PROTOCOL_VIOLATION"
    assert edge.node.hub.streams == 0


async def test_streams_above_the_bound_are_refused_with_a_delay(edge: Edge) -> None:
    calls = [await connect(edge, f"w{number}") for number in range(4)]
    call = edge.workers.StreamAssignments()
    assert await ending(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
    found = await told_by_stream(call)
    assert found.reason == "OVERLOADED"
    assert found.retry_after is not None
    await calls[0].done_writing()
    assert await ending(calls[0]) is grpc.StatusCode.OK
    await connect(edge, "another")


async def test_a_replaced_stream_is_told_to_reopen(edge: Edge) -> None:
    older = await connect(edge)
    await connect(edge, stream_number=2)
    assert await ending(older) is grpc.StatusCode.UNAVAILABLE
    assert (await told_by_stream(older)).reason == "STREAM_ENDED"


async def test_a_silent_stream_is_ended(edge: Edge) -> None:
    call = await connect(edge)
    edge.node.pass_time(3 * bounds.DEFAULT_HEARTBEAT)
    assert await ending(call) is grpc.StatusCode.UNAVAILABLE
    assert (await told_by_stream(call)).reason == "STREAM_ENDED"


async def test_a_node_that_goes_says_so_to_every_worker(edge: Edge) -> None:
    calls = [await connect(edge, f"w{number}") for number in range(3)]
    edge.node.hub.drain()
    for call in calls:
        assert (await hear(call)).HasField("draining")
    with none_left(DomainError):
        refused = edge.workers.StreamAssignments()
        assert await ending(refused) is grpc.StatusCode.UNAVAILABLE
    edge.node.hub.close()
    for call in calls:
        assert await ending(call) is grpc.StatusCode.UNAVAILABLE
        assert (await told_by_stream(call)).reason == "DRAINING"


def is_read(edge: Edge, number: int) -> bool:
    holders = edge.node.port.subscribed
    return not holders or edge.node.hub.last_read(holders[0]) == number


async def test_a_worker_that_does_not_read_costs_bounded_memory_and_its_stream(edge: Edge) -> None:
    call = await connect(edge)
    (holder,) = edge.node.port.subscribed
    payload = b"x" * bounds.MAX_PAYLOAD_BYTES
    unsent = 0
    for number in range(150):
        unsent += len(edge.node.hub.assign([an_assignment(f"t{number}", holder, ShardId(0), payload)]))
    assert unsent > 50
    number = 1
    while edge.node.hub.streams:
        # It goes on talking, so it is not silent.
        number += 1
        assert number < 1_000
        await call.write(pb.StreamAssignmentsRequest(number=number, credit=pb.Credit()))
        await until(partial(is_read, edge, number))
        edge.node.pass_time(bounds.DEFAULT_HEARTBEAT)
    assert edge.node.port.unsent


async def test_a_fault_of_ours_in_a_stream_is_internal_and_ends_it_alone(edge: Edge) -> None:
    healthy = await connect(edge, "healthy")
    call = await connect(edge)

    def post(shard: ShardId, event: object) -> None:
        raise RuntimeError("secret")

    edge.node.port.post = post  # type: ignore[method-assign]
    await call.write(pb.StreamAssignmentsRequest(number=2, succeeded=succeeded("a")))
    assert await ending(call) is grpc.StatusCode.INTERNAL
    found = await told_by_stream(call)
    assert found.reason == "INVARIANT_VIOLATED"
    assert "secret" not in repr(found)
    assert not healthy.done()
