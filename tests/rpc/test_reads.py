"""Reading tasks and the cluster: views, pages, tokens."""

import base64
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from grpc import aio
from rpc.edge import NOW, Edge, a_stored_task, told

from duecourse.model import bounds
from duecourse.server.core.task import Policy, ShardId, TaskKey, TaskState
from duecourse.server.rpc import page_token
from duecourse.server.rpc.task_service import PAGE_BYTES
from duecourse.server.storage import CorruptRecord, TaskQuery
from duecourse.v1 import cluster_service_pb2, task_pb2, task_service_pb2


async def test_the_full_view_has_everything(edge: Edge) -> None:
    edge.store.put(a_stored_task(policy=Policy(max_attempts=3, start_deadline=NOW + 9, fail_when_lost=True)))
    request = task_service_pb2.GetTaskRequest(task_id="t1", view=task_pb2.TASK_VIEW_FULL)
    task = (await edge.tasks.GetTask(request)).task
    assert (task.namespace, task.task_id, task.queue, task.task_type) == ("default", "t1", "mail", "send")
    assert (task.uid, task.payload, task.content_type) == (b"u" * 16, b"payload", "text/plain")
    assert (dict(task.headers), dict(task.labels)) == ({"k": "v"}, {"team": "a"})
    assert (task.priority, task.fairness_key) == (-2, "tenant")
    assert task.run_at.ToMicroseconds() == NOW + 1_500
    assert task.create_time.ToMicroseconds() == NOW
    assert task.due_time.ToMicroseconds() == NOW + 3
    assert not task.HasField("end_time")
    assert task.retry_policy.max_attempts == 3
    assert task.retry_policy.initial_backoff.ToMicroseconds() == bounds.DEFAULT_INITIAL_BACKOFF
    assert task.retry_policy.max_backoff.ToMicroseconds() == bounds.DEFAULT_MAX_BACKOFF
    assert (task.retry_policy.multiplier, task.retry_policy.jitter) == (2.0, 0.2)
    assert task.attempt_timeout.ToMicroseconds() == bounds.DEFAULT_ATTEMPT_TIMEOUT
    assert task.start_deadline.ToMicroseconds() == NOW + 9
    assert not task.HasField("completion_deadline")
    assert task.on_lost_attempt == task_pb2.ON_LOST_ATTEMPT_FAIL
    assert (task.state, task.failure_reason) == (task_pb2.TASK_STATE_LEASED, task_pb2.FAILURE_REASON_UNSPECIFIED)
    assert (task.revision, task.round, task.attempt_count, task.cancel_requested) == (5, 1, 2, False)
    assert (task.result, task.result_content_type) == (b"result", "text/html")
    first, second = task.attempts
    assert (first.number, first.worker, first.node, first.shard, first.epoch) == (1, "w", "n1", 1, 6)
    assert first.outcome == task_pb2.ATTEMPT_OUTCOME_FAILED
    assert (first.failure.type, first.failure.message) == ("ValueError", "no")
    assert first.end_time.ToMicroseconds() == NOW + 2
    assert (first.progress, second.progress) == ("half", "")
    assert second.outcome == task_pb2.ATTEMPT_OUTCOME_UNSPECIFIED
    assert not second.HasField("start_time")
    assert not second.HasField("failure")


@pytest.mark.parametrize("view", [task_pb2.TASK_VIEW_UNSPECIFIED, task_pb2.TASK_VIEW_BASIC])
async def test_the_basic_view_leaves_out_what_can_be_large(edge: Edge, view: task_pb2.TaskView.ValueType) -> None:
    edge.store.put(a_stored_task())
    task = (await edge.tasks.GetTask(task_service_pb2.GetTaskRequest(task_id="t1", view=view))).task
    assert (task.payload, task.result, len(task.attempts)) == (b"", b"", 0)
    assert (task.content_type, task.result_content_type) == ("text/plain", "text/html")


