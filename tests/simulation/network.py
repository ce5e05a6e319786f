"""The simulated network: channels for clients and workers, and calls that reach the real services behind an address.

A call carries serialised messages both ways. Whatever ends it is told to both sides as gRPC would tell them: a handler
whose client has gone is cancelled, a client whose server has gone gets UNAVAILABLE. A connection that is lost *without
notice* tells nobody.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, Self

import grpc
from grpc import aio
from simulation.loop import Process, SimulationLoop
from simulation.wire import Mailbox, Pipe, Weather, host_of

from duecourse.model import bounds
from duecourse.model.instants import Micros

CONNECT_TIMEOUT: Final = 20 * bounds.SECOND
_RETRY: Final = 200 * bounds.MILLISECOND
_NO_CONNECTION: Final = "failed to connect to all addresses"


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    trailers: tuple[tuple[str, str | bytes], ...] = ()

    def error(self) -> aio.AioRpcError:
        """Make what a client gets raised."""
        return aio.AioRpcError(self.code, aio.Metadata(), aio.Metadata(*self.trailers), self.details)


class Watcher(Protocol):
    """Who sees all that is said at the moment it is said."""

    def client_says(self, client: Process, method: str, message: Any) -> None:
        """See a message of a client or a worker."""
        ...

    def server_says(self, server: Process, client: Process, method: str, request: Any, message: Any) -> None:
        """See a message of a node; `request` is what it answers, None on a stream."""
        ...

    def server_refuses(self, server: Process, method: str, request: Any, status: Status, since: Micros) -> None:
        """See a call, begun at a time, end with a status that is not OK."""
        ...


@dataclass(frozen=True, slots=True)
class _Listener:
    process: Process
    handlers: Sequence[grpc.GenericRpcHandler]

    def find(self, method: str) -> Any:
        details = _CallDetails(method)
        found = (handler.service(details) for handler in self.handlers)
        return next(handler for handler in found if handler is not None)


@dataclass(frozen=True, slots=True)
class _CallDetails(grpc.HandlerCallDetails):
    method: str
    invocation_metadata: tuple[()] = ()


class Network:
    """See the module's docstring."""

    def __init__(self, loop: SimulationLoop, seed: int, watcher: Watcher) -> None:
        self.loop = loop
        self.weather = Weather(loop, seed)
        self.watcher = watcher
        self._random = random.Random(f"{seed} network")
        self._listeners: dict[str, _Listener] = {}
        self._calls: dict[Call, None] = {}

    def channel(self, address: str, options: Any = None) -> "Channel":
        """Stand in for `grpc.aio.insecure_channel`."""
        return Channel(self, self.loop.current, address)

    def listen(self, address: str, process: Process, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Serve at an address."""
        self._listeners[address] = _Listener(process, handlers)

    def listener(self, address: str) -> _Listener | None:
        """Find who serves at an address."""
        return self._listeners.get(address)

    def gone(self, process: Process, *, has_notice: bool) -> None:
        """Note that a process is no more: its connections are reset, or nobody hears of it."""
        for address, listener in list(self._listeners.items()):
            if listener.process is process:
                del self._listeners[address]
        for call in [call for call in self._calls if process in (call.client, call.server)]:
            call.cut(has_notice=has_notice)

    def cut(self, one: str, other: str, *, has_notice: bool) -> int:
        """Cut all connections between two hosts; returns how many calls were on them."""
        calls = [call for call in self._calls if call.hosts in ((one, other), (other, one))]
        for call in calls:
            call.cut(has_notice=has_notice)
        return len(calls)

    def lose_one_way(self, client: str, server: str, *, is_up: bool) -> int:
        """Lose what is said on all calls between two hosts in one direction only, without notice."""
        calls = [call for call in self._calls if call.hosts == (client, server)]
        for call in calls:
            call.lose(is_up=is_up)
        return len(calls)

    def open(self, call: "Call") -> None:
        """Keep a call in mind until it has ended."""
        self._calls[call] = None

    def forget(self, call: "Call") -> None:
        """Drop a call that has ended."""
        self._calls.pop(call, None)


class Call:
    """A call, both ends of it. All but the ends' own methods run in the world."""

    def __init__(self, network: Network, client: Process, address: str, method: str, timeout: float | None) -> None:
        self.client = client
        self.server: Process | None = None
        self.hosts = (host_of(client), address)
        self.method = method
        self.status: Status | None = None
        self.inbox = Mailbox(network.loop)
        self.has_half_closed = False
        self.request: Any = None
        self._network = network
        self._loop = loop = network.loop
        self._address = address
        self._unsent: list[bytes] = []
        self._up: Pipe | None = None
        self._down: Pipe | None = None
        self._task: asyncio.Task[Any] | None = None
        self._until = None if timeout is None else loop.now + int(timeout * bounds.SECOND)
        self._began_at = loop.now
        network.open(self)
        self._deadline = None
        if self._until is not None:
            late = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._deadline = loop.after(self._until - loop.now, self.end, late)
        loop.after(network.weather.delay(), self._connect)

    def time_remaining(self) -> float | None:
        """Tell how much is left of the client's deadline."""
        return None if self._until is None else max(0, self._until - self._loop.now) / bounds.SECOND

    # The client's end.

    def send(self, message: bytes) -> None:
        """Send a message."""
        if self.client.is_dead:
            return
        if self._up is None:
            self._unsent.append(message)
        else:
            self._up.send(message)

    async def room(self) -> None:
        """Wait until another message may be sent."""
        if self._up is not None:
            await self._up.room()

    def took(self) -> None:
        """Note that the client has read a message."""
        if self._down is not None:
            self._down.read()

    def end(self, status: Status) -> None:
        """End the call for its client; its handler hears of it later."""
        if self.status is not None:
            return
        self.status = status
        if self._deadline is not None:
            self._deadline.cancel()
        self.inbox.close(partial(_raise, status))
        if self._up is not None and not self._up.is_lost and not self.client.is_dead:
            self._loop.after(self._network.weather.delay(), self._cancel_handler)
        self._network.forget(self)

    # The server's end.

    async def serve(self, handler: Any, inbox: Mailbox, down: Pipe) -> None:
        """Run the handler."""
        context = Context(self, handler, inbox, down)
        status = Status(grpc.StatusCode.OK)
        try:
            if handler.request_streaming:
                await handler.stream_stream(None, context)
            else:
                self.request = await context.read()
                response = await handler.unary_unary(self.request, context)
                await context.write(response)
        except aio.AbortError:
            assert context.status is not None
            status = context.status
            watcher = self._network.watcher
            watcher.server_refuses(self._loop.current, self.method, self.request, status, self._began_at)
        except Exception as error:
            self._loop.failures.append(f"{self._loop.current}: {self.method} raised {error!r}")
            status = Status(grpc.StatusCode.UNKNOWN, repr(error))
        down.send(status)

    # What happens to it.

    def cut(self, *, has_notice: bool) -> None:
        """Lose the connection."""
        for pipe in (self._up, self._down):
            if pipe is not None and (not has_notice or self._network._random.random() < 0.5):
                pipe.lose()
        if has_notice:
            reset = Status(grpc.StatusCode.UNAVAILABLE, "connection reset by peer")
            delay = self._network.weather.delay
            self._loop.after(delay(), self.end, reset)
            self._loop.after(delay(), self._cancel_handler)

    def lose(self, *, is_up: bool) -> None:
        """Lose one direction without notice."""
        pipe = self._up if is_up else self._down
        if pipe is not None:
            pipe.lose()

    def _connect(self) -> None:
        if self.status is not None or self.client.is_dead:
            return
        if self._network.weather.is_blocked(*self.hosts) or self._network.weather.is_blocked(*reversed(self.hosts)):
            if self._loop.now > self._began_at + CONNECT_TIMEOUT:
                self.end(Status(grpc.StatusCode.UNAVAILABLE, f"{_NO_CONNECTION}; timed out"))
            else:
                self._loop.after(_RETRY, self._connect)
            return
        listener = self._network.listener(self._address)
        if listener is None:
            refused = Status(grpc.StatusCode.UNAVAILABLE, f"{_NO_CONNECTION}; connection refused")
            self._loop.after(self._network.weather.delay(), self.end, refused)
            return
        self.server = server = listener.process
        inbox = Mailbox(self._loop)
        weather = self._network.weather
        self._up = Pipe(self._loop, weather, self.client, server, inbox.put)
        self._down = Pipe(self._loop, weather, server, self.client, self._arrived)
        self._task = server.spawn(self.serve(listener.find(self.method), inbox, self._down), f"call {self.method}")
        for message in self._unsent:
            self._up.send(message)
        self._unsent.clear()

    def _arrived(self, item: Any) -> None:
        if self.status is not None:
            return
        if not isinstance(item, Status):
            self.inbox.put(item)
            return
        self.status = item
        if self._deadline is not None:
            self._deadline.cancel()
        self.inbox.close(partial(_raise, item))
        self._network.forget(self)

    def _cancel_handler(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _raise(status: Status) -> Any:
    if status.code is grpc.StatusCode.OK:
        return aio.EOF
    raise status.error()


class Context:
    """A handler's end of a call, as much of `ServicerContext` as our services use."""

    def __init__(self, call: Call, handler: Any, inbox: Mailbox, down: Pipe) -> None:
        self.status: Status | None = None
        self._call = call
        self._handler = handler
        self._inbox = inbox
        self._down = down

    async def read(self) -> Any:
        """Read a message."""
        item = await self._inbox.get()
        assert self._call._up is not None
        self._call._up.read()
        return self._handler.request_deserializer(item)

    async def write(self, message: Any) -> None:
        """Send a message."""
        call = self._call
        process = call._loop.current
        if not process.is_dead:
            call._network.watcher.server_says(process, call.client, call.method, call.request, message)
        self._down.send(self._handler.response_serializer(message))
        await self._down.room()

    async def abort_with_status(self, status: Any) -> None:
        """End the call with a status."""
        self.status = Status(status.code, status.details, tuple(status.trailing_metadata or ()))
        raise aio.AbortError

    def time_remaining(self) -> float | None:
        """Tell how much is left of the client's deadline."""
        return self._call.time_remaining()


class Channel:
    """As much of `grpc.aio.Channel` as stubs and pumps use."""

    def __init__(self, network: Network, client: Process, address: str) -> None:
        self._network = network
        self._client = client
        self._address = address

    def unary_unary(self, method: str, encode: Any = None, decode: Any = None, **given: Any) -> Callable[..., Any]:
        """Make a method of a stub."""
        return partial(
            self._ask, method, given.get("request_serializer", encode), given.get("response_deserializer", decode)
        )

    def stream_stream(self, method: str, encode: Any = None, decode: Any = None, **given: Any) -> Callable[..., Any]:
        """Make a method of a stub."""
        encode = given.get("request_serializer", encode)
        decode = given.get("response_deserializer", decode)
        return lambda: Stream(
            self._network, Call(self._network, self._client, self._address, method, None), encode, decode
        )

    async def _ask(self, method: str, encode: Any, decode: Any, request: Any, *, timeout: float | None = None) -> Any:
        self._network.watcher.client_says(self._client, method, request)
        call = Call(self._network, self._client, self._address, method, timeout)
        call.send(encode(request))
        try:
            answer = await call.inbox.get()
        except asyncio.CancelledError:
            call.end(Status(grpc.StatusCode.CANCELLED))
            raise
        assert answer is not aio.EOF, "an OK without an answer"
        call.took()
        return decode(answer)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Tell whether somebody can be reached."""
        host = host_of(self._client)
        weather = self._network.weather
        is_blocked = weather.is_blocked(host, self._address) or weather.is_blocked(self._address, host)
        is_there = self._network.listener(self._address) is not None and not is_blocked
        return grpc.ChannelConnectivity.READY if is_there else grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def channel_ready(self) -> None:
        """Wait until somebody can be reached."""
        while self.get_state() is not grpc.ChannelConnectivity.READY:
            tried: asyncio.Future[None] = self._network.loop.create_future()
            self._network.loop.after(_RETRY, _settle, tried)
            await tried

    async def close(self, grace: float | None = None) -> None:
        """Do nothing: calls end by themselves here."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Stream:
    """A client's end of a stream, as much of `StreamStreamCall` as a worker's pump uses."""

    def __init__(self, network: Network, call: Call, encode: Any, decode: Any) -> None:
        self._network = network
        self._call = call
        self._encode = encode
        self._decode = decode

    async def read(self) -> Any:
        """Read a message."""
        item = await self._call.inbox.get()
        if item is aio.EOF:
            return item
        self._call.took()
        return self._decode(item)

    async def write(self, message: Any) -> None:
        """Send a message."""
        if self._call.status is not None:
            if self._call.status.code is grpc.StatusCode.OK:
                raise asyncio.InvalidStateError("the call has ended")
            raise self._call.status.error()
        self._network.watcher.client_says(self._call.client, self._call.method, message)
        self._call.send(self._encode(message))
        await self._call.room()

    def cancel(self) -> bool:
        """End the stream."""
        self._call.inbox.interrupt()
        self._call.end(Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        return True


def _settle(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
