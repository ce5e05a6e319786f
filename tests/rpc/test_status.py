"""The table of errors, row by row, as a client reads it."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2 as details
from grpc import aio
from rpc.edge import Edge, Told, told

from duecourse.server.core import errors
from duecourse.server.core.task import Epoch, ShardId, TaskKey
from duecourse.server.rpc import status
from duecourse.server.rpc.relay import NotThere
from duecourse.server.rpc.status import Relayed
from duecourse.server.storage import CorruptRecord
from duecourse.server.streams.errors import ProtocolViolation, StreamEnded
from duecourse.v1 import error_reason_pb2, task_pb2, task_service_pb2

Code = grpc.StatusCode
IS_RETRIED, IS_FINAL = True, False
ROWS = [
    (errors.InvalidField("task.queue", "no"), Code.INVALID_ARGUMENT, "INVALID_FIELD", IS_FINAL, details.BadRequest),
    (
        errors.RunAtOutOfRange("task.run_at", "no"),
        Code.INVALID_ARGUMENT,
        "RUN_AT_OUT_OF_RANGE",
        IS_FINAL,
        details.BadRequest,
    ),
    (errors.TaskNotFound("t"), Code.NOT_FOUND, "TASK_NOT_FOUND", IS_FINAL, details.ResourceInfo),
    (errors.TaskExists("t"), Code.ALREADY_EXISTS, "TASK_EXISTS", IS_FINAL, details.ResourceInfo),
    (errors.RequestIdReused("r"), Code.ALREADY_EXISTS, "REQUEST_ID_REUSED", IS_FINAL, details.ResourceInfo),
    (errors.RevisionMismatch(3, 4), Code.ABORTED, "REVISION_MISMATCH", IS_FINAL, details.PreconditionFailure),
    (errors.NodeNotFound("n9"), Code.NOT_FOUND, "NODE_NOT_FOUND", IS_FINAL, details.ResourceInfo),
    (errors.RecordCorrupt("t"), Code.DATA_LOSS, "RECORD_CORRUPT", IS_FINAL, details.ResourceInfo),
    (
        errors.NotShardLeader(ShardId(3), Epoch(9), "other:7400"),
        Code.UNAVAILABLE,
        "NOT_SHARD_LEADER",
        IS_RETRIED,
        None,
    ),
    (errors.NoLeader(ShardId(3)), Code.UNAVAILABLE, "NO_LEADER", IS_RETRIED, None),
    (errors.StoreFailed("at 10.1.2.3"), Code.UNAVAILABLE, "STORE_UNAVAILABLE", IS_RETRIED, None),
    (errors.Draining(), Code.UNAVAILABLE, "DRAINING", IS_RETRIED, None),
    (errors.NodeNotReached("n9"), Code.UNAVAILABLE, "NODE_NOT_REACHED", IS_RETRIED, None),
    (errors.OutcomeUncertain(), Code.UNAVAILABLE, "OUTCOME_UNCERTAIN", IS_RETRIED, None),
    (errors.Overloaded("calls"), Code.RESOURCE_EXHAUSTED, "OVERLOADED", IS_RETRIED, details.QuotaFailure),
    (ProtocolViolation("Hello comes first"), Code.INVALID_ARGUMENT, "PROTOCOL_VIOLATION", IS_FINAL, None),
    (StreamEnded("silent"), Code.UNAVAILABLE, "STREAM_ENDED", IS_RETRIED, None),
    (errors.InvariantViolated("abc"), Code.INTERNAL, "INVARIANT_VIOLATED", IS_FINAL, None),
]


async def submit(edge: Edge) -> Told:
    request = task_service_pb2.SubmitTaskRequest(task=a_new_task())
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.SubmitTask(request, timeout=20)
    return told(caught.value)


def a_new_task() -> task_pb2.NewTask:
    return task_pb2.NewTask(task_id="t", task_type="send", now=task_pb2.Now())


@pytest.mark.parametrize(("error", "code", "reason", "is_retried", "detail"), ROWS, ids=[row[2] for row in ROWS])
async def test_each_error_is_told_by_its_row(
    edge: Edge, error: errors.DomainError, code: Code, reason: str, is_retried: bool, detail: type | None
) -> None:
    edge.commands.failure = error
    found = await submit(edge)
    assert (found.code, found.reason) == (code, reason)
    assert (found.retry_after is not None) == is_retried
    assert [type(one) for one in found.details] == ([] if detail is None else [detail])
    assert "10.1.2.3" not in repr(found)
    assert edge.metrics.rpc_requests["SubmitTask", code.name] == 1


@pytest.mark.parametrize(
    ("error", "code", "reason", "is_retried"), [row[:4] for row in ROWS], ids=[row[2] for row in ROWS]
)
async def test_each_error_of_an_item_is_told_by_its_row(
    edge: Edge, error: errors.DomainError, code: Code, reason: str, is_retried: bool
) -> None:
    edge.commands.answers["t"] = error
    other = a_new_task()
    other.task_id = "other"
    response = await edge.tasks.SubmitTasks(task_service_pb2.SubmitTasksRequest(tasks=[a_new_task(), other]))
    item = response.results[0].error
    assert item.code == code.value[0]
    assert error_reason_pb2.ErrorReason.Name(item.reason) == f"ERROR_REASON_{reason}"
    assert item.HasField("retry_delay") == is_retried
    assert response.results[1].submitted.created


def test_every_reason_but_the_unspecified_has_a_row() -> None:
    names = {name.removeprefix("ERROR_REASON_") for name in error_reason_pb2.ErrorReason.keys()}  # noqa: SIM118
    assert names - {"UNSPECIFIED"} == {row[2] for row in ROWS}


def test_every_domain_error_has_a_row() -> None:
    def subclasses(kind: type[errors.DomainError]) -> set[type[errors.DomainError]]:
        return {kind}.union(*map(subclasses, kind.__subclasses__()))

    between_nodes = {NotThere, Relayed}
    assert subclasses(errors.DomainError) - {errors.DomainError} - between_nodes == {type(row[0]) for row in ROWS}


async def test_metadata_names_shard_epoch_and_leader(edge: Edge) -> None:
    edge.commands.failure = errors.NotShardLeader(ShardId(3), Epoch(9), "other:7400")
    assert (await submit(edge)).metadata == {"shard": "3", "epoch": "9", "leader": "other:7400"}


@pytest.mark.parametrize("error", [RuntimeError("secret /etc/passwd"), KeyError("secret"), TimeoutError("secret")])
async def test_an_unexpected_error_is_internal_and_tells_only_its_id(edge: Edge, error: Exception) -> None:
    edge.commands.failure = error
    found = await submit(edge)
    assert (found.code, found.reason) == (Code.INTERNAL, "INVARIANT_VIOLATED")
    assert len(found.metadata["error_id"]) == 16
    assert "secret" not in repr(found)
    assert "Traceback" not in repr(found)


async def test_a_corrupt_record_is_data_loss(edge: Edge) -> None:
    key = TaskKey("default", "t")
    edge.store.tasks[key] = CorruptRecord(ShardId(0), key, 3, "column payload: secret")
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.GetTask(task_service_pb2.GetTaskRequest(task_id="t"))
    found = told(caught.value)
    assert (found.code, found.reason) == (Code.DATA_LOSS, "RECORD_CORRUPT")
    assert "secret" not in repr(found)


async def test_reads_say_so_when_the_store_is_away(edge: Edge) -> None:
    edge.store.is_away = True
    calls: list[Awaitable[Any]] = [
        edge.tasks.GetTask(task_service_pb2.GetTaskRequest(task_id="t")),
        edge.tasks.ListTasks(task_service_pb2.ListTasksRequest()),
    ]
    for call in calls:
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        found = told(caught.value)
        assert (found.code, found.reason) == (Code.UNAVAILABLE, "STORE_UNAVAILABLE")
        assert found.retry_after is not None
        assert "10.1.2.3" not in repr(found)


def test_a_deadline_that_passed_leaves_the_outcome_uncertain() -> None:
    found = status.deadline_exceeded()
    assert found.code is Code.DEADLINE_EXCEEDED
    assert found.reason == error_reason_pb2.ERROR_REASON_OUTCOME_UNCERTAIN


async def test_errors_of_calls_do_not_hold_each_other_up(edge: Edge) -> None:
    edge.commands.failure = errors.Draining()
    async with asyncio.timeout(20):
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(submit(edge)) for _ in range(20)]
    assert {call.result().reason for call in calls} == {"DRAINING"}
