"""The admin port: `/metrics`, `/healthz` and `/readyz` over HTTP/1.1, for probes and scrapers only.

Ours rather than a framework's: three fixed answers need no router, and the node gains no dependency. It reads one
request head of bounded size within a bounded time, answers, and closes; what else the peer sends is thrown away. It
lives on the loop that does the node's work, so that a loop that is stuck answers nothing, which is what a liveness
probe has to see.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, cast

from prometheus_client import CONTENT_TYPE_LATEST

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.telemetry.metrics import Metrics

MAX_HEAD_BYTES: Final = 8 * 1024
CONNECTION_TIME: Final[Micros] = 5 * bounds.SECOND
MAX_CONNECTIONS: Final = 32

_TEXT: Final = "text/plain; charset=utf-8"
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class AdminServer:
    """Answers on the admin port while it is open."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        is_live: Callable[[], bool],
        why_not_ready: Callable[[], str | None],
        notes: Callable[[], Sequence[str]] = tuple,
        connection_time: Micros = CONNECTION_TIME,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """Prepare to answer.

        `is_live` tells whether the node's loop turned lately; `why_not_ready` gives a reason, None once ready; `notes`
        tell what is amiss though the node is ready.
        """
        self._metrics = metrics
        self._is_live = is_live
        self._why_not_ready = why_not_ready
        self._notes = notes
        self._crowd = _Crowd(connection_time, max_connections)

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[int]:
        """Listen for as long as the scope lasts; yields the port, which matters if 0 was asked for."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self.answer, self._crowd), host, port)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for transport in tuple(self._crowd.open):
                transport.abort()
            await server.wait_closed()

    def answer(self, head: bytes) -> bytes:
        """Answer a request by its head, the blank line excluded."""
        match head.split(b"\r\n", 1)[0].split(b" "):
            case [b"GET" | b"HEAD" as method, target, b"HTTP/1.1" | b"HTTP/1.0"]:
                code, content_type, body = self._look_up(target.partition(b"?")[0])
                return _written(code, body, content_type, is_head=method == b"HEAD")
            case [_, _, b"HTTP/1.1" | b"HTTP/1.0"]:
                return _written(405, b"only GET and HEAD\n")
            case _:
                return _written(400, b"not an HTTP/1.1 request\n")

    def _look_up(self, path: bytes) -> tuple[int, str, bytes]:
        match path:
            case b"/metrics":
                return 200, CONTENT_TYPE_LATEST, self._metrics.render()
            case b"/healthz":
                return (200, _TEXT, b"live\n") if self._is_live() else (503, _TEXT, b"the node's loop is stuck\n")
            case b"/readyz":
                reason = self._why_not_ready()
                lines = ["ready" if reason is None else f"not ready: {reason}", *self._notes()]
                return (200 if reason is None else 503), _TEXT, "".join(f"{line}\n" for line in lines).encode()
            case _:
                return 404, _TEXT, b"see /metrics, /healthz and /readyz\n"


class _Crowd:
    """All peers, and what each may take up."""

    def __init__(self, connection_time: Micros, max_connections: int) -> None:
        self.connection_time = connection_time
        self.max_connections = max_connections
        self.open: set[asyncio.Transport] = set()


class _Connection(asyncio.Protocol):
    """One peer. Closes when the peer does, at the latest when its time is up."""

    def __init__(self, answer: Callable[[bytes], bytes], crowd: _Crowd) -> None:
        self._answer = answer
        self._crowd = crowd
        self._head = bytearray()
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        time_left = self._crowd.connection_time / bounds.SECOND
        self._end = asyncio.get_running_loop().call_later(time_left, self._transport.abort)
        self._crowd.open.add(self._transport)
        if len(self._crowd.open) > self._crowd.max_connections:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_answered:
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end >= 0:
            self._finish(self._answer(bytes(self._head[:end])))
        elif len(self._head) >= MAX_HEAD_BYTES:
            self._finish(_written(431, b"request head too large\n"))

    def eof_received(self) -> None:
        if not self._is_answered:
            self._finish(_written(400, b"not an HTTP/1.1 request\n"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        self._crowd.open.discard(self._transport)

    def _finish(self, answer: bytes) -> None:
        # Not closed at once: a reset because of unread input would take the answer with it.
        self._is_answered = True
        self._head.clear()
        self._transport.write(answer)
        self._transport.write_eof()


def _written(code: int, body: bytes, content_type: str = _TEXT, *, is_head: bool = False) -> bytes:
    head = [
        f"HTTP/1.1 {code} {_REASONS[code]}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if code == 405:
        head.append("Allow: GET, HEAD")
    return "\r\n".join([*head, "", ""]).encode() + (b"" if is_head else body)
