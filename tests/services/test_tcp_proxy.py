"""The proxy itself does what it says, or the tests that use it prove nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg
import pytest
from services.tcp_proxy import HOST, Direction, Http2, Postgres, TcpProxy
from services.waiting import until

from duecourse.model import bounds
from duecourse.timing.clock import SystemClock

PATIENCE = 20
SILENCE = 1
"""After so long without a word it is taken for silence."""


class Line:
    """One connection to a server that sends everything back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def asks(self, text: bytes, patience: float = PATIENCE) -> bytes:
        self.writer.write(text)
        await self.writer.drain()
        return await self.hears(patience)

    async def hears(self, patience: float = PATIENCE) -> bytes:
        async with asyncio.timeout(patience):
            return await self.reader.read(100)


@asynccontextmanager
async def an_echo(after: bytes = b"") -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(len(after))
            while data := await reader.read(100):
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@asynccontextmanager
async def a_line(proxy: TcpProxy) -> AsyncIterator[Line]:
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    yield Line(reader, writer)
    writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[TcpProxy]:
    async with an_echo() as port, TcpProxy(HOST, port) as proxy:
        yield proxy


async def test_it_forwards_and_passes_the_end_on(proxy: TcpProxy) -> None:
    async with a_line(proxy) as line:
        assert await line.asks(b"hello") == b"hello"
        line.writer.write_eof()
        assert await line.reader.read() == b""
    await until(lambda: not proxy.open_connections)
    assert not proxy.faults


async def test_a_delay_holds_back_both_ways(proxy: TcpProxy) -> None:
    clock = SystemClock()
    async with a_line(proxy) as line:
        proxy.delay(50 * bounds.MILLISECOND)
        start = clock.elapsed()
        assert await line.asks(b"hello") == b"hello"
        assert clock.elapsed() - start >= 100 * bounds.MILLISECOND
    assert proxy.faults["delayed"] >= 2


async def test_a_narrow_connection_takes_its_time_both_ways(proxy: TcpProxy) -> None:
    clock = SystemClock()
    async with a_line(proxy) as line:
        proxy.narrow(1_000)
        start = clock.elapsed()
        line.writer.write(b"x" * 200)
        async with asyncio.timeout(PATIENCE):
            assert await line.reader.readexactly(200) == b"x" * 200
        assert clock.elapsed() - start >= 200 * bounds.MILLISECOND
    assert proxy.faults["narrowed"] >= 8


async def test_a_cut_is_silent_until_it_is_healed(proxy: TcpProxy) -> None:
    async with a_line(proxy) as line, a_line(proxy) as other:
        assert await line.asks(b"hello") == b"hello"
        proxy.cut()
        with pytest.raises(TimeoutError):
            await line.asks(b"lost", SILENCE)
        assert proxy.faults["cut"] == 1
        other.writer.write_eof()
        with pytest.raises(TimeoutError):
            await other.hears(SILENCE)
        proxy.heal()
        with pytest.raises(ConnectionResetError):
            await line.asks(b"more")
    async with a_line(proxy) as line:
        assert await line.asks(b"hello") == b"hello"


async def test_a_cut_of_one_direction_leaves_the_other(proxy: TcpProxy) -> None:
    async with a_line(proxy) as line:
        assert await line.asks(b"hello") == b"hello"
        proxy.cut(Direction.TO_CLIENT)
        with pytest.raises(TimeoutError):
            await line.asks(b"answered, and not heard", SILENCE)
        assert proxy.faults["cut"] == 1
        assert proxy.requests == 2


async def test_a_swallowed_stream_is_silent_beside_others_that_are_served() -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    async with an_echo(preface) as port, TcpProxy(HOST, port, Http2) as proxy, a_line(proxy) as line:
        begin = _frame(1, 1, b"headers") + _frame(1, 0, b"spoken")
        assert await line.asks(preface + begin) == begin
        proxy.swallow()
        both = _frame(1, 0, b"lost") + _frame(3, 1, b"headers") + _frame(3, 0, b"kept") + _frame(1, 3, b"also")
        # In pieces, as they may come.
        line.writer.write(both[:5])
        await line.writer.drain()
        assert await line.asks(both[5:]) == _frame(3, 1, b"headers") + _frame(3, 0, b"kept")
    assert proxy.faults["swallowed"] == 2


