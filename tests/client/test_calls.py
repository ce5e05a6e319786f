"""Single calls: what is sent again, with which ids, and what is raised in the end."""

import asyncio
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from services.garbage import none_left
from services.scripted import ScriptedNode, Silence, Status, a_task
from services.waiting import until

from duecourse.client import (
    CancelResult,
    Client,
    DeadlineExceeded,
    DuecourseError,
    InvalidArgument,
    NewTask,
    NotPermitted,
    OutcomeUncertain,
    Overloaded,
    Refused,
    RequestIdReused,
    RevisionMismatch,
    ServerFault,
    ShardState,
    TaskExists,
    TaskFilter,
    TaskNotFound,
    TaskState,
    Unavailable,
)
from duecourse.v1 import task_pb2, task_service_pb2

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def test_a_submission_without_an_id_gets_one_from_the_client(client: Client, node: ScriptedNode) -> None:
    submitted = await client.submit(NewTask("remind", {"to": "ann"}))
    [request] = node.requests
    assert request.task.task_id == submitted.task_id
    assert len(submitted.task_id) == 36
    assert submitted.uid == b"u" * 16
    assert submitted.created


async def test_a_retried_submission_keeps_its_id(client: Client, node: ScriptedNode) -> None:
    node.script("SubmitTask", Status(UNAVAILABLE), Status(UNAVAILABLE, "OUTCOME_UNCERTAIN"))
    submitted = await client.submit(NewTask("remind"))
    assert [request.task.task_id for request in node.requests] == [submitted.task_id] * 3


async def test_a_lost_answer_is_asked_for_again_before_the_deadline(client: Client, node: ScriptedNode) -> None:
    node.script("SubmitTask", Silence())
    submitted = await client.submit(NewTask("remind"), timeout=timedelta(seconds=3))
    assert [request.task.task_id for request in node.requests] == [submitted.task_id] * 2


async def test_a_submission_that_is_never_answered_ends_at_its_deadline_with_its_id(
    client: Client, node: ScriptedNode
) -> None:
    node.script("SubmitTask", *[Silence()] * 9)
    with pytest.raises(DeadlineExceeded, match=f"no answer from {node.address} in time") as raised:
        await client.submit(NewTask("remind"), timeout=timedelta(milliseconds=600))
    assert raised.value.task_id == node.requests[0].task.task_id
    assert isinstance(raised.value, OutcomeUncertain)


