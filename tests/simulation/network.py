"""The simulated network: calls that reach the real services behind an address; `channels` are the clients' ends.

A call carries serialised messages both ways. Whatever ends it is told to both sides as gRPC would tell them: a handler
whose client has gone is cancelled, a client whose server has gone gets UNAVAILABLE. A connection that is lost *without
notice* tells nobody.
"""

import asyncio
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import grpc
from grpc import aio
from simulation.loop import Process, SimulationLoop
from simulation.wire import Mailbox, Pipe, Weather, host_at

from duecourse.model import bounds
from duecourse.model.instants import Micros

CONNECT_TIMEOUT: Final = 20 * bounds.SECOND
RETRY: Final = 200 * bounds.MILLISECOND
_PINGED_WITHIN: Final = 15 * bounds.SECOND
_NO_CONNECTION: Final = "failed to connect to all addresses"


class Metadatum(NamedTuple):
    """What comes with a call beside its messages."""

    key: str
    value: str


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


class Wire(Protocol):
    """A connection on which nothing is said."""

    ends: tuple[Process, Process]

    def cut(self, *, has_notice: bool) -> None:
        """Lose it."""
        ...


class Network:
    """See the module's docstring."""

    def __init__(self, loop: SimulationLoop, seed: int, watcher: Watcher) -> None:
        self.loop = loop
        self.weather = Weather(loop, seed)
        self.watcher = watcher
        self.resets: set[Process] = set()
        """Processes whose peers have been told that they are no more."""
        self.wires: dict[Wire, None] = {}
        """The connections on which nothing is said."""
        self._off: set[str] = set()
        self._random = random.Random(f"{seed} network")
        self._listeners: dict[str, _Listener] = {}
        self._calls: dict[Call, None] = {}

    def listen(self, address: str, process: Process, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Serve at an address."""
        self._listeners[address] = _Listener(process, handlers)
        self._off.discard(host_at(address))

    def listener(self, address: str) -> _Listener | None:
        """Find who serves at an address."""
        return self._listeners.get(address)

    def is_off(self, host: str) -> bool:
        """Tell whether a machine does not even refuse."""
        return host in self._off

    def gone(self, process: Process, *, has_notice: bool) -> None:
        """Note that a process is no more: its connections are reset, or nobody hears of it."""
        for address, listener in list(self._listeners.items()):
            if listener.process is process:
                del self._listeners[address]
        if has_notice:
            self.resets.add(process)
        else:
            self._off.add(process.host)
        for wire in [wire for wire in self.wires if process in wire.ends]:
            wire.cut(has_notice=has_notice)
        for call in [call for call in self._calls if process in (call.client, call.server)]:
            call.cut(has_notice=has_notice)

    def cut(self, one: str, other: str, *, has_notice: bool) -> int:
        """Cut all connections between two hosts; returns how many calls were on them."""
        calls = [call for call in self._calls if call.hosts in ((one, other), (other, one))]
        wires = [wire for wire in self.wires if {end.host for end in wire.ends} == {one, other}]
        for call in calls:
            call.cut(has_notice=has_notice)
        for wire in wires:
            wire.cut(has_notice=has_notice)
        return len(calls)

    def lose_one_way(self, client: str, server: str, *, is_up: bool) -> int:
        """Lose what is said on all calls between two hosts in one direction only, without notice."""
        calls = [call for call in self._calls if call.hosts == (client, server)]
        for call in calls:
            call.lose(is_up=is_up)
        return len(calls)

    def lose_methods(self, client: str, methods: Collection[str]) -> int:
        """Lose both directions of a host's calls of some methods, without notice."""
        calls = [call for call in self._calls if call.hosts[0] == client and call.method in methods]
        for call in calls:
            call.cut(has_notice=False)
        return len(calls)

    def open(self, call: "Call") -> None:
        """Keep a call in mind until it has ended."""
        self._calls[call] = None

    def forget(self, call: "Call") -> None:
        """Drop a call that has ended."""
        self._calls.pop(call, None)


class Call:
    """A call, both ends of it. All but the ends' own methods run in the world."""

    def __init__(
        self,
        network: Network,
        client: Process,
        address: str,
        method: str,
        timeout: float | None,
        metadata: Iterable[tuple[str, str]] | None = None,
    ) -> None:
        self.client = client
        self.server: Process | None = None
        self.hosts = (client.host, host_at(address))
        self.method = method
        self.metadata = tuple(Metadatum(*pair) for pair in metadata or ())
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
        self._noticed_by: Micros = 0
        """By then a server hears of an end whatever is in the way, as its pings are not answered."""
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
        self._noticed_by = self._loop.now + _PINGED_WITHIN
        if self._deadline is not None:
            self._deadline.cancel()
        self.inbox.close(partial(_raise, status))
        if self._down is not None:
            self._down.lose()
            self._down = None
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
            elif handler.response_streaming:
                self.request = await context.read()
                await handler.unary_stream(self.request, context)
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
        finally:
            self._task = None
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
            self._loop.after(delay(), self._lose_handler)

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
                self._loop.after(RETRY, self._connect)
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
        self._down = None
        if self._deadline is not None:
            self._deadline.cancel()
        self.inbox.close(partial(_raise, item))
        self._network.forget(self)

    def _lose_handler(self) -> None:
        if self._task is not None and self._up is not None:
            self._task.cancel()
            self._up.lose()

    def _cancel_handler(self) -> None:
        """Have the handler hear of the client's end; later, if nothing gets through to it."""
        if self._task is None:
            return
        is_blocked = self._network.weather.is_blocked(*self.hosts)
        if is_blocked and self._up is not None and not self._up.is_lost and self._loop.now < self._noticed_by:
            self._loop.after(RETRY, self._cancel_handler)
        else:
            self._lose_handler()


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

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call with a status."""
        self.status = Status(code, details)
        raise aio.AbortError

    async def abort_with_status(self, status: Any) -> None:
        """End the call with a status."""
        self.status = Status(status.code, status.details, tuple(status.trailing_metadata or ()))
        raise aio.AbortError

    def time_remaining(self) -> float | None:
        """Tell how much is left of the client's deadline."""
        return self._call.time_remaining()

    def invocation_metadata(self) -> Sequence[Metadatum]:
        """Return what came with the call."""
        return self._call.metadata
