"""A real server on a loopback port, with commands, a store and a node behind it that answer what a test tells them."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_status import rpc_status
from streams.node_side import Node

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.effects import Cancelled, CancelResult, Submitted
from duecourse.server.core.errors import DomainError, TaskExists
from duecourse.server.core.task import (
    DEFAULT_POLICY,
    Attempt,
    AttemptOutcome,
    Epoch,
    Failure,
    Lane,
    Policy,
    Progress,
    ShardId,
    Submission,
    Task,
    TaskKey,
    TaskState,
)
from duecourse.server.leadership import Member
from duecourse.server.leadership.solo import Solo
from duecourse.server.rpc import ClusterDescription, NodeDescription, ShardDescription, ShardStanding
from duecourse.server.rpc.calls import Calls
from duecourse.server.rpc.cluster_news import ClusterNews
from duecourse.server.rpc.cluster_service import ClusterService
from duecourse.server.rpc.server import api_server
from duecourse.server.rpc.surfaces import CLUSTER, TASKS, WORKERS, Surface
from duecourse.server.rpc.task_service import TaskService
from duecourse.server.rpc.worker_service import WorkerService
from duecourse.server.storage import (
    CorruptRecord,
    ShardRow,
    StoredTask,
    StoreUnavailable,
    TaskPage,
    TaskQuery,
    TaskStore,
)
from duecourse.timing.clock import SystemClock
from duecourse.v1 import cluster_service_pb2_grpc, task_service_pb2_grpc, worker_service_pb2_grpc

NOW: Micros = 1_800_000_000 * bounds.SECOND
ROWS = [
    ShardRow(ShardId(0), 0, 8_192, "solo", Epoch(7), b"h" * 16),
    ShardRow(ShardId(1), 8_192, 16_384, "solo", Epoch(0), b""),
]


@dataclass
class ScriptedCommands:
    """Answers submissions like a node does, or as told."""

    stored: dict[TaskKey, Submission] = field(default_factory=dict)
    answers: dict[str, DomainError] = field(default_factory=dict)
    """By task id: what to answer instead."""
    failure: Exception | None = None
    """Raised by every command."""
    wait: Callable[[], Awaitable[None]] | None = None
    """Awaited before every answer."""
    cancellations: list[tuple[str, str, str, bytes, int | None, Micros]] = field(default_factory=list)
    cancelled: Cancelled | DomainError = field(
        default_factory=lambda: Cancelled(CancelResult.PREVENTED, TaskState.CANCELLED, earlier_attempt_may_run=False)
    )

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[Submitted | DomainError]:
        await self._pause()
        return [self._submit(submission) for submission in submissions]

    async def cancel(
        self,
        namespace: str,
        task_id: str,
        request_id: str,
        fingerprint: bytes,
        expected_revision: int | None,
        wait: Micros,
    ) -> Cancelled:
        self.cancellations.append((namespace, task_id, request_id, fingerprint, expected_revision, wait))
        await self._pause()
        if isinstance(self.cancelled, DomainError):
            raise self.cancelled
        return self.cancelled

    def _submit(self, submission: Submission) -> Submitted | DomainError:
        if submission.task_id in self.answers:
            return self.answers[submission.task_id]
        before = self.stored.setdefault(TaskKey(submission.namespace, submission.task_id), submission)
        if before.fingerprint != submission.fingerprint:
            return TaskExists(submission.task_id)
        return Submitted(before.uid, created=before is submission)

    async def _pause(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.wait is not None:
            await self.wait()


@dataclass
class ShelfStore:
    """The reads of a store, from a dictionary."""

    tasks: dict[TaskKey, StoredTask | CorruptRecord] = field(default_factory=dict)
    is_away: bool = False
    queries: list[tuple[TaskQuery, str, int]] = field(default_factory=list)

    def put(self, stored: StoredTask) -> None:
        self.tasks[stored.task.key] = stored

    async def read_task(self, key: TaskKey, *, full: bool) -> StoredTask | CorruptRecord | None:
        if self.is_away:
            raise StoreUnavailable("connection to 10.1.2.3 refused")
        return self.tasks.get(key)

    async def list_tasks(self, query: TaskQuery, after: str, limit: int) -> TaskPage:
        if self.is_away:
            raise StoreUnavailable("connection to 10.1.2.3 refused")
        self.queries.append((query, after, limit))
        keys = sorted(key for key in self.tasks if key.namespace == query.namespace and key.task_id > after)
        rows = [self.tasks[key] for key in keys[:limit]]
        return TaskPage(
            [row for row in rows if isinstance(row, StoredTask)],
            [row for row in rows if isinstance(row, CorruptRecord)],
            keys[limit - 1].task_id if len(keys) > limit else None,
        )


class Edge:
    """The server, what is behind it, and a channel to it."""

    def __init__(self, max_calls: int = 64, max_streams: int = 4, *, has_reflection: bool = True) -> None:
        self.commands = ScriptedCommands()
        self.store = ShelfStore()
        self.node = Node(max_streams)
        self.metrics = self.node.metrics
        self.calls = Calls(self.metrics, max_calls)
        self.drained = 0
        view = Solo(Member(node_id="n1", address="localhost:7400", peer_address="", version="0.1.0"))
        self.news = ClusterNews(view, ROWS, SystemClock(), self.metrics, max_watchers=2)
        tasks = TaskService(
            self.commands,
            cast(TaskStore, self.store),
            self.calls,
            self.metrics,
            shard_of_slot=self.node.port.shard_of_slot,
            utc=lambda: NOW,
        )
        servicers = {
            TASKS: tasks,
            WORKERS: WorkerService(self.node.hub, self.node.port, self.calls),
            CLUSTER: ClusterService(describe, view, self.news, self.calls, drain=self.drain),
        }
        self.server = api_server(Surface(servicers, self.calls, self.news), has_reflection=has_reflection)
        self.port = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Edge"]:
        self.port = await self.server.start("127.0.0.1:0")
        await self.server.set_serving(is_serving=True)
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        try:
            async with aio.insecure_channel(self.address, options=options) as self.channel:
                self.tasks = task_service_pb2_grpc.TaskServiceStub(self.channel)
                self.workers = worker_service_pb2_grpc.WorkerServiceStub(self.channel)
                self.cluster = cluster_service_pb2_grpc.ClusterServiceStub(self.channel)
                yield self
        finally:
            self.node.hub.close()
            await self.server.stop(bounds.SECOND)

    def drain(self) -> None:
        self.drained += 1

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Told:
    """What a status says."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: dict[str, str]
    retry_after: Micros | None
    details: tuple[Message, ...]

    @property
    def field(self) -> str:
        (bad,) = [detail for detail in self.details if isinstance(detail, error_details_pb2.BadRequest)]
        (violation,) = bad.field_violations
        return violation.field