async def test_an_unknown_task_is_not_found(edge: Edge) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.GetTask(task_service_pb2.GetTaskRequest(task_id="../../../etc/passwd"))
    found = told(caught.value)
    assert (found.code, found.reason) == (grpc.StatusCode.NOT_FOUND, "TASK_NOT_FOUND")


async def test_a_task_of_another_namespace_is_not_found(edge: Edge) -> None:
    edge.store.put(a_stored_task())
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.GetTask(task_service_pb2.GetTaskRequest(namespace="other", task_id="t1"))
    assert told(caught.value).reason == "TASK_NOT_FOUND"


@pytest.mark.parametrize("task_id", ["", "'; DROP TABLE tasks; --", "a\0b", "..", "x" * 256])
async def test_what_cannot_be_an_id_is_refused_by_name(edge: Edge, task_id: str) -> None:
    calls: list[Awaitable[Any]] = [
        edge.tasks.GetTask(task_service_pb2.GetTaskRequest(task_id=task_id)),
        edge.tasks.CancelTask(task_service_pb2.CancelTaskRequest(task_id=task_id)),
    ]
    for call in calls:
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        assert told(caught.value).field == "task_id"


async def test_an_unknown_view_is_refused(edge: Edge) -> None:
    request = task_service_pb2.GetTaskRequest(task_id="t1")
    request.MergeFromString(b"\x18\x63")
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.GetTask(request)
    assert told(caught.value).field == "view"


# Pages.


async def test_pages_follow_each_other_to_the_end(edge: Edge) -> None:
    names = [f"t{n:02}" for n in range(25)]
    for name in names:
        edge.store.put(a_stored_task(name))
    seen: list[str] = []
    request = task_service_pb2.ListTasksRequest(page_size=10)
    while True:
        response = await edge.tasks.ListTasks(request)
        seen += [task.task_id for task in response.tasks]
        if not response.next_page_token:
            break
        request.page_token = response.next_page_token
    assert seen == names


async def test_a_page_is_cut_before_it_gets_larger_than_a_client_takes(edge: Edge) -> None:
    names = [f"t{n:03}" for n in range(600)]
    for name in names:
        edge.store.put(a_stored_task(name, headers=60))
    seen: list[str] = []
    request = task_service_pb2.ListTasksRequest(page_size=1_000)
    pages = 0
    while True:
        response = await edge.tasks.ListTasks(request)
        assert response.ByteSize() < PAGE_BYTES + 64 * 1024
        seen += [task.task_id for task in response.tasks]
        pages += 1
        if not response.next_page_token:
            break
        request.page_token = response.next_page_token
    assert seen == names
    assert pages > 1


async def test_a_record_that_does_not_decode_is_listed_and_not_hidden(edge: Edge) -> None:
    for name in ("t1", "t3"):
        edge.store.put(a_stored_task(name))
    key = TaskKey("default", "t2")
    edge.store.tasks[key] = CorruptRecord(ShardId(0), key, 3, "secret")
    response = await edge.tasks.ListTasks(task_service_pb2.ListTasksRequest())
    assert [task.task_id for task in response.tasks] == ["t1", "t2", "t3"]
    assert response.tasks[1].state == task_pb2.TASK_STATE_FAILED
    assert response.tasks[1].failure_reason == task_pb2.FAILURE_REASON_RECORD_CORRUPT
    assert "secret" not in repr(response)


async def test_filters_reach_the_store(edge: Edge) -> None:
    request = task_service_pb2.ListTasksRequest(
        namespace="shop", queue="mail", states=[task_pb2.TASK_STATE_PENDING, task_pb2.TASK_STATE_FAILED]
    )
    request.run_at_from.FromMicroseconds(NOW)
    request.run_at_before.FromMicroseconds(NOW + 5)
    await edge.tasks.ListTasks(request)
    await edge.tasks.ListTasks(task_service_pb2.ListTasksRequest())
    states = frozenset((TaskState.PENDING, TaskState.FAILED))
    assert edge.store.queries == [
        (TaskQuery("shop", "mail", states, NOW, NOW + 5), "", bounds.DEFAULT_PAGE),
        (TaskQuery("default", None, frozenset(), None, None), "", bounds.DEFAULT_PAGE),
    ]


