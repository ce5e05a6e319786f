"""`WorkerService`: moves messages between a worker's stream and its machine, which decides everything.

One coroutine reads, one writes. The writer wakes once for all that was decided in a turn of the event loop, so that it
leaves in as few messages as possible, and it never writes more than one message ahead of what the connection takes:
what waits is in the machine, where it is bounded.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, cast

import grpc
from grpc import aio

from duecourse.server.core.errors import DomainError
from duecourse.server.rpc import status
from duecourse.server.rpc.calls import Calls
from duecourse.server.rpc.registration import Malformed
from duecourse.server.streams import Port
from duecourse.server.streams.errors import ProtocolViolation
from duecourse.server.streams.hub import Hub
from duecourse.server.streams.worker_stream import WorkerStream
from duecourse.v1 import worker_service_pb2 as pb
from duecourse.v1 import worker_service_pb2_grpc

_METHOD: Final = "StreamAssignments"
_Context = aio.ServicerContext[AsyncIterator[pb.StreamAssignmentsRequest], AsyncIterator[pb.StreamAssignmentsResponse]]


class WorkerService(worker_service_pb2_grpc.WorkerServiceServicer):
    """See the module's docstring."""

    def __init__(self, hub: Hub, port: Port, calls: Calls) -> None:
        self._hub = hub
        self._port = port
        self._calls = calls

    async def StreamAssignments(  # type: ignore[override]  # noqa: N802
        self, _: AsyncIterator[pb.StreamAssignmentsRequest], context: _Context
    ) -> None:
        """Lease tasks to a worker for as long as its stream lives. Reads and writes by the context."""
        wake = asyncio.Event()
        try:
            stream = self._hub.open(wake.set)
        except DomainError as error:
            refused = status.refusal(error)
        else:
            await self._serve(stream, wake, context)
            return
        await self._calls.refuse(_METHOD, context, refused)

    async def _serve(self, stream: WorkerStream, wake: asyncio.Event, context: _Context) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(self._read(stream, context), name=f"worker_stream_{stream.stream_id}")
                await _write(stream, wake, context)
                reader.cancel()
        except asyncio.CancelledError:
            self._calls.count(_METHOD, grpc.StatusCode.CANCELLED)
            raise
        finally:
            stream.end(None)
        if stream.error is not None:
            await self._calls.refuse(_METHOD, context, status.refusal(stream.error))
        self._calls.count(_METHOD, grpc.StatusCode.OK)

    async def _read(self, stream: WorkerStream, context: _Context) -> None:
        elapsed = self._port.elapsed
        read: Any = context.read
        try:
            while not stream.is_ended:
                message = await read()
                if message is aio.EOF:
                    break
                if isinstance(message, Malformed):
                    stream.end(ProtocolViolation(message.problem))
                    return
                stream.receive(cast(pb.StreamAssignmentsRequest, message), elapsed())
        except Exception as error:
            # Ours, since what a worker can do wrong ends its stream without an exception.
            stream.end(status.violated(error))
        stream.end(None)


async def _write(stream: WorkerStream, wake: asyncio.Event, context: _Context) -> None:
    """Write what the machine has for the worker until the stream has ended."""
    write: Any = context.write
    while not stream.is_ended:
        wake.clear()
        while (message := stream.take()) is not None:
            try:
                await write(message)
            except Exception:
                # gRPC has several ways to say that the worker is gone.
                stream.end(None)
        if not stream.is_ended:
            await wake.wait()