_DETAILS = (
    error_details_pb2.BadRequest,
    error_details_pb2.ResourceInfo,
    error_details_pb2.PreconditionFailure,
    error_details_pb2.QuotaFailure,
)


def told(error: aio.AioRpcError) -> Told:
    """Read a status as a client does."""
    return _read(rpc_status.from_call(error))  # type: ignore[no-untyped-call]


async def told_by_stream(call: aio.StreamStreamCall[Any, Any]) -> Told:
    """Read the status of a stream that has ended."""
    for key, value in await call.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            assert isinstance(value, bytes)
            return _read(status_pb2.Status.FromString(value))
    raise AssertionError(f"no details: {await call.code()}")


def _read(status: status_pb2.Status | None) -> Told:
    assert status is not None, "every status has details"
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    retry_after: Micros | None = None
    others: list[Message] = []
    assert status.details[0].Unpack(info)
    assert info.domain == "duecourse.dev"
    for packed in status.details[1:]:
        if packed.Unpack(retry):
            retry_after = retry.retry_delay.ToMicroseconds()
            continue
        for kind in _DETAILS:
            detail = kind()
            if packed.Unpack(detail):
                others.append(detail)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return Told(code, status.message, info.reason, dict(info.metadata), retry_after, tuple(others))


def describe() -> ClusterDescription:
    return ClusterDescription(
        "solo",
        "n1",
        [NodeDescription("n1", "localhost:7400", "0.1.0")],
        [
            ShardDescription(ShardId(0), 0, 8_192, ShardStanding.LED, "n1", Epoch(7), 3, 2),
            ShardDescription(ShardId(1), 8_192, 16_384, ShardStanding.UNLED, "", Epoch(0), 0, 0),
        ],
        2,
    )


def a_stored_task(task_id: str = "t1", policy: Policy = DEFAULT_POLICY, headers: int = 0) -> StoredTask:
    first = Attempt(
        1, 1, b"k" * 16, "w", "i" * 16, "n1", Epoch(6), 41, NOW, NOW, NOW + 1, NOW + 2, AttemptOutcome.FAILED
    )
    first.failure = Failure("ValueError", "no")
    first.progress = "half"
    second = Attempt(2, 1, b"l" * 16, "w", "i" * 16, "n1", Epoch(7), 42, NOW + 3, NOW + 3)
    progress = Progress(TaskState.LEASED, NOW + 3, 5, 1, 2, 2, 0, False, False, second)
    lane = Lane("default", "mail", "send", -2, "tenant")
    task = Task(TaskKey("default", task_id), ShardId(1), lane, b"u" * 16, 9, NOW + 1_500, NOW, policy, progress)
    return StoredTask(
        task,
        b"payload",
        "text/plain",
        {"k": "v", **{f"header-{n}": "x" * 200 for n in range(headers)}},
        {"team": "a"},
        (b"result", "text/html"),
        [first, second],
    )
