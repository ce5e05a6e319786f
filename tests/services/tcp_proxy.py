"""A TCP proxy that does to connections what networks do: `async with TcpProxy("127.0.0.1", port) as proxy`.

It forwards what comes to `proxy.port`, until told otherwise; each fault holds for the connections that there are, and
for the new ones, until `heal`:

    delay(micros)       every piece of data is held back, in both directions
    narrow(rate)        so many bytes a second go through each connection, in each direction
    cut()               nothing goes through any more and nobody is told: connections stay open, new ones are accepted;
                        in both directions, or in the one that is named
    swallow()           what is said on the HTTP/2 streams on which the server has spoken is lost, the others of their
                        connections are served
    stop_reading()      nothing is taken from either side any more: its writes run into a full buffer
    refuse()            all connections are reset, new ones at once
    reset()             all connections of now are reset; new ones are forwarded
    forget()            all connections of now are cut as by `cut`, for ever; new ones are forwarded
    say_goodbye()       clients of all HTTP/2 connections of now are told to open new ones (GOAWAY); these are served on
    end()               all connections of now are ended in good order; new ones are forwarded
    lose_answer(n)      the n-th request from now on reaches the server, but its answer is lost: its connection is reset

What a request is depends on the protocol: `Http2` (gRPC), `Postgres`, or `Pieces`, where each piece of data that the
client sends is one. `faults` counts what was done to data and connections, so that a test can assert that its fault did
happen; `requests` counts requests.
"""

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from types import TracebackType
from typing import Final, Protocol, Self

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import SystemClock

HOST: Final = "127.0.0.1"

_PIECE: Final = 64 * 1024
_POLL: Final = 5 * bounds.MILLISECOND
# Of a narrow connection: data comes little by little, not in lumps.
_STEPS_A_SECOND: Final = 20
# Closing then sends RST, whatever is still unsent.
_LINGER_NOT: Final = struct.pack("ii", 1, 0)


class Direction(Enum):
    """Which way data goes."""

    TO_SERVER = auto()
    TO_CLIENT = auto()


class Dialect(Protocol):
    """Finds requests and their answers in the data of one connection."""

    def requests_in(self, data: bytes) -> list[int]:
        """Return a number for each request that ends or begins in a piece of the client's data."""
        ...

    def answers_in(self, data: bytes) -> list[int]:
        """Return the numbers of the requests that a piece of the server's data answers."""
        ...

    def swallow(self) -> None:
        """Lose what is said from now on about the requests that have had a part of their answer."""
        ...

    def goodbye(self) -> bytes:
        """Return what tells the client now that the server will end the connection; nothing: not at this moment."""
        ...

    def kept(self, direction: Direction, data: bytes) -> tuple[bytes, int]:
        """Return what is left of a piece of data, and how many frames in it are swallowed."""
        ...


class _Whole:
    """Has nothing in its data that could be lost by itself."""

    def swallow(self) -> None:
        raise AssertionError("only HTTP/2 has streams")

    def goodbye(self) -> bytes:
        raise AssertionError("only HTTP/2 has a word for it")

    def kept(self, direction: Direction, data: bytes) -> tuple[bytes, int]:
        return data, 0


class Pieces(_Whole):
    """Whatever the client sends at once is a request; whatever the server sends next answers it."""

    def __init__(self) -> None:
        self._number = 0

    def requests_in(self, data: bytes) -> list[int]:
        self._number += 1
        return [self._number]

    def answers_in(self, data: bytes) -> list[int]:
        return [self._number]


class Http2:
    """Requests are streams, known by their frames of headers."""

    _PREFACE: Final = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    _DATA: Final = 0
    _HEADERS: Final = 1
    # GOAWAY without an error: whatever stream was begun is still served.
    _GOODBYE: Final = b"\0\0\x08\x07\0" + bytes(4) + b"\x7f\xff\xff\xff" + bytes(4)

    def __init__(self) -> None:
        self._client = _Frames(self._PREFACE)
        self._server = _Frames(0)
        self._sieves = {Direction.TO_SERVER: _Sieve(self._PREFACE), Direction.TO_CLIENT: _Sieve(0)}
        self._spoken_on: set[int] = set()

    def requests_in(self, data: bytes) -> list[int]:
        return [stream for kind, stream in self._client.begun_in(data) if kind == self._HEADERS]

    def answers_in(self, data: bytes) -> list[int]:
        begun = self._server.begun_in(data)
        self._spoken_on.update(stream for kind, stream in begun if kind == self._DATA)
        return [stream for kind, stream in begun if kind == self._HEADERS]

    def swallow(self) -> None:
        for sieve in self._sieves.values():
            sieve.swallowed = frozenset(self._spoken_on)

    def goodbye(self) -> bytes:
        return self._GOODBYE if self._sieves[Direction.TO_CLIENT].is_between_frames else b""

    def kept(self, direction: Direction, data: bytes) -> tuple[bytes, int]:
        return self._sieves[direction].through(data)