def _frame(stream: int, kind: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes((kind, 0)) + stream.to_bytes(4, "big") + content


async def test_what_is_not_read_arrives_later(proxy: TcpProxy) -> None:
    async with a_line(proxy) as line:
        assert await line.asks(b"first") == b"first"
        proxy.stop_reading()
        with pytest.raises(TimeoutError):
            await line.asks(b"second", SILENCE)
        assert proxy.faults["not read"]
        proxy.heal()
        async with asyncio.timeout(PATIENCE):
            assert await line.reader.read(100) == b"second"


async def test_a_reset_ends_what_there_is_and_a_refusal_what_comes(proxy: TcpProxy) -> None:
    async with a_line(proxy) as line:
        await line.asks(b"hello")
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            await line.asks(b"hello")
    async with a_line(proxy) as line:
        assert await line.asks(b"hello") == b"hello"
        proxy.refuse()
    with pytest.raises(ConnectionResetError):
        async with a_line(proxy) as line:
            await line.asks(b"hello")
    assert proxy.faults["reset"] == 2
    assert proxy.faults["refused"] == 1


async def test_a_forgotten_connection_is_silent_for_ever_and_a_new_one_is_served(proxy: TcpProxy) -> None:
    async with a_line(proxy) as line:
        assert await line.asks(b"hello") == b"hello"
        proxy.forget()
        proxy.heal()
        async with a_line(proxy) as other:
            assert await other.asks(b"hello") == b"hello"
        with pytest.raises(TimeoutError):
            await line.asks(b"lost", SILENCE)
    assert proxy.faults["forgotten"] == 1


async def test_a_connection_that_is_ended_is_ended_in_good_order(proxy: TcpProxy) -> None:
    async with a_line(proxy) as line:
        assert await line.asks(b"hello") == b"hello"
        proxy.end()
        assert await line.hears() == b""
    await until(lambda: not proxy.open_connections)
    async with a_line(proxy) as line:
        assert await line.asks(b"hello") == b"hello"
    assert proxy.faults["ended"] == 1


async def test_a_goodbye_comes_between_frames() -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    async with an_echo(preface) as port, TcpProxy(HOST, port, Http2) as proxy, a_line(proxy) as line:
        frame = _frame(1, 0, b"in two pieces")
        assert await line.asks(preface + frame[:12]) == frame[:12]
        async with asyncio.TaskGroup() as group:
            group.create_task(proxy.say_goodbye())
            with pytest.raises(TimeoutError):
                await line.hears(SILENCE)
            assert await line.asks(frame[12:]) == frame[12:]
        assert await line.hears() == _frame(0, 7, b"\x7f\xff\xff\xff" + bytes(4))
        assert await line.asks(frame) == frame
    assert proxy.faults["goodbye"] == 1


async def test_the_answer_that_is_lost_is_the_one_that_was_named(proxy: TcpProxy) -> None:
    async with a_line(proxy) as line:
        proxy.lose_answer(2)
        assert await line.asks(b"first") == b"first"
        with pytest.raises(ConnectionResetError):
            await line.asks(b"second")
    assert proxy.faults["answer lost"] == 1
    assert proxy.requests == 2


async def test_a_statement_whose_answer_is_lost_was_done(postgres_dsn: str) -> None:
    target = urlsplit(postgres_dsn)
    assert target.hostname is not None
    assert target.port is not None
    async with TcpProxy(target.hostname, target.port, Postgres) as proxy:
        through = await asyncpg.connect(postgres_dsn, host=HOST, port=proxy.port)
        await through.execute("CREATE TABLE counted (n int)")
        assert await through.fetchval("SELECT $1::int", 7) == 7
        proxy.lose_answer()
        with pytest.raises((asyncpg.PostgresConnectionError, OSError)):
            await through.execute("INSERT INTO counted VALUES (1)")
        assert proxy.faults["answer lost"] == 1
    direct = await asyncpg.connect(postgres_dsn)
    assert await direct.fetchval("SELECT count(*) FROM counted") == 1
    await direct.close()