def a_list_request(field: str, value: object) -> task_service_pb2.ListTasksRequest:
    request = task_service_pb2.ListTasksRequest()
    if field == "states":
        request.states.append(value)  # type: ignore[arg-type]
    elif field.startswith("run_at"):
        getattr(request, field).seconds = value
    else:
        setattr(request, field, value)
    return request


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("page_size", -1, "page_size"),
        ("page_size", 1_001, "page_size"),
        ("page_size", 2**31 - 1, "page_size"),
        ("queue", "a b", "queue"),
        ("queue", "x" * 256, "queue"),
        ("states", 0, "states[0]"),
        ("states", 8, "states[0]"),
        ("states", -1, "states[0]"),
        ("run_at_from", -1, "run_at_from"),
        ("run_at_before", 2**62, "run_at_before"),
    ],
)
async def test_a_listing_that_cannot_be_is_refused_by_name(edge: Edge, field: str, value: object, named: str) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.ListTasks(a_list_request(field, value))
    found = told(caught.value)
    assert (found.code, found.field) == (grpc.StatusCode.INVALID_ARGUMENT, named)


QUERY = TaskQuery("default", None, frozenset(), None, None)
TOKEN = page_token.make(QUERY, "t05")


@pytest.mark.parametrize(
    "token",
    [
        "x",
        "not base64 at all",
        "тест",
        "A" * 100_000,
        "....",
        base64.urlsafe_b64encode(b"t05").decode(),
        base64.urlsafe_b64encode(b"\x01" + b"\0" * 12 + b"t05").decode(),
        base64.urlsafe_b64encode(b"\x01" + b"\0" * 12 + b"\xff\xfe").decode(),
        TOKEN[:-1],
        TOKEN + "A",
        TOKEN[:4] + "A" + TOKEN[5:],
        page_token.make(QUERY, "t06")[:20] + TOKEN[20:],
    ],
)
async def test_a_forged_page_token_is_refused(edge: Edge, token: str) -> None:
    assert token != TOKEN
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.ListTasks(task_service_pb2.ListTasksRequest(page_token=token))
    found = told(caught.value)
    assert (found.code, found.field) == (grpc.StatusCode.INVALID_ARGUMENT, "page_token")
    assert edge.store.queries == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("namespace", "other"), ("queue", "mail"), ("states", task_pb2.TASK_STATE_PENDING), ("run_at_from", 5)],
)
async def test_a_page_token_of_another_listing_is_refused(edge: Edge, field: str, value: object) -> None:
    await edge.tasks.ListTasks(task_service_pb2.ListTasksRequest(page_token=TOKEN))
    request = a_list_request(field, value)
    request.page_token = TOKEN
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.ListTasks(request)
    assert told(caught.value).field == "page_token"


async def test_the_cluster_is_described(edge: Edge) -> None:
    response = await edge.cluster.GetCluster(cluster_service_pb2.GetClusterRequest())
    assert (response.coordination, response.answering_node, response.worker_streams) == ("solo", "n1", 2)
    (node,) = response.nodes
    assert (node.node_id, node.address, node.version) == ("n1", "localhost:7400", "0.1.0")
    led, unled = response.shards
    assert (led.shard, led.slot_from, led.slot_until, led.epoch) == (0, 0, 8_192, 7)
    assert (led.state, led.leader, led.tasks_in_memory, led.leases) == (cluster_service_pb2.SHARD_STATE_LED, "n1", 3, 2)
    assert unled.state == cluster_service_pb2.SHARD_STATE_UNLED
