"""Connections to Postgres that tell exactly what became of a call.

A call ends in one of four ways: it returns rows; `NotSent`, nothing was sent; `ServerError`, the server answered that
it did not do it; `AnswerLost`, it was sent and no answer came, because the connection broke, the server ended it, or
the time was up. After the last a connection is thrown away, never used again; and when the time was up, so are all that
are idle, since what lies between us and the server may have forgotten them too.

A time-out cuts the connection instead of asking the server to cancel: asking needs a second connection to a server that
may be frozen, and leaves behind who waits for it.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import asyncpg
from asyncpg.connect_utils import SessionAttribute
from asyncpg.prepared_stmt import PreparedStatement

from duecourse.model import bounds
from duecourse.model.instants import Micros

Row = asyncpg.Record

CONNECT_TIMEOUT: Final = 5 * bounds.SECOND

_TCP_OPTIONS: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class CallFailed(Exception):
    """Why a call returned no rows."""


class NotSent(CallFailed):
    """There was no connection; nothing was sent."""


class ServerError(CallFailed):
    """The server answered that it failed, and has undone whatever it did."""

    def __init__(self, sqlstate: str, detail: str) -> None:
        super().__init__(detail)
        self.sqlstate = sqlstate


class AnswerLost(CallFailed):
    """It was sent; whether it was done is not known."""


class Connections:
    """A few connections for calls of one kind; more calls at a time wait in line."""

    def __init__(
        self,
        dsn: str,
        size: int,
        timeout: Micros,
        settings: Mapping[str, str],
        timed_out: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare for `size` connections, whose calls have `timeout`; `settings` are the server's, for each session.

        `timed_out` is called when the time of a call was up.
        """
        self._dsn = dsn
        self._timeout = timeout
        self._settings = dict(settings)
        self._timed_out = timed_out
        self._room = asyncio.Semaphore(size)
        self._idle: list[_Connection] = []
        self._generation = 0
        self._is_closed = False

    async def call(self, statement: str, *arguments: Any) -> Sequence[Row]:
        """Run a statement in one round trip and return its rows."""
        async with self._room:
            connection = await self._take()
            try:
                rows = await connection.run(statement, arguments, self._timeout)
            except ServerError:
                self._give_back(connection)
                raise
            except BaseException:
                connection.cut()
                if connection.has_timed_out:
                    self._timed_out()
                raise
            self._give_back(connection)
            return rows

    def drop_idle(self) -> None:
        """Throw the connections away that nobody uses."""
        for connection in self._idle:
            connection.cut()
        self._idle.clear()

    def drop(self) -> None:
        """Throw all connections away; those that are in use, after their call."""
        self._generation += 1
        self.drop_idle()

    async def close(self) -> None:
        """End all connections, those that are in use after their call."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().close()

    async def _take(self) -> "_Connection":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        if self._is_closed:
            raise NotSent("the store is closed")
        generation = self._generation
        return _Connection(await connect(self._dsn, self._settings), generation)

    def _give_back(self, connection: "_Connection") -> None:
        if connection.is_open and connection.generation == self._generation and not self._is_closed:
            self._idle.append(connection)
        else:
            connection.cut()


class _Connection:
    """A connection, its statements, and the generation of connections that it belongs to."""

    __slots__ = ("_inner", "_prepared", "generation", "has_timed_out")

    def __init__(self, inner: "asyncpg.Connection[Row]", generation: int) -> None:
        self.generation = generation
        self.has_timed_out = False
        self._inner = inner
        self._prepared: dict[str, PreparedStatement[Row]] = {}

    @property
    def is_open(self) -> bool:
        return not self._inner.is_closed()

    def cut(self) -> None:
        self._inner.terminate()

    def time_out(self) -> None:
        self.has_timed_out = True
        self.cut()

    async def close(self) -> None:
        await disconnect(self._inner)

    async def run(self, statement: str, arguments: Sequence[Any], timeout: Micros) -> Sequence[Row]:
        watch = asyncio.get_running_loop().call_later(timeout / bounds.SECOND, self.time_out)
        is_sent = False
        try:
            prepared = self._prepared.get(statement)
            if prepared is None:
                prepared = self._prepared[statement] = await self._inner.prepare(statement)
            is_sent = True
            return await prepared.fetch(*arguments)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            raise _failure(error, is_sent=is_sent) from error
        finally:
            watch.cancel()


async def connect(dsn: str, settings: Mapping[str, str]) -> "asyncpg.Connection[Row]":
    """Connect to the server of the address that can be written to. Raises NotSent."""
    try:
        connection = await asyncpg.connect(
            dsn,
            timeout=CONNECT_TIMEOUT / bounds.SECOND,
            server_settings=dict(settings),
            target_session_attrs=SessionAttribute.read_write,
        )
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
        # What the driver says of a string that it cannot read may hold a part of the password.
        is_unreadable = isinstance(error, ValueError) and not isinstance(error, OSError)
        detail = "the connection string cannot be read" if is_unreadable else _detail(error)
        raise NotSent(f"cannot connect: {detail}") from error
    _keep_alive(connection)
    return connection


async def disconnect(connection: "asyncpg.Connection[Row]") -> None:
    """Take leave of the server, or cut the connection if that does not work."""
    try:
        await connection.close(timeout=1)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
        connection.terminate()


def _failure(error: Exception, *, is_sent: bool) -> CallFailed:
    if isinstance(error, asyncpg.DataError) and error.severity is None:
        # Our side could not even encode it.
        return ServerError(error.sqlstate, _detail(error))
    if isinstance(error, asyncpg.PostgresError) and (error.severity_en or error.severity) == "ERROR":
        return ServerError(error.sqlstate, _detail(error))
    # A server that ends a session (FATAL) may do so after it has committed.
    return AnswerLost(_detail(error)) if is_sent else NotSent(_detail(error))


def _detail(error: Exception) -> str:
    sqlstate = getattr(error, "sqlstate", None)
    name = f"{type(error).__name__}{f' {sqlstate}' if sqlstate else ''}"
    # A time-out says nothing.
    return f"{name}: {said}" if (said := str(error)) else name


def _keep_alive(connection: "asyncpg.Connection[Row]") -> None:
    """Have the kernel notice a peer that is gone also while a connection is idle."""
    # The driver offers no other way to its socket.
    transport: asyncio.Transport = connection._transport  # type: ignore[attr-defined]
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
