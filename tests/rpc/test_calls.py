"""Cancelling tasks; and what every call gets: deadlines, a bound on how many run, a status when the node goes."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio
from rpc.edge import Edge, told

from duecourse.model import bounds
from duecourse.server.core.effects import Cancelled, CancelResult
from duecourse.server.core.errors import RevisionMismatch
from duecourse.server.core.task import TaskState
from duecourse.v1 import task_pb2, task_service_pb2

CANCEL = task_service_pb2.CancelTaskRequest(task_id="t")


def a_submission() -> task_service_pb2.SubmitTaskRequest:
    return task_service_pb2.SubmitTaskRequest(task=task_pb2.NewTask(task_id="t", task_type="send", now=task_pb2.Now()))


class Gate:
    """Holds commands until it is opened, and says when one waits."""

    def __init__(self, edge: Edge) -> None:
        self.waiting = 0
        self.arrived = asyncio.Event()
        self.opened = asyncio.Event()
        edge.commands.wait = self._wait

    async def _wait(self) -> None:
        self.waiting += 1
        self.arrived.set()
        try:
            await self.opened.wait()
        finally:
            self.waiting -= 1

    async def until(self, waiting: int) -> None:
        async with asyncio.timeout(20):
            while self.waiting != waiting:
                self.arrived.clear()
                if self.waiting < waiting:
                    await self.arrived.wait()
                else:
                    # Nothing signals a command that was given up: look again once the loop has turned.
                    await asyncio.to_thread(lambda: None)


# Cancelling.


@pytest.mark.parametrize("result", list(CancelResult))
@pytest.mark.parametrize("may_run", [True, False])
async def test_a_cancellation_is_answered_in_words(edge: Edge, result: CancelResult, may_run: bool) -> None:
    edge.commands.cancelled = Cancelled(result, TaskState.RUNNING, may_run)
    response = await edge.tasks.CancelTask(CANCEL)
    assert task_service_pb2.CancelResult.Name(response.result) == f"CANCEL_RESULT_{result.name}"
    assert response.state == task_pb2.TASK_STATE_RUNNING
    assert response.earlier_attempt_may_run == may_run


async def test_a_cancellation_reaches_the_node_as_it_was_sent(edge: Edge) -> None:
    request = task_service_pb2.CancelTaskRequest(
        namespace="shop", task_id="t", request_id="r1", expected_revision=0, wait=Duration(seconds=2)
    )
    await edge.tasks.CancelTask(request)
    await edge.tasks.CancelTask(CANCEL)
    request.wait.seconds = 3
    await edge.tasks.CancelTask(request)
    first, plain, again = edge.commands.cancellations
    assert (first[:3], first[4:]) == (("shop", "t", "r1"), (0, 2 * bounds.SECOND))
    assert (plain[:3], plain[4:]) == (("default", "t", ""), (None, bounds.DEFAULT_CANCEL_WAIT))
    assert first[3] == again[3], "how long it waits does not make another request"
    assert first[3] != plain[3]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (task_service_pb2.CancelTaskRequest(task_id="t", request_id="a b"), "request_id"),
        (task_service_pb2.CancelTaskRequest(task_id="t", request_id="x" * 256), "request_id"),
        (task_service_pb2.CancelTaskRequest(task_id="t", wait=Duration(seconds=31)), "wait"),
        (task_service_pb2.CancelTaskRequest(task_id="t", wait=Duration(nanos=-1)), "wait"),
        (task_service_pb2.CancelTaskRequest(task_id="t", wait=Duration(seconds=2**62)), "wait"),
    ],
)
async def test_a_malformed_cancellation_is_refused_by_name(
    edge: Edge, request_: task_service_pb2.CancelTaskRequest, field: str
) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.CancelTask(request_)
    assert told(caught.value).field == field
    assert edge.commands.cancellations == []


async def test_a_cancellation_waits_no_longer_than_its_caller(edge: Edge) -> None:
    request = task_service_pb2.CancelTaskRequest(task_id="t", wait=Duration(seconds=30))
    await edge.tasks.CancelTask(request, timeout=10)
    await edge.tasks.CancelTask(request)
    short, alone = [cancellation[5] for cancellation in edge.commands.cancellations]
    assert short < 10 * bounds.SECOND
    assert alone < bounds.DEFAULT_CALL_DEADLINE


async def test_a_refused_cancellation_says_why(edge: Edge) -> None:
    edge.commands.cancelled = RevisionMismatch(3, 4)
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.CancelTask(CANCEL)
    found = told(caught.value)
    assert (found.code, found.metadata) == (grpc.StatusCode.ABORTED, {"expected": "3", "current": "4"})


# Deadlines and bounds.


async def test_a_call_that_is_given_up_leaves_nothing_behind(edge: Edge) -> None:
    gate = Gate(edge)
    call = edge.tasks.SubmitTask(a_submission())
    given_up = edge.tasks.SubmitTask(a_submission(), timeout=2)
    await gate.until(2)
    with pytest.raises(aio.AioRpcError) as caught:
        await given_up
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await gate.until(1)
    call.cancel()
    await gate.until(0)
    assert edge.metrics.rpc_requests["SubmitTask", "CANCELLED"] == 2


async def test_more_calls_than_allowed_are_refused_at_once(edge: Edge) -> None:
    gate = Gate(edge)
    calls = [edge.tasks.SubmitTask(a_submission()) for _ in range(64)]
    await gate.until(64)
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.SubmitTask(a_submission())
    found = told(caught.value)
    assert (found.code, found.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert found.retry_after is not None
    assert edge.metrics.admission_refusals["calls"] == 1
    gate.opened.set()
    for call in calls:
        await call
    await edge.tasks.SubmitTask(a_submission())


async def test_calls_under_way_when_the_node_goes_are_told_that_their_outcome_is_uncertain() -> None:
    edge = Edge()
    async with edge.serving():
        gate = Gate(edge)
        call = edge.tasks.SubmitTask(a_submission())
        await gate.until(1)
        async with asyncio.timeout(20):
            await edge.server.stop(bounds.SECOND)
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        assert told(caught.value).reason == "OUTCOME_UNCERTAIN"


async def test_calls_that_end_in_time_end_well_when_the_node_goes() -> None:
    edge = Edge()
    async with edge.serving():
        gate = Gate(edge)
        call = edge.tasks.SubmitTask(a_submission())
        await gate.until(1)
        async with asyncio.TaskGroup() as group:
            group.create_task(edge.server.stop(20 * bounds.SECOND))
            gate.opened.set()
            assert (await call).submitted.created
