"""Pumps messages between the protocol machine and the node at one address over gRPC, and reopens the stream.

Whatever ends a stream, it is opened again after a back-off, for as long as a stream at this address is wanted; after
silence over a new connection, since the old one may be dead without anybody having been told.

One reader, one writer. The writer takes all that waits at once, so that under load a message carries what gathered
while the one before was written. A stream whose node was silent for two intervals, or took no message for as long, is
given up by `check`, which the worker's ticker calls.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import AioRpcError, Channel, StreamStreamCall

from duecourse.client import errors
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing import backoff
from duecourse.timing.clock import Clock
from duecourse.v1 import worker_service_pb2 as pb
from duecourse.v1 import worker_service_pb2_grpc as pb_grpc
from duecourse.worker.errors import ProtocolViolated
from duecourse.worker.holdings import Action
from duecourse.worker.node_stream import NodeStream, StreamPhase
from duecourse.worker.protocol import Protocol

FIRST_RECONNECT: Final = 100 * bounds.MILLISECOND
LONGEST_RECONNECT: Final = 5 * bounds.SECOND
# After which a node whose stream is being opened is no longer waited for.
OPENING: Final = bounds.SECOND
# A node cuts its batches to the size of a request; the rest is room for one that does not.
MAX_RECEIVED_BYTES: Final = 8 * bounds.MAX_REQUEST_BYTES
_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A name that leads elsewhere after a restart would be looked up again after half a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.max_receive_message_length", MAX_RECEIVED_BYTES),
    # A new channel is a new connection.
    ("grpc.use_local_subchannel_pool", 1),
)

_ENDED: Final = "ended"

_log = logging.getLogger("duecourse.worker")

_Call = StreamStreamCall[pb.StreamAssignmentsRequest, pb.StreamAssignmentsResponse]


class Pump:
    """Keeps a stream to the node at one address, until `is_wanted` says no."""

    def __init__(
        self,
        address: str,
        protocol: Protocol,
        clock: Clock,
        perform: Callable[[list[Action]], None],
        is_wanted: Callable[[str], bool],
    ) -> None:
        self.address = address
        self.since: Micros = clock.now().latest
        """When the stream last began or ceased to serve, by this machine's wall clock."""
        self._protocol = protocol
        self._clock = clock
        self._perform = perform
        self._is_wanted = is_wanted
        self._opening_until: Micros | None = clock.elapsed() + OPENING
        self._stream: NodeStream | None = None
        self._call: _Call | None = None
        self._has_outgoing = asyncio.Event()
        self._writing_since: Micros | None = None
        self._was_serving = False
        self._fell_silent = False
        self._told = ""

    @property
    def is_connected(self) -> bool:
        """Whether the node has been heard on the stream that is open."""
        return self._stream is not None and self._was_serving

    @property
    def is_serving(self) -> bool:
        """Whether the node may grant on the stream: it is connected and does not drain."""
        return self.is_connected and self._stream is not None and self._stream.account.is_open

    @property
    def has_unsaid(self) -> bool:
        """Whether something waits for the node that it has not been sent yet."""
        return self.is_connected and (self._writing_since is not None or self._has_outgoing.is_set())

    def is_opening(self, now: Micros) -> bool:
        """Whether its first stream is being opened, so that it is about to be known which node it leads to."""
        return self._opening_until is not None and now < self._opening_until

    def wake(self) -> None:
        """Let the writer send what waits."""
        if self._stream is not None and self._stream.has_outgoing:
            self._has_outgoing.set()

    def check(self, now: Micros) -> None:
        """Give up a stream that is dead."""
        stream, call = self._stream, self._call
        if stream is None or call is None:
            return
        if stream.phase is StreamPhase.CLOSED:
            call.cancel()  # Its node is reached at another address.
            return
        patience = bounds.SILENT_INTERVALS * stream.interval
        is_stuck = self._writing_since is not None and now - self._writing_since > patience
        if is_stuck or self._protocol.is_silent(stream, now):
            _log.warning("stream silent", extra={"address": self.address, "is_stuck": is_stuck})
            self._fell_silent = True
            call.cancel()

    async def run(self) -> None:
        """Open the stream again and again, as long as it is wanted."""
        source = random.Random()
        delays = backoff.delays(FIRST_RECONNECT, LONGEST_RECONNECT, source)
        while self._is_wanted(self.address):
            self._fell_silent = False
            async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
                while self._is_wanted(self.address) and not self._fell_silent:
                    if await self._converse(channel):
                        delays = backoff.delays(FIRST_RECONNECT, LONGEST_RECONNECT, source)
                    if self._is_wanted(self.address):
                        await self._pause(channel, next(delays), source.randrange(FIRST_RECONNECT))

    async def _pause(self, channel: Channel, delay: Micros, spread: Micros) -> None:
        """Wait before the stream is opened again; no longer than it takes a node that was away to be there again."""
        if channel.get_state() is grpc.ChannelConnectivity.READY:
            await self._clock.sleep(delay)
            return
        # The channel itself tries to connect again and again, a second apart at most.
        with suppress(TimeoutError):
            async with asyncio.timeout(delay / bounds.SECOND):
                await channel.channel_ready()
        # Not all workers at once.
        await self._clock.sleep(spread)

    async def _converse(self, channel: Channel) -> bool:
        """Hold one stream until it ends; tell whether the node had welcomed it."""
        call: _Call = pb_grpc.WorkerServiceStub(channel).StreamAssignments()
        self._call = call
        self._stream = self._protocol.opened(self.address, self._clock.elapsed())
        self._has_outgoing.set()
        reason = _ENDED
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(call, self._stream), name=f"write to {self.address}")
                reason = await self._read(call, self._stream)
                writer.cancel()
        finally:
            call.cancel()
            was_serving = self._close(self._stream)
            self._tell_end(was_serving, reason)
        return was_serving

    def _tell_end(self, was_serving: bool, reason: str) -> None:
        """Log why a stream ended. One that never served ends again and again: that is told once for each reason."""
        if was_serving:
            _log.info("stream ended", extra={"address": self.address, "reason": reason})
        elif reason not in (_ENDED, self._told):
            _log.warning("node does not serve, trying again", extra={"address": self.address, "reason": reason})
        self._told = "" if was_serving else reason

    def _close(self, stream: NodeStream) -> bool:
        was_serving = self._was_serving
        self._stream = self._call = self._writing_since = self._opening_until = None
        self._serves(False)
        self._protocol.closed(stream)
        # Outcomes and credit of this stream may have moved to others.
        self._perform([])
        return was_serving

    async def _read(self, call: _Call, stream: NodeStream) -> str:
        """Take in messages until the stream ends; return why it did."""
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                assert isinstance(message, pb.StreamAssignmentsResponse)
                actions = self._protocol.received(stream, message, self._clock.elapsed())
                if stream.is_serving and not self._was_serving:
                    self._serves(True)
                    self._opening_until = None
                    _log.info("stream serving", extra={"address": self.address, "node": stream.node_id})
                self._perform(actions)
            return "closed by the node"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return "given up"  # The call was cancelled, not this task.
        except AioRpcError as error:
            if node_id := _refused_by(error, self.address):
                self._protocol.reach.met(self.address, node_id)
                return _ENDED
            # Of a connection that fails, gRPC first says that it does.
            return f"{error.code().name}: {(error.details() or '').rpartition('last error: ')[2]}"
        except ProtocolViolated as error:
            _log.error("protocol violated", extra={"address": self.address, "violation": str(error)})
            return f"protocol violated: {error}"

    async def _write(self, call: _Call, stream: NodeStream) -> None:
        """Send what waits, as soon as it waits; end the call when it takes no more."""
        try:
            while True:
                await self._has_outgoing.wait()
                self._has_outgoing.clear()
                for message in self._protocol.outgoing(stream, self._clock.elapsed()):
                    self._writing_since = self._clock.elapsed()
                    await call.write(message)
                self._writing_since = None
        except (asyncio.InvalidStateError, AioRpcError):
            call.cancel()

    def _serves(self, is_serving: bool) -> None:
        if is_serving != self._was_serving:
            self._was_serving = is_serving
            self.since = self._clock.now().latest


def _refused_by(error: AioRpcError, address: str) -> str:
    """Return the name of a node that has, or had until now, another stream of this worker; of others nothing."""
    try:
        return errors.from_call(error, address).metadata.get("node_id", "")
    except DecodeError:
        return ""  # Whoever ended the stream was no node.
