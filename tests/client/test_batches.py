"""`submit_many`: how tasks are cut into requests, and what becomes of each."""

from datetime import timedelta
from typing import Any

import grpc
import pytest
from services.scripted import ScriptedNode, Status, answer_all, submitted

from duecourse.client import (
    Client,
    InvalidArgument,
    NewTask,
    OutcomeUncertain,
    Overloaded,
    ServerFault,
    SubmittedTask,
    TaskExists,
    Unavailable,
)
from duecourse.model import bounds
from duecourse.v1 import error_reason_pb2, task_service_pb2


def _ids(request: Any) -> list[str]:
    return [task.task_id for task in request.tasks]


def _named(count: int, **changes: Any) -> list[NewTask]:
    return [NewTask("remind", task_id=f"t{number}", **changes) for number in range(count)]


def _item_error(
    code: grpc.StatusCode, reason: str, retry_after: timedelta | None = None
) -> task_service_pb2.SubmitTaskResult:
    error = task_service_pb2.ItemError(
        code=code.value[0],
        reason=error_reason_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}"),
        message=f"scripted {reason}",
        field="task_id",
    )
    if retry_after is not None:
        error.retry_delay.FromTimedelta(retry_after)
    return task_service_pb2.SubmitTaskResult(error=error)


async def test_results_come_in_the_order_of_the_tasks(client: Client, node: ScriptedNode) -> None:
    results = await client.submit_many(iter(_named(95)), batch_size=10, in_flight=3)
    assert [result.task_id for result in results] == [f"t{number}" for number in range(95)]
    assert all(isinstance(result, SubmittedTask) and result.created for result in results)
    assert sorted(len(request.tasks) for request in node.requests) == [5] + [10] * 9


async def test_nothing_is_sent_for_no_tasks(client: Client, node: ScriptedNode) -> None:
    assert await client.submit_many([]) == []
    assert node.requests == []


async def test_every_task_gets_an_id_of_its_own(client: Client, node: ScriptedNode) -> None:
    results = await client.submit_many(NewTask("remind") for _ in range(50))
    assert len({result.task_id for result in results}) == 50
    assert [result.task_id for result in results] == _ids(node.requests[0])


async def test_a_bad_task_does_not_hurt_the_others(client: Client, node: ScriptedNode) -> None:
    tasks = _named(3)
    tasks[1].payload = bytes(bounds.MAX_PAYLOAD_BYTES + 1)
    results = await client.submit_many(tasks)
    assert isinstance(results[0], SubmittedTask)
    assert isinstance(results[1], InvalidArgument)
    assert (results[1].field, results[1].task_id) == ("payload", "t1")
    assert isinstance(results[2], SubmittedTask)
    assert _ids(node.requests[0]) == ["t0", "t2"]


async def test_only_bad_tasks_in_a_batch_do_not_end_the_rest(client: Client, node: ScriptedNode) -> None:
    tasks = _named(5)
    tasks[0].payload = tasks[1].payload = object()
    results = await client.submit_many(tasks, batch_size=2, in_flight=1)
    assert [type(result) for result in results] == [InvalidArgument] * 2 + [SubmittedTask] * 3


async def test_requests_stay_within_the_size_that_the_server_takes(client: Client, node: ScriptedNode) -> None:
    results = await client.submit_many(_named(20, payload=bytes(bounds.MAX_PAYLOAD_BYTES)), batch_size=20)
    assert all(isinstance(result, SubmittedTask) for result in results)
    assert sum(len(request.tasks) for request in node.requests) == 20
    assert all(request.ByteSize() <= bounds.MAX_REQUEST_BYTES for request in node.requests)


async def test_headers_count_towards_the_size_of_a_request(client: Client, node: ScriptedNode) -> None:
    headers = {f"h{number}": "x" * 60_000 for number in range(16)}
    results = await client.submit_many(_named(12, headers=headers))
    assert all(isinstance(result, SubmittedTask) for result in results)
    assert sum(len(request.tasks) for request in node.requests) == 12
    assert all(request.ByteSize() <= bounds.MAX_REQUEST_BYTES for request in node.requests)


async def test_a_task_that_no_request_can_carry_is_refused(client: Client, node: ScriptedNode) -> None:
    tasks = _named(3)
    tasks[1].headers = {"h": "x" * bounds.MAX_REQUEST_BYTES}
    results = await client.submit_many(tasks)
    assert [type(result) for result in results] == [SubmittedTask, InvalidArgument, SubmittedTask]
    assert results[1].task_id == "t1"


async def test_a_batch_whose_answer_was_lost_is_sent_again_as_it_was(client: Client, node: ScriptedNode) -> None:
    node.script("SubmitTasks", Status(grpc.StatusCode.UNAVAILABLE))
    results = await client.submit_many(NewTask("remind") for _ in range(10))
    first, second = node.requests
    assert first == second
    assert [result.task_id for result in results] == _ids(first)


