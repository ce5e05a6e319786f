"""Health, reflection, and a server that stays alive whatever arrives on its port."""

import asyncio
import os
import ssl
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rpc.edge import Edge, told

from duecourse.model import bounds
from duecourse.server.rpc.server import SERVICES
from duecourse.v1 import cluster_service_pb2, task_service_pb2

Method = aio.UnaryUnaryMultiCallable[bytes, bytes]
Health = health_pb2.HealthCheckResponse


async def health_of(edge: Edge, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(edge.channel)  # type: ignore[no-untyped-call]
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def is_alive(edge: Edge) -> bool:
    response = await edge.cluster.GetCluster(cluster_service_pb2.GetClusterRequest(), timeout=20)
    return bool(response.coordination == "solo")


async def test_each_service_says_whether_it_serves(edge: Edge) -> None:
    for service in ("", *SERVICES):
        assert await health_of(edge, service) == Health.SERVING
    await edge.server.set_serving(is_serving=False)
    for service in ("", *SERVICES):
        assert await health_of(edge, service) == Health.NOT_SERVING
    with pytest.raises(aio.AioRpcError) as caught:
        await health_of(edge, "no.such.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("is_on", [True, False])
async def test_reflection_is_served_only_if_it_is_wanted(is_on: bool) -> None:
    async with Edge(has_reflection=is_on).serving() as edge:
        stub = reflection_pb2_grpc.ServerReflectionStub(edge.channel)  # type: ignore[no-untyped-call]
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        if is_on:
            answer = await call.read()
            names = {service.name for service in answer.list_services_response.service}
            assert set(SERVICES) <= names
            call.cancel()
        else:
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_port_that_is_taken_is_an_error_and_not_shared(edge: Edge) -> None:
    other = Edge()
    with pytest.raises(OSError, match="cannot listen"):
        await other.server.start(edge.address)
    await other.server.stop(0)


async def send(edge: Edge, data: bytes) -> bytes:
    """Send bytes on a connection of their own and read what comes until it is closed, for a while at most."""
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    answer = b""
    try:
        writer.write(data)
        await writer.drain()
        writer.write_eof()
        async with asyncio.timeout(5):
            answer = await reader.read(65_536)
    except OSError:
        pass
    finally:
        writer.close()
    return answer


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 10_000,
        os.urandom(10_000),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /duecourse.v1.TaskService/SubmitTask HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        PREFACE[:10],
        PREFACE + os.urandom(1_000),
        PREFACE + b"\xff\xff\xff\x04\x00\x00\x00\x00\x00",
    ],
    ids=["nothing", "zeros", "random", "http1-get", "http1-post", "half-a-preface", "random-frames", "huge-frame"],
)
async def test_noise_on_the_port_hurts_nobody(edge: Edge, data: bytes) -> None:
    answer = await send(edge, data)
    assert b"Traceback" not in answer
    assert await is_alive(edge)


async def test_tls_to_a_plain_port_hurts_nobody(edge: Edge) -> None:
    context = ssl.create_default_context()
    with pytest.raises((ssl.SSLError, ConnectionError)):
        async with asyncio.timeout(20):
            await asyncio.open_connection("127.0.0.1", edge.port, ssl=context, server_hostname="localhost")
    assert await is_alive(edge)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x12\x7f",
        b"\x0a\x02\xff\xfe",
        b"\x12\x04\x0a\x02\xc3\x28",
        b"\x12\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80",
        b"\x13" * 1_000,
    ],
    ids=["garbage", "cut off", "invalid utf-8", "invalid utf-8 inside", "endless varint", "deep groups"],
)
async def test_a_message_that_does_not_parse_fails_its_call_alone(edge: Edge, data: bytes) -> None:
    call: Method = edge.channel.unary_unary("/duecourse.v1.TaskService/SubmitTask")
    with pytest.raises(aio.AioRpcError) as caught:
        await call(data, timeout=20)
    found = told(caught.value)
    assert (found.code, found.field) == (grpc.StatusCode.INVALID_ARGUMENT, "request")
    assert "Traceback" not in found.message
    assert edge.commands.stored == {}
    assert await is_alive(edge)


async def test_unknown_fields_are_no_fault(edge: Edge) -> None:
    request = cluster_service_pb2.GetClusterRequest.FromString(b"\xf8\x3f\x01")
    response = await edge.cluster.GetCluster(request)
    assert response.coordination == "solo"


async def test_an_unknown_method_is_unimplemented(edge: Edge) -> None:
    call: Method = edge.channel.unary_unary("/duecourse.v1.TaskService/DropEverything")
    with pytest.raises(aio.AioRpcError) as caught:
        await call(b"", timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "metadata",
    [
        [("x-large", "x" * 20_000)],
        [(f"x-key-{n}", "x" * 40) for n in range(1_000)],
    ],
    ids=["one large value", "a thousand keys"],
)
async def test_oversized_metadata_is_refused(edge: Edge, metadata: list[tuple[str, str]]) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.cluster.GetCluster(
            cluster_service_pb2.GetClusterRequest(), metadata=aio.Metadata(*metadata), timeout=20
        )
    assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL)
    assert await is_alive(edge)


async def test_a_message_above_every_bound_is_refused_before_it_is_parsed(edge: Edge) -> None:
    call: Method = edge.channel.unary_unary("/duecourse.v1.TaskService/SubmitTask")
    with pytest.raises(aio.AioRpcError) as caught:
        await call(b"\x12" + b"\0" * 100 * 1024 * 1024, timeout=60)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await is_alive(edge)


async def test_no_call_of_a_crowd_that_comes_at_once_is_thrown_away(edge: Edge) -> None:
    request = cluster_service_pb2.GetClusterRequest()
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(_code_of(edge.cluster.GetCluster(request, timeout=60))) for _ in range(3_000)]
    # With gRPC's own bound some 10 of 100 ended CANCELLED.
    assert {call.result() for call in calls} <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}


async def _code_of(call: "aio.UnaryUnaryCall[cluster_service_pb2.GetClusterRequest, Any]") -> grpc.StatusCode:
    return await call.code()


@pytest.mark.parametrize("timeout", [0.001, 365 * 86_400.0])
async def test_odd_deadlines_are_survived(edge: Edge, timeout: float) -> None:
    request = task_service_pb2.ListTasksRequest()
    try:
        await edge.tasks.ListTasks(request, timeout=timeout)
    except aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # noqa: PT017
    assert await is_alive(edge)


async def test_a_stop_is_bounded_whatever_is_open() -> None:
    edge = Edge()
    async with edge.serving():
        stream = edge.workers.StreamAssignments()
        health = health_pb2_grpc.HealthStub(edge.channel).Watch(  # type: ignore[no-untyped-call]
            health_pb2.HealthCheckRequest()
        )
        assert (await health.read()).status == Health.SERVING
        async with asyncio.timeout(20):
            await edge.server.stop(bounds.SECOND)
        with pytest.raises(aio.AioRpcError):
            await stream.read()
