"""The clients' ends of the simulated network: channels, their methods, and streams, as `grpc.aio` has them."""

import asyncio
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, Final, Self

import grpc
from grpc import ChannelConnectivity, aio
from simulation.loop import Process, wake
from simulation.network import RETRY, Call, Network, Status
from simulation.wire import host_at

from duecourse.model import bounds

_CONNECT_LIMIT: Final = bounds.SECOND
"""How long one try to connect takes before it has failed."""
_CANCELLED: Final = Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")

Metadata = Iterable[tuple[str, str]]


class Channel:
    """As much of `grpc.aio.Channel` as stubs, pumps and the etcd client use.

    Its calls find their way by themselves. Its state is that of a connection which whoever asks has it make: that one
    stays up through a partition, as long as nobody has told of its end.
    """

    def __init__(self, network: Network, client: Process, address: str) -> None:
        self._network = network
        self._client = client
        self._address = address
        self._peer: Process | None = None
        self._state = ChannelConnectivity.IDLE
        self._has_changed: list[asyncio.Future[None]] = []

    def unary_unary(self, method: str, encode: Any = None, decode: Any = None, **given: Any) -> Callable[..., Any]:
        """Make a method of a stub."""
        return partial(
            self._ask, method, given.get("request_serializer", encode), given.get("response_deserializer", decode)
        )

    def unary_stream(self, method: str, encode: Any = None, decode: Any = None, **given: Any) -> Callable[..., Any]:
        """Make a method of a stub."""
        opened = self.stream_stream(method, encode, decode, **given)

        def ask(request: Any, *, timeout: float | None = None, metadata: Metadata | None = None) -> Stream:
            stream: Stream = opened(timeout=timeout, metadata=metadata)
            stream.send(request)
            return stream

        return ask

    def stream_stream(self, method: str, encode: Any = None, decode: Any = None, **given: Any) -> Callable[..., Any]:
        """Make a method of a stub."""
        encode = given.get("request_serializer", encode)
        decode = given.get("response_deserializer", decode)

        def opened(*, timeout: float | None = None, metadata: Metadata | None = None) -> Stream:
            call = Call(self._network, self._client, self._address, method, timeout, metadata)
            return Stream(self._network, call, encode, decode)

        return opened

    def _ask(
        self,
        method: str,
        encode: Any,
        decode: Any,
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> "Answer":
        self._network.watcher.client_says(self._client, method, request)
        call = Call(self._network, self._client, self._address, method, timeout, metadata)
        call.send(encode(request))
        return Answer(call, decode)

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity:
        """Tell the state of the connection if there is to be one, else whether somebody can be reached."""
        if self._state is ChannelConnectivity.READY and self._peer in self._network.resets:
            self._become(ChannelConnectivity.IDLE)
        if try_to_connect and self._state is ChannelConnectivity.IDLE:
            self._become(ChannelConnectivity.CONNECTING)
            loop = self._network.loop
            loop.after(self._network.weather.delay(), self._connect, loop.now + _CONNECT_LIMIT)
        if self._state is ChannelConnectivity.IDLE:
            return self._reachable()
        return self._state

    async def wait_for_state_change(self, last_observed: ChannelConnectivity) -> None:
        """Wait until the state is another one."""
        while self._state is last_observed:
            changed: asyncio.Future[None] = self._network.loop.create_future()
            self._has_changed.append(changed)
            await changed

    async def channel_ready(self) -> None:
        """Wait until somebody can be reached."""
        while self._reachable() is not ChannelConnectivity.READY:
            tried: asyncio.Future[None] = self._network.loop.create_future()
            self._network.loop.after(RETRY, wake, tried)
            await tried

    async def close(self, grace: float | None = None) -> None:
        """Do nothing: calls end by themselves here."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _reachable(self) -> ChannelConnectivity:
        is_there = self._network.listener(self._address) is not None and not self._is_blocked()
        return ChannelConnectivity.READY if is_there else ChannelConnectivity.TRANSIENT_FAILURE

    def _is_blocked(self) -> bool:
        here, there = self._client.host, host_at(self._address)
        weather = self._network.weather
        return weather.is_blocked(here, there) or weather.is_blocked(there, here)

    def _connect(self, until: int) -> None:
        loop = self._network.loop
        listener = self._network.listener(self._address)
        # Who is frozen still has a machine that takes connections.
        if not self._is_blocked() and listener is not None:
            self._peer = listener.process
            self._become(ChannelConnectivity.READY)
        elif not self._is_blocked() or loop.now > until:
            self._become(ChannelConnectivity.TRANSIENT_FAILURE)
            loop.after(RETRY, self._become, ChannelConnectivity.IDLE)
        else:
            loop.after(RETRY, self._connect, until)

    def _become(self, state: ChannelConnectivity) -> None:
        self._state = state
        waiting, self._has_changed = self._has_changed, []
        for changed in waiting:
            wake(changed)


class Answer:
    """A client's end of a call that is answered once, as much of `UnaryUnaryCall` as ours use."""

    def __init__(self, call: Call, decode: Any) -> None:
        self._call = call
        self._decode = decode

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    def cancel(self) -> bool:
        """Give the call up."""
        self._call.inbox.interrupt()
        self._call.end(_CANCELLED)
        return True

    async def _wait(self) -> Any:
        try:
            answer = await self._call.inbox.get()
        except asyncio.CancelledError:
            self._call.end(_CANCELLED)
            raise
        assert answer is not aio.EOF, "an OK without an answer"
        self._call.took()
        return self._decode(answer)


class Stream:
    """A client's end of a stream, as much of `StreamStreamCall` and `UnaryStreamCall` as ours use."""

    def __init__(self, network: Network, call: Call, encode: Any, decode: Any) -> None:
        self._network = network
        self._call = call
        self._encode = encode
        self._decode = decode

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is aio.EOF:
            raise StopAsyncIteration
        return message

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
        self.send(message)
        await self._call.room()

    def send(self, message: Any) -> None:
        """Send a message without waiting for room."""
        self._call.send(self._encode(message))
        # A fault that strikes in this moment finds it on its way.
        self._network.watcher.client_says(self._call.client, self._call.method, message)

    def cancel(self) -> bool:
        """End the stream."""
        self._call.inbox.interrupt()
        self._call.end(_CANCELLED)
        return True


def opener(network: Network) -> Callable[..., Channel]:
    """Return what stands in for `grpc.aio.insecure_channel`."""

    def insecure_channel(address: str, options: Any = None) -> Channel:
        return Channel(network, network.loop.current, address)

    return insecure_channel
