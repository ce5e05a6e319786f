"""The admin port answers probes and scrapers, and only those."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from duecourse.server.telemetry import admin
from duecourse.server.telemetry.metrics import Metrics


@dataclass
class Node:
    """What the admin server is told of a node."""

    metrics: Metrics
    port: int = 0
    is_live: bool = True
    why_not_ready: str | None = None
    notes: tuple[str, ...] = ()


@asynccontextmanager
async def serving(node: Node, **limits: int) -> AsyncIterator[Node]:
    server = admin.AdminServer(
        node.metrics,
        is_live=lambda: node.is_live,
        why_not_ready=lambda: node.why_not_ready,
        notes=lambda: node.notes,
        **limits,
    )
    async with server.serving("127.0.0.1", 0) as node.port:
        yield node


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with serving(Node(Metrics(node_id="a-node", version="1"))) as node:
        yield node


async def ask(node: Node, request: bytes) -> tuple[int, dict[str, str], bytes]:
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        try:
            writer.write(request)
            writer.write_eof()
            answer = await reader.read()
        finally:
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    return int(status.split(" ")[1]), dict(field.split(": ", 1) for field in fields), body


async def get(node: Node, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    return await ask(node, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


async def test_what_is_amiss_is_told_of_a_node_that_is_ready_too(node: Node) -> None:
    node.notes = ("a clock is wrong", "so is another")
    assert (await get(node, "/readyz"))[::2] == (200, b"ready\na clock is wrong\nso is another\n")
    node.why_not_ready = "draining"
    assert (await get(node, "/readyz"))[::2] == (503, b"not ready: draining\na clock is wrong\nso is another\n")


async def test_metrics_are_served_as_prometheus_reads_them(node: Node) -> None:
    node.metrics.grants += 4
    code, fields, body = await get(node, "/metrics")
    assert code == 200
    assert fields["Content-Type"].startswith("text/plain; version=")
    assert b"duecourse_grants_total 4.0" in body
    assert int(fields["Content-Length"]) == len(body)


async def test_a_live_and_ready_node_says_so(node: Node) -> None:
    assert (await get(node, "/healthz"))[0::2] == (200, b"live\n")
    assert (await get(node, "/readyz?verbose"))[0::2] == (200, b"ready\n")


async def test_a_node_whose_loop_is_stuck_is_not_live(node: Node) -> None:
    node.is_live = False
    assert (await get(node, "/healthz"))[0] == 503


async def test_a_node_that_is_not_ready_says_why(node: Node) -> None:
    node.why_not_ready = "3 shards are loading"
    code, _, body = await get(node, "/readyz")
    assert (code, body) == (503, b"not ready: 3 shards are loading\n")


async def test_head_gets_the_head_alone(node: Node) -> None:
    code, fields, body = await get(node, "/healthz", "HEAD")
    assert (code, fields["Content-Length"], body) == (200, "5", b"")


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/../etc HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"GET /metrics\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01", 400),
        (b"", 400),
        (b"GET /metrics HTTP/1.1\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 2_000 + b"\r\n", 431),
    ],
)
async def test_anything_else_is_refused_and_the_next_one_served(node: Node, request_bytes: bytes, code: int) -> None:
    assert (await ask(node, request_bytes))[0] == code
    assert (await get(node, "/healthz"))[0] == 200


async def test_a_peer_that_says_nothing_is_left_after_a_while() -> None:
    async with serving(Node(Metrics()), connection_time=50_000) as node:
        assert await is_cut_off(node)


async def test_too_many_connections_are_cut_off_and_the_rest_is_served() -> None:
    async with serving(Node(Metrics()), max_connections=1) as node:
        reader, silent = await asyncio.open_connection("127.0.0.1", node.port)
        assert await is_cut_off(node)
        silent.write(b"GET /healthz HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        silent.close()


async def test_closing_does_not_wait_for_a_silent_peer() -> None:
    async with asyncio.timeout(10):
        async with serving(Node(Metrics())) as node:
            reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
            writer.write(b"GET /he")
        with pytest.raises(ConnectionError):
            await reader.read()
        writer.close()


async def is_cut_off(node: Node) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    try:
        async with asyncio.timeout(10):
            return await reader.read() == b""
    except ConnectionError:
        return True
    finally:
        writer.close()