class Postgres(_Whole):
    """Requests are what the server answers with ReadyForQuery: Sync and simple queries. TLS must not be spoken."""

    _NO_TLS: Final = b"N"

    def __init__(self) -> None:
        self._client = _Messages(starts_untyped=True)
        self._server = _Messages(starts_untyped=False)
        self._asked = 0
        # The server is ready once without having been asked: after the start.
        self._answered = -1

    def requests_in(self, data: bytes) -> list[int]:
        found = sum(kind in b"SQ" for kind in self._client.kinds_in(data))
        self._asked += found
        return list(range(self._asked - found + 1, self._asked + 1))

    def answers_in(self, data: bytes) -> list[int]:
        if data == self._NO_TLS:
            return []
        found = sum(kind == ord("Z") for kind in self._server.kinds_in(data))
        self._answered += found
        return list(range(self._answered - found + 1, self._answered + 1))


class TcpProxy:
    """See the module's docstring."""

    def __init__(self, host: str, port: int, dialect: Callable[[], Dialect] = Pieces) -> None:
        self.faults: Counter[str] = Counter()
        self.requests = 0
        self._target = (host, port)
        self._dialect = dialect
        self._clock = SystemClock()
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._delay: Micros = 0
        self._rate = 0
        self._cut: frozenset[Direction] = frozenset()
        self._is_reading_stopped = self._is_refusing = False
        self._lost: int | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, HOST, 0, limit=_PIECE)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        while self._connections:
            self.reset()
            await self._clock.sleep(_POLL)
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        """Where to connect to."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def endpoint(self) -> str:
        """Where to connect to, host:port."""
        return f"{HOST}:{self.port}"

    @property
    def open_connections(self) -> int:
        """How many connections there are."""
        return len(self._connections)

    def delay(self, duration: Micros) -> None:
        self._delay = duration

    def narrow(self, rate: int) -> None:
        self._rate = rate

    def cut(self, *directions: Direction) -> None:
        self._cut = frozenset(directions or Direction)

    def swallow(self) -> None:
        for connection in self._connections:
            connection.dialect.swallow()

    def stop_reading(self) -> None:
        self._is_reading_stopped = True

    def refuse(self) -> None:
        self._is_refusing = True
        self.reset()

    def reset(self) -> None:
        for connection in list(self._connections):
            self.faults["reset"] += 1
            connection.reset()

    def forget(self) -> None:
        for connection in self._connections:
            self.faults["forgotten"] += 1
            connection.is_forgotten = True

    async def say_goodbye(self) -> None:
        for connection in list(self._connections):
            while connection in self._connections and not (word := connection.dialect.goodbye()):
                await self._clock.sleep(_POLL)
            if connection in self._connections:
                self.faults["goodbye"] += 1
                connection.writers[0].write(word)

    def end(self) -> None:
        for connection in list(self._connections):
            self.faults["ended"] += 1
            connection.close()

    def lose_answer(self, request: int = 1) -> None:
        self._lost = self.requests + request

    def heal(self) -> None:
        """Forward again. What was cut in between stays lost: those connections are reset."""
        if self._cut:
            self.reset()
        self._delay = self._rate = 0
        self._cut = frozenset()
        self._is_reading_stopped = self._is_refusing = False
        self._lost = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer, self._dialect())
        self._connections.add(connection)
        try:
            if self._is_refusing:
                self.faults["refused"] += 1
                connection.reset()
                return
            server_reader, server_writer = await asyncio.open_connection(*self._target, limit=_PIECE)
            connection.writers.append(server_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(connection, reader, server_writer, Direction.TO_SERVER))
                group.create_task(self._pump(connection, server_reader, writer, Direction.TO_CLIENT))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(connection)
            connection.close()

    async def _pump(
        self,
        connection: "_Connection",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: Direction,
    ) -> None:
        while True:
            data = await reader.read(self._rate // _STEPS_A_SECOND or _PIECE)
            while self._is_reading_stopped and not connection.is_reset:
                self.faults["not read"] += 1
                await self._clock.sleep(_POLL)
            if connection.is_reset:
                raise ConnectionResetError
            if not data:
                break
            if self._delay:
                self.faults["delayed"] += 1
                await self._clock.sleep(self._delay)
            if self._rate:
                self.faults["narrowed"] += 1
                await self._clock.sleep(len(data) * bounds.SECOND // self._rate)
            if self._is_silent(connection, direction):
                self.faults["cut"] += 1
            elif self._passes(connection, data, direction):
                kept, lost = connection.dialect.kept(direction, data)
                if lost:
                    self.faults["swallowed"] += lost
                writer.write(kept)
                await writer.drain()
        while self._is_silent(connection, direction) and not connection.is_reset:
            # Nobody is told of an end, either.
            self.faults["cut"] += 1
            await self._clock.sleep(_POLL)
        writer.write_eof()

    def _is_silent(self, connection: "_Connection", direction: Direction) -> bool:
        return direction in self._cut or connection.is_forgotten

    def _passes(self, connection: "_Connection", data: bytes, direction: Direction) -> bool:
        return (self._from_client if direction is Direction.TO_SERVER else self._from_server)(connection, data)

    def _from_client(self, connection: "_Connection", data: bytes) -> bool:
        for number in connection.dialect.requests_in(data):
            self.requests += 1
            if self.requests == self._lost:
                connection.loses = number
        return True

    def _from_server(self, connection: "_Connection", data: bytes) -> bool:
        answers = connection.dialect.answers_in(data)
        if connection.loses is None:
            return True
        # Nothing passes any more, as the answer may come in pieces.
        if connection.loses in answers:
            self.faults["answer lost"] += 1
            connection.reset()
        return False


class _Connection:
    def __init__(self, client: asyncio.StreamWriter, dialect: Dialect) -> None:
        self.dialect = dialect
        self.writers = [client]
        self.loses: int | None = None
        self.is_reset = self.is_forgotten = False

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

    def reset(self) -> None:
        self.is_reset = True
        for writer in self.writers:
            connection = writer.get_extra_info("socket")
            if connection is not None and not writer.is_closing():
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            writer.transport.abort()


class _Frames:
    """The frames of HTTP/2 in one direction: 3 bytes of length, kind, flags, 4 bytes of stream."""

    HEAD: Final = 9

    def __init__(self, skip: int) -> None:
        self._skip = skip
        self._rest = b""

    def begun_in(self, data: bytes) -> list[tuple[int, int]]:
        found = []
        data = self._rest + data
        at = self._skip
        while len(data) - at >= self.HEAD:
            length = int.from_bytes(data[at : at + 3], "big")
            found.append((data[at + 3], int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFFFFFF))
            at += self.HEAD + length
        self._rest, self._skip = data[at:], max(0, at - len(data))
        return found


class _Sieve:
    """Lets the frames of HTTP/2 through in one direction, but for what some streams say.

    Their headers pass: what these say of others depends on them.
    """

    _LOST: Final = frozenset((0, 3))
    """Data, and a stream's sudden end."""

    def __init__(self, skip: int) -> None:
        self.swallowed: frozenset[int] = frozenset()
        self._left = skip
        self._is_lost = self._has_begun = False
        self._head = b""

    @property
    def is_between_frames(self) -> bool:
        """Whether all that went through were whole frames, at least one."""
        return self._has_begun and not self._left and not self._head

    def through(self, data: bytes) -> tuple[bytes, int]:
        """Return what is left, and how many frames are lost of which the last byte of the head came with it."""
        kept = bytearray()
        lost = at = 0
        while at < len(data):
            if self._left:
                piece = data[at : at + self._left]
                self._left -= len(piece)
                kept += b"" if self._is_lost else piece
            else:
                piece = data[at : at + _Frames.HEAD - len(self._head)]
                self._head += piece
                if len(self._head) == _Frames.HEAD:
                    head, self._head = self._head, b""
                    self._begin(head)
                    kept += b"" if self._is_lost else head
                    lost += self._is_lost
            at += len(piece)
        return bytes(kept), lost

    def _begin(self, head: bytes) -> None:
        self._left = int.from_bytes(head[:3], "big")
        stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
        self._has_begun = True
        self._is_lost = head[3] in self._LOST and stream in self.swallowed


class _Messages:
    """The messages of Postgres in one direction: a byte of kind, 4 bytes of length; the first has no kind."""

    _UNTYPED_HEAD: Final = 8
    _HEAD: Final = 5
    _ASKS_FOR_TLS: Final = (80877103).to_bytes(4, "big")

    def __init__(self, *, starts_untyped: bool) -> None:
        self._is_untyped = starts_untyped
        self._skip = 0
        self._rest = b""

    def kinds_in(self, data: bytes) -> bytes:
        found = bytearray()
        data = self._rest + data
        at = self._skip
        while len(data) - at >= (self._UNTYPED_HEAD if self._is_untyped else self._HEAD):
            typed = 0 if self._is_untyped else 1
            if typed:
                found.append(data[at])
            length = int.from_bytes(data[at + typed : at + typed + 4], "big")
            # The question whether TLS is spoken comes before the start, and is as untyped.
            self._is_untyped = self._is_untyped and data[at + 4 : at + 8] == self._ASKS_FOR_TLS
            at += typed + length
        self._rest, self._skip = data[at:], max(0, at - len(data))
        return bytes(found)