async def test_only_items_worth_it_are_sent_again_with_their_ids(client: Client, node: ScriptedNode) -> None:
    def answer(request: task_service_pb2.SubmitTasksRequest) -> task_service_pb2.SubmitTasksResponse:
        response = answer_all(request)
        response.results[1].CopyFrom(
            _item_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", timedelta(milliseconds=1))
        )
        response.results[2].CopyFrom(_item_error(grpc.StatusCode.ALREADY_EXISTS, "TASK_EXISTS"))
        response.results[4].CopyFrom(_item_error(grpc.StatusCode.UNAVAILABLE, "OUTCOME_UNCERTAIN"))
        return response

    node.script("SubmitTasks", answer)
    results = await client.submit_many(_named(6))
    assert _ids(node.requests[1]) == ["t1", "t4"]
    assert [result.task_id for result in results] == [f"t{number}" for number in range(6)]
    kinds = [SubmittedTask] * 2 + [TaskExists] + [SubmittedTask] * 3
    assert [type(result) for result in results] == kinds
    assert isinstance(results[2], TaskExists)
    assert results[2].field == "task_id"


async def test_items_that_stay_unavailable_say_so_each_with_its_id(client: Client, node: ScriptedNode) -> None:
    def answer(request: task_service_pb2.SubmitTasksRequest) -> task_service_pb2.SubmitTasksResponse:
        errors = [_item_error(grpc.StatusCode.UNAVAILABLE, "NO_LEADER")] * len(request.tasks)
        return task_service_pb2.SubmitTasksResponse(results=errors)

    node.script("SubmitTasks", *[answer] * 99)
    results = await client.submit_many(_named(2))
    assert [type(result) for result in results] == [Unavailable] * 2
    assert [result.task_id for result in results] == ["t0", "t1"]


async def test_items_without_a_leader_are_taken_to_another_node(node: ScriptedNode) -> None:
    def answer(request: task_service_pb2.SubmitTasksRequest) -> task_service_pb2.SubmitTasksResponse:
        errors = [_item_error(grpc.StatusCode.UNAVAILABLE, "NO_LEADER")] * len(request.tasks)
        return task_service_pb2.SubmitTasksResponse(results=errors)

    node.script("SubmitTasks", *[answer] * 99)
    async with (
        ScriptedNode().serving() as other,
        Client([node.address, other.address], follows_leaders=False) as client,
    ):
        results = await client.submit_many(_named(3))
    assert all(isinstance(result, SubmittedTask) for result in results)
    assert len(node.requests) == len(other.requests) == 1


async def test_a_lost_answer_leaves_the_items_outcome_open(client: Client, node: ScriptedNode) -> None:
    node.script(
        "SubmitTasks", Status(grpc.StatusCode.UNAVAILABLE), *[Status(grpc.StatusCode.UNAVAILABLE, "DRAINING")] * 99
    )
    results = await client.submit_many(_named(2))
    assert [type(result) for result in results] == [OutcomeUncertain] * 2
    assert [result.task_id for result in results] == ["t0", "t1"]


async def test_the_longest_delay_of_the_items_is_waited_for(client: Client, node: ScriptedNode) -> None:
    def answer(request: task_service_pb2.SubmitTasksRequest) -> task_service_pb2.SubmitTasksResponse:
        results = [
            _item_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", timedelta(milliseconds=1)),
            _item_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", timedelta(minutes=1)),
        ]
        return task_service_pb2.SubmitTasksResponse(results=results)

    node.script("SubmitTasks", answer)
    results = await client.submit_many(_named(2))
    assert [type(result) for result in results] == [Overloaded] * 2
    assert len(node.requests) == 1


async def test_an_item_without_an_answer_is_the_servers_fault(client: Client, node: ScriptedNode) -> None:
    short = task_service_pb2.SubmitTasksResponse()
    short.results.add().submitted.CopyFrom(submitted("t0"))
    node.script("SubmitTasks", short)
    results = await client.submit_many(_named(2))
    assert [type(result) for result in results] == [SubmittedTask, ServerFault]


async def test_an_item_whose_code_is_from_tomorrow_is_a_fault(client: Client, node: ScriptedNode) -> None:
    error = task_service_pb2.ItemError(code=99, message="tomorrow")
    error.reason = 4711  # type: ignore[assignment]
    node.script(
        "SubmitTasks", task_service_pb2.SubmitTasksResponse(results=[task_service_pb2.SubmitTaskResult(error=error)])
    )
    [result] = await client.submit_many(_named(1))
    assert isinstance(result, ServerFault)
    assert result.reason == "4711"


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": 1_001}, {"in_flight": 0}])
async def test_a_batch_size_out_of_bounds_is_refused(client: Client, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"batch_size|in_flight"):
        await client.submit_many(_named(1), **options)  # type: ignore[arg-type]