async def test_nothing_of_a_refusal_is_left_to_the_garbage_collector(client: Client, node: ScriptedNode) -> None:
    node.script("SubmitTask", Status(UNAVAILABLE), Status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"))
    with none_left(DuecourseError, grpc.aio.AioRpcError), pytest.raises(InvalidArgument):
        await client.submit(NewTask("remind"))
    assert len(node.requests) == 2


async def test_a_try_that_could_not_be_answered_any_more_is_not_begun(client: Client, node: ScriptedNode) -> None:
    node.script("SubmitTask", *[Status(UNAVAILABLE, "NO_LEADER")] * 99)
    with pytest.raises(Unavailable):
        await client.submit(NewTask("remind"), timeout=timedelta(milliseconds=500))
    assert len(node.requests) == 1


async def test_the_server_is_not_asked_before_the_delay_that_it_named(client: Client, node: ScriptedNode) -> None:
    node.script(
        "SubmitTask", Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", retry_after=timedelta(minutes=1))
    )
    with pytest.raises(Overloaded) as raised:
        await client.submit(NewTask("remind"))
    assert raised.value.retry_after == timedelta(minutes=1)
    assert len(node.requests) == 1


async def test_an_overload_that_passes_is_waited_out(client: Client, node: ScriptedNode) -> None:
    overloaded = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", retry_after=timedelta(milliseconds=10))
    node.script("SubmitTask", overloaded, overloaded)
    assert (await client.submit(NewTask("remind"))).created
    assert len(node.requests) == 3


async def test_what_waits_between_two_tries_fails_when_its_client_is_closed(node: ScriptedNode) -> None:
    client = Client(node.address, follows_leaders=False)
    wait = timedelta(milliseconds=300)
    node.script("SubmitTask", Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", retry_after=wait))
    async with asyncio.TaskGroup() as group:
        call = group.create_task(_failure_of_a_submission(client))
        await until(lambda: node.requests and not any(route.calls for route in client._router._routes.values()))
        await client.close()
    assert isinstance(call.result(), Overloaded)
    assert len(node.requests) == 1
    with pytest.raises(RuntimeError, match="the client is closed"):
        await client.submit(NewTask("remind"))


async def _failure_of_a_submission(client: Client) -> DuecourseError:
    with pytest.raises(DuecourseError) as raised:
        await client.submit(NewTask("remind"))
    return raised.value


async def test_one_lost_answer_leaves_the_outcome_open_whatever_follows(client: Client, node: ScriptedNode) -> None:
    node.script("SubmitTask", Status(UNAVAILABLE), *[Status(UNAVAILABLE, "STORE_UNAVAILABLE")] * 99)
    with pytest.raises(OutcomeUncertain) as raised:
        await client.submit(NewTask("remind"))
    assert raised.value.reason == "STORE_UNAVAILABLE"


async def test_refusals_by_the_store_say_that_nothing_was_done(client: Client, node: ScriptedNode) -> None:
    node.script("SubmitTask", *[Status(UNAVAILABLE, "STORE_UNAVAILABLE")] * 99)
    with pytest.raises(Unavailable):
        await client.submit(NewTask("remind"))
    assert len(node.requests) > 5


async def test_a_node_that_is_not_there_is_unavailable_and_nothing_was_done() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(Unavailable, match="refused"):
            await client.submit(NewTask("remind"), timeout=timedelta(seconds=2))


async def test_a_read_whose_connection_broke_is_unavailable(client: Client, node: ScriptedNode) -> None:
    node.script("GetTask", *[Status(UNAVAILABLE)] * 99)
    with pytest.raises(Unavailable) as raised:
        await client.get("t1")
    assert raised.value.task_id == "t1"


async def test_the_next_node_is_asked_when_one_does_not_serve(node: ScriptedNode) -> None:
    async with Client(["127.0.0.1:1", node.address]) as client:
        await client.get("t1")
        await client.get("t2")
    assert [request.task_id for request in node.requests] == ["t1", "t2"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (Status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", field="task.queue"), InvalidArgument),
        (Status(grpc.StatusCode.INVALID_ARGUMENT, "RUN_AT_OUT_OF_RANGE", field="task.run_at"), InvalidArgument),
        (Status(grpc.StatusCode.INVALID_ARGUMENT), InvalidArgument),
        (Status(grpc.StatusCode.NOT_FOUND, "TASK_NOT_FOUND"), TaskNotFound),
        (Status(grpc.StatusCode.ALREADY_EXISTS, "TASK_EXISTS"), TaskExists),
        (Status(grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED"), RequestIdReused),
        (Status(grpc.StatusCode.ABORTED, "REVISION_MISMATCH"), RevisionMismatch),
        (Status(grpc.StatusCode.FAILED_PRECONDITION, "A_REASON_OF_TOMORROW"), Refused),
        (Status(grpc.StatusCode.PERMISSION_DENIED), NotPermitted),
        (Status(grpc.StatusCode.UNAUTHENTICATED), NotPermitted),
        (Status(grpc.StatusCode.INTERNAL, "INVARIANT_VIOLATED", metadata=(("error_id", "e1"),)), ServerFault),
        (Status(grpc.StatusCode.DATA_LOSS, "RECORD_CORRUPT"), ServerFault),
        (Status(grpc.StatusCode.UNIMPLEMENTED), ServerFault),
    ],
)
async def test_a_status_that_no_retry_mends_is_raised_at_once(
    client: Client, node: ScriptedNode, status: Status, kind: type[DuecourseError]
) -> None:
    node.script("SubmitTask", status)
    with pytest.raises(DuecourseError) as raised:
        await client.submit(NewTask("remind"))
    assert type(raised.value) is kind
    assert (raised.value.reason, raised.value.field) == (status.reason, status.field.removeprefix("task."))
    assert dict(raised.value.metadata) == dict(status.metadata)
    assert len(node.requests) == 1


async def test_a_retried_cancellation_keeps_its_request_id(client: Client, node: ScriptedNode) -> None:
    node.script("CancelTask", Status(UNAVAILABLE))
    cancellation = await client.cancel("t1", expected_revision=0, wait=timedelta(0))
    first, second = node.requests
    assert first == second
    assert first.request_id
    assert first.HasField("expected_revision")
    assert first.HasField("wait")
    assert cancellation.result is CancelResult.PREVENTED
    assert cancellation.state is TaskState.CANCELLED


async def test_two_cancellations_have_two_request_ids(client: Client, node: ScriptedNode) -> None:
    await client.cancel("t1")
    await client.cancel("t1")
    assert node.requests[0].request_id != node.requests[1].request_id


async def test_a_list_goes_through_all_pages_also_empty_ones(client: Client, node: ScriptedNode) -> None:
    node.script(
        "ListTasks",
        task_service_pb2.ListTasksResponse(tasks=[a_task("a")], next_page_token="1"),
        task_service_pb2.ListTasksResponse(next_page_token="2"),
        task_service_pb2.ListTasksResponse(tasks=[a_task("b")]),
    )
    wanted = TaskFilter(
        queue="mail",
        states=frozenset({TaskState.FAILED, TaskState.CANCELLED}),
        run_at_before=datetime(2030, 1, 1, tzinfo=UTC),
    )
    assert [task.task_id async for task in client.list(wanted, page_size=7)] == ["a", "b"]
    assert [request.page_token for request in node.requests] == ["", "1", "2"]
    for request in node.requests:
        assert (request.queue, request.page_size) == ("mail", 7)
        assert set(request.states) == {task_pb2.TASK_STATE_FAILED, task_pb2.TASK_STATE_CANCELLED}
        assert request.HasField("run_at_before")
        assert not request.HasField("run_at_from")


async def test_the_cluster_is_described(client: Client) -> None:
    cluster = await client.cluster()
    assert cluster.coordination == "solo"
    assert [node.node_id for node in cluster.nodes] == ["node-1"]
    [shard] = cluster.shards
    assert (shard.state, shard.leader, shard.epoch) == (ShardState.LED, "node-1", 3)


async def test_the_namespace_goes_with_every_call(node: ScriptedNode) -> None:
    async with Client(node.address, namespace="billing") as client:
        await client.submit(NewTask("remind"))
        await client.submit_many([NewTask("remind")])
        await client.get("t1")
        await client.list_page()
        await client.cancel("t1")
    assert {request.namespace for request in node.requests} == {"billing"}
    assert len(node.requests) == 5
