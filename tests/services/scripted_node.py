"""A scheduler node for tests of workers: it speaks their protocol, does what the test tells it, and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
from google.protobuf.duration_pb2 import Duration

from duecourse.timing.clock import SystemClock
from duecourse.v1 import worker_service_pb2 as pb
from duecourse.v1 import worker_service_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[
    AsyncIterator[pb.StreamAssignmentsRequest], AsyncIterator[pb.StreamAssignmentsResponse]
]


def assignment(
    task_id: str,
    task_type: str = "note",
    *,
    shard: int = 1,
    epoch: int = 1,
    attempt: int = 1,
    lease_seconds: float = 30,
    seconds_left: float = 600,
    payload: bytes = b"",
) -> pb.Assignment:
    """Build an assignment whose token follows from the task's id and the attempt."""
    made = pb.Assignment(lease_token=token_of(task_id, attempt), shard=shard, epoch=epoch, attempt=attempt)
    made.fencing_token = 1_000 + attempt
    made.lease.FromMilliseconds(round(lease_seconds * 1_000))
    made.time_left.FromMilliseconds(round(seconds_left * 1_000))
    task = made.task
    task.namespace, task.task_id, task.task_type, task.queue = "default", task_id, task_type, "default"
    task.uid = f"uid of {task_id}".encode()[:16].ljust(16, b"-")
    task.payload, task.content_type = payload, "application/json"
    task.run_at.FromMilliseconds(1_800_000_000_123)
    return made


def token_of(task_id: str, attempt: int = 1) -> bytes:
    """Return the lease token that `assignment` gives."""
    return f"{task_id}/{attempt}".encode().rjust(16, b"#")


class NodeSide:
    """One stream, seen from the node: what the worker has said on it, and a hand to answer with."""

    def __init__(self, context: Context) -> None:
        self.said: list[pb.StreamAssignmentsRequest] = []
        self.is_over = False
        self.records_outcomes = True
        self.beats = True
        self.reads = True
        self.assigned = 0
        # The stubs take the stream for what one message of it is.
        self._write = cast(Callable[[pb.StreamAssignmentsResponse], Awaitable[None]], context.write)
        self._read = cast(Callable[[], Awaitable[object]], context.read)
        self._changed = asyncio.Condition()
        self._end = asyncio.Event()

    async def say(self, **event: Any) -> None:
        """Send one event."""
        await self._write(pb.StreamAssignmentsResponse(**event))

    async def assign(self, *assignments: pb.Assignment) -> None:
        """Send one batch of assignments."""
        self.assigned += 1
        await self.say(
            assignments=pb.Assignments(number=self.assigned, last_read=len(self.said), assignments=assignments)
        )

    def end(self) -> None:
        """End the stream with OK."""
        self._end.set()

    def all(self, event: str) -> list[Any]:
        """Return everything that was said under one name."""
        return [getattr(message, event) for message in self.said if message.WhichOneof("event") == event]

    def ids(self, event: str) -> list[str]:
        """Return the ids of the tasks of all attempts that were named under started, succeeded, failed or returned."""
        attempts = [attempt for batch in self.all(event) for attempt in batch.attempts]
        return [
            attempt.task_id if event in ("started", "returned") else attempt.attempt.task_id for attempt in attempts
        ]

    async def until(self, condition: Callable[["NodeSide"], bool], seconds: float = 20) -> None:
        """Wait until what was said fulfils a condition."""
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    async def heard(self, event: str, count: int = 1) -> list[Any]:
        """Wait until an event was said so often; return all of them."""
        await self.until(lambda side: len(side.all(event)) >= count)
        return self.all(event)

    async def serve(self, welcome: pb.Welcome) -> None:
        """Welcome the worker, then answer outcomes and beat until the stream ends."""
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._listen(welcome))
                beating = group.create_task(self._beat(welcome.heartbeat_interval))
                ending = group.create_task(self._end.wait())
                await asyncio.wait((reading, ending), return_when=asyncio.FIRST_COMPLETED)
                for duty in (reading, beating, ending):
                    duty.cancel()
        finally:
            self.is_over = True
            async with self._changed:
                self._changed.notify_all()

    async def _listen(self, welcome: pb.Welcome) -> None:
        while isinstance(said := await self._read(), pb.StreamAssignmentsRequest):
            self.said.append(said)
            if said.HasField("hello"):
                await self.say(welcome=welcome)
            if self.records_outcomes and (tokens := _tokens(said)):
                await self.say(outcomes_recorded=pb.OutcomesRecorded(recorded=tokens))
            async with self._changed:
                self._changed.notify_all()
            if not self.reads:
                await asyncio.Event().wait()

    async def _beat(self, interval: Duration) -> None:
        clock = SystemClock()
        while True:
            await clock.sleep(interval.ToMicroseconds())
            if self.beats:
                await self.say(heartbeat=pb.NodeHeartbeat(last_read=len(self.said)))


class ScriptedNode(pb_grpc.WorkerServiceServicer):
    """Serves `StreamAssignments`; every stream is a `NodeSide`."""

    def __init__(self, heartbeat_seconds: float) -> None:
        self.welcome = pb.Welcome(protocol_version=1, terms=[pb.Term(shard=1, epoch=1)])
        self.welcome.heartbeat_interval.FromMilliseconds(round(heartbeat_seconds * 1_000))
        self.sides: list[NodeSide] = []
        self.port = 0
        self.opened_with: Callable[[NodeSide], None] = lambda side: None
        self._opened = asyncio.Condition()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    async def side(self, number: int) -> NodeSide:
        """Wait for the n-th stream, from 1, and the worker's Hello on it."""
        async with asyncio.timeout(20), self._opened:
            await self._opened.wait_for(lambda: len(self.sides) >= number)
        side = self.sides[number - 1]
        await side.heard("hello")
        return side

    async def StreamAssignments(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.StreamAssignmentsRequest], context: Context
    ) -> None:
        """Serve one stream by reading and writing, as a node does."""
        side = NodeSide(context)
        self.opened_with(side)
        self.sides.append(side)
        async with self._opened:
            self._opened.notify_all()
        await side.serve(self.welcome)


@asynccontextmanager
async def scripted_node(*, port: int = 0, heartbeat_seconds: float = 0.5) -> AsyncIterator[ScriptedNode]:
    """Serve a scripted node on this machine."""
    node = ScriptedNode(heartbeat_seconds)
    server = grpc.aio.server()
    pb_grpc.add_WorkerServiceServicer_to_server(node, server)
    node.port = server.add_insecure_port(f"127.0.0.1:{port}")
    node.welcome.node_id = f"node-{node.port}"
    await server.start()
    try:
        yield node
    finally:
        await server.stop(None)


def _tokens(said: pb.StreamAssignmentsRequest) -> Sequence[bytes]:
    match said.WhichOneof("event"):
        case "returned":
            return [attempt.lease_token for attempt in said.returned.attempts]
        case "succeeded":
            return [attempt.attempt.lease_token for attempt in said.succeeded.attempts]
        case "failed":
            return [attempt.attempt.lease_token for attempt in said.failed.attempts]
        case _:
            return []
