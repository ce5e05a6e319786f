"""A node that answers what a test tells it to: real gRPC, no scheduler."""

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from inspect import isawaitable
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from duecourse.client import errors
from duecourse.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    task_pb2,
    task_service_pb2,
    task_service_pb2_grpc,
)


@dataclass(frozen=True)
class Status:
    """Ends the call so; without a reason as a proxy or the transport would, without details."""

    code: grpc.StatusCode
    reason: str = ""
    message: str = "scripted"
    field: str = ""
    retry_after: timedelta | None = None
    metadata: tuple[tuple[str, str], ...] = ()


class Silence:
    """Never answers."""


def submitted(task_id: str, *, created: bool = True) -> task_service_pb2.SubmittedTask:
    return task_service_pb2.SubmittedTask(task_id=task_id, uid=b"u" * 16, created=created)


def answer_all(request: task_service_pb2.SubmitTasksRequest) -> task_service_pb2.SubmitTasksResponse:
    response = task_service_pb2.SubmitTasksResponse()
    for task in request.tasks:
        response.results.add().submitted.CopyFrom(submitted(task.task_id))
    return response


def a_task(task_id: str = "t1", **changes: Any) -> task_pb2.Task:
    task = task_pb2.Task(
        namespace="default",
        task_id=task_id,
        uid=bytes(range(16)),
        queue="default",
        task_type="remind",
        state=task_pb2.TASK_STATE_PENDING,
        on_lost_attempt=task_pb2.ON_LOST_ATTEMPT_RETRY,
        revision=1,
        round=1,
        **changes,
    )
    task.run_at.FromJsonString("2030-01-02T03:04:05.678901Z")
    task.create_time.FromJsonString("2029-01-02T03:04:05Z")
    task.due_time.CopyFrom(task.run_at)
    task.attempt_timeout.FromSeconds(600)
    return task


Step = Any
"""A message, a `Status`, `Silence`, or a function from the request to one of them, at once or some time; for a watch
also an event to wait for."""

_DEFAULTS: dict[str, Callable[[Any], Any]] = {
    "SubmitTask": lambda request: task_service_pb2.SubmitTaskResponse(submitted=submitted(request.task.task_id)),
    "SubmitTasks": answer_all,
    "GetTask": lambda request: task_service_pb2.GetTaskResponse(task=a_task(request.task_id)),
    "ListTasks": lambda request: task_service_pb2.ListTasksResponse(tasks=[a_task("t1"), a_task("t2")]),
    "CancelTask": lambda request: task_service_pb2.CancelTaskResponse(
        result=task_service_pb2.CANCEL_RESULT_PREVENTED, state=task_pb2.TASK_STATE_CANCELLED
    ),
    "GetCluster": lambda request: cluster_service_pb2.GetClusterResponse(
        coordination="solo",
        answering_node="node-1",
        nodes=[cluster_service_pb2.Node(node_id="node-1", address="127.0.0.1:7400", version="0.1.0")],
        shards=[
            cluster_service_pb2.Shard(
                shard=0,
                slot_until=16_384,
                state=cluster_service_pb2.SHARD_STATE_LED,
                leader="node-1",
                epoch=3,
                tasks_in_memory=5,
                leases=2,
            )
        ],
        worker_streams=1,
    ),
    "DrainNode": lambda request: cluster_service_pb2.DrainNodeResponse(),
}


class ScriptedNode(task_service_pb2_grpc.TaskServiceServicer, cluster_service_pb2_grpc.ClusterServiceServicer):
    """Answers each method with the next step of its script, and sensibly once the script is over."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[Any] = []
        self.watches = 0
        self._scripts: defaultdict[str, deque[Step]] = defaultdict(deque)

    def script(self, method: str, *steps: Step) -> None:
        self._scripts[method].extend(steps)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["ScriptedNode"]:
        server = grpc.aio.server()
        task_service_pb2_grpc.add_TaskServiceServicer_to_server(self, server)
        cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield self
        finally:
            await server.stop(0)

    async def SubmitTask(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer("SubmitTask", request, context)

    async def SubmitTasks(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer("SubmitTasks", request, context)

    async def GetTask(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer("GetTask", request, context)

    async def ListTasks(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer("ListTasks", request, context)

    async def CancelTask(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer("CancelTask", request, context)

    async def GetCluster(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer("GetCluster", request, context)

    async def DrainNode(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer("DrainNode", request, context)

    async def WatchCluster(  # type: ignore[override]  # noqa: N802
        self, request: Any, context: Any
    ) -> None:
        """Tell what the script says, message by message; once it is over, end as a node of the first version would."""
        self.watches += 1
        steps = self._scripts["WatchCluster"]
        while steps:
            step = steps.popleft()
            if isinstance(step, Silence):
                await asyncio.get_running_loop().create_future()
            if isinstance(step, Status):
                await _abort(step, context)
            if isinstance(step, asyncio.Event):
                await step.wait()
            else:
                await context.write(step)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    async def _answer(self, method: str, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        self.requests.append(request)
        steps = self._scripts[method]
        step = steps.popleft() if steps else _DEFAULTS[method]
        answer = step(request) if callable(step) else step
        if isawaitable(answer):
            answer = await answer
        if isinstance(answer, Silence):
            await asyncio.get_running_loop().create_future()
        if isinstance(answer, Status):
            await _abort(answer, context)
        return answer


async def _abort(status: Status, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    if not status.reason:
        await context.abort(status.code, status.message)
    details: list[message.Message] = [
        error_details_pb2.ErrorInfo(reason=status.reason, domain=errors.DOMAIN, metadata=dict(status.metadata)),
    ]
    if status.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=status.field, description=status.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if status.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromTimedelta(status.retry_after)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    full = status_pb2.Status(code=status.code.value[0], message=status.message)
    for detail in details:
        packed: any_pb2.Any = full.details.add()
        packed.Pack(detail)
    await context.abort_with_status(rpc_status.to_status(full))  # type: ignore[no-untyped-call]
