"""Connections to the members of an etcd cluster, one at a time.

All calls and streams share the connection to the current endpoint. Whoever finds that it does not serve `leave`s it:
the next endpoint becomes current, and the old connection is closed when its last user has let go of it, so that nobody
loses an answer that was still to come. Spreading calls over all members instead would let a frozen one eat its share.

With a single endpoint a refused connection is left to gRPC, which tries again after 100 ms to 1 s; one that fell silent
is replaced, since it may have been cut without a word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import aio

from duecourse.server.etcd.errors import EtcdUnavailable

_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, how long one try to connect may take.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A name that leads elsewhere after a restart would be looked up again after half a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # etcd answers pings that come more often than every 5 s with GOAWAY. Ours only back up the probes of the streams.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # As for peers: a ping that measures the bandwidth would be waited for for a minute.
    ("grpc.http2.ping_timeout_ms", 3_000),
    # What may be repeated is the client's decision.
    ("grpc.enable_retries", 0),
    # A new channel must mean a new connection, not one shared with the channel that was just left.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # An answer that was refused for its size would be lost after it was applied.
    ("grpc.max_receive_message_length", -1),
)

Answer = TypeVar("Answer", bound=Message)
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates, read anew for each connection, so that they can be renewed in place."""

    ca: Path | None = None
    """Whom to trust; None: whom the system trusts."""
    certificate: Path | None = None
    """What to show, with `key`; None: nothing."""
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read them. Raises EtcdUnavailable if they cannot be read, as while they are being renewed."""
        return grpc.ssl_channel_credentials(_content(self.ca), _content(self.key), _content(self.certificate))


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Whom to log in as. The password is read anew for each login, so that it can be changed in place."""

    name: str
    password_file: Path

    def password(self) -> str:
        """Read it. Raises EtcdUnavailable if it cannot be read."""
        return _read(self.password_file).decode("utf-8", "replace").rstrip("\n")


class Connection:
    """A channel to one endpoint. As an async context manager it is kept open while it is in use."""

    def __init__(self, target: str, tls: Tls | None) -> None:
        self.target = target
        self._channel = (
            aio.insecure_channel(target, options=_OPTIONS)
            if tls is None
            else aio.secure_channel(target, tls.credentials(), options=_OPTIONS)
        )
        self._users = 0
        self._is_left = False
        self._calls: dict[str, aio.UnaryUnaryMultiCallable[Message, Any]] = {}

    async def __aenter__(self) -> Self:
        self._users += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._users -= 1
        await self._close_if_done()

    @property
    def is_ready(self) -> bool:
        """Whether it is connected."""
        return self._channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    async def ready(self) -> bool:
        """Wait until it is connected. False: it cannot be, for now."""
        state = self._channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                return False
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)
        return True

    def unary(self, method: str, answer: type[Answer]) -> aio.UnaryUnaryMultiCallable[Message, Answer]:
        """Return a method of one question and one answer."""
        call = self._calls.get(method)
        if call is None:
            call = self._calls[method] = self._channel.unary_unary(
                method, request_serializer=_serialise, response_deserializer=answer.FromString
            )
        return call

    def stream(self, method: str, answer: type[Answer], metadata: Metadata) -> aio.StreamStreamCall[Message, Answer]:
        """Open a stream of questions and answers."""
        method_call = self._channel.stream_stream(
            method, request_serializer=_serialise, response_deserializer=answer.FromString
        )
        return method_call(metadata=aio.Metadata(*metadata))

    async def leave(self) -> None:
        """Close it as soon as nobody uses it."""
        self._is_left = True
        await self._close_if_done()

    async def _close_if_done(self) -> None:
        if self._is_left and self._users == 0:
            await self._channel.close()


class Endpoints:
    """The endpoints of one cluster, and the connection to the current one."""

    def __init__(self, targets: Sequence[str], tls: Tls | None = None) -> None:
        if not targets:
            raise ValueError("at least one etcd endpoint is needed")
        self._targets = tuple(targets)
        self._tls = tls
        self._at = 0
        self._current: Connection | None = None

    def __len__(self) -> int:
        return len(self._targets)

    def connection(self) -> Connection:
        """Return the connection that is current. Raises EtcdUnavailable if a new one cannot be made."""
        if self._current is None:
            self._current = Connection(self._targets[self._at], self._tls)
        return self._current

    async def leave(self, connection: Connection, *, silent: bool) -> None:
        """Go on to the next endpoint, unless somebody has already left that connection."""
        if connection is not self._current or (len(self._targets) == 1 and not silent):
            return
        self._at = (self._at + 1) % len(self._targets)
        self._current = None
        await connection.leave()

    async def close(self) -> None:
        """Close the connection. Nobody may use it any more."""
        connection, self._current = self._current, None
        if connection is not None:
            await connection.leave()


def _content(path: Path | None) -> bytes | None:
    return None if path is None else _read(path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EtcdUnavailable(f"{path} cannot be read: {error.strerror}") from error


def _serialise(message: Message) -> bytes:
    return message.SerializeToString()
