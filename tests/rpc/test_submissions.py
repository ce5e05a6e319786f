"""What may be submitted and what may not: each refusal names the field, and nothing of it reaches the node."""

import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc import aio
from rpc.edge import NOW, Edge, told

from duecourse.model import bounds
from duecourse.server.core.errors import OutcomeUncertain
from duecourse.server.core.task import DEFAULT_POLICY, TaskKey
from duecourse.v1 import task_pb2, task_service_pb2

Change = Callable[[task_pb2.NewTask], object]
FAR = (NOW + bounds.MAX_DELAY) // bounds.SECOND


def a_new_task(task_id: str = "t") -> task_pb2.NewTask:
    return task_pb2.NewTask(task_id=task_id, task_type="send", now=task_pb2.Now())


def with_time(field: str, seconds: int = 0, nanos: int = 0) -> Change:
    def change(task: task_pb2.NewTask) -> None:
        getattr(task, field).seconds = seconds
        getattr(task, field).nanos = nanos

    return change


def with_retries(**fields: object) -> Change:
    def change(task: task_pb2.NewTask) -> None:
        for name, value in fields.items():
            if isinstance(value, tuple):
                getattr(task.retry_policy, name).seconds, getattr(task.retry_policy, name).nanos = value
            else:
                setattr(task.retry_policy, name, value)

    return change


def with_fields(**fields: object) -> Change:
    def change(task: task_pb2.NewTask) -> None:
        for name, value in fields.items():
            setattr(task, name, value)

    return change


def with_map(field: str, entries: dict[str, str]) -> Change:
    return lambda task: getattr(task, field).update(entries)


def with_deadline(field: str, seconds_after_run_at: float) -> Change:
    def change(task: task_pb2.NewTask) -> None:
        task.run_at.FromMicroseconds(NOW)
        getattr(task, field).FromMicroseconds(NOW + int(seconds_after_run_at * bounds.SECOND))

    return change


BAD_NAMES = [
    "\0",
    "..",
    ".",
    "🙂",
    "a b",
    "x" * 256,
    "x" * 1_000_000,
    "a\n",
    "DROP TABLE tasks;--",
    "../../etc/passwd\0",
]
REFUSED: list[tuple[str, Change]] = [
    *[("task.task_id", with_fields(task_id=name)) for name in BAD_NAMES],
    *[("task.queue", with_fields(queue=name)) for name in BAD_NAMES],
    *[("task.task_type", with_fields(task_type=name)) for name in ["", *BAD_NAMES]],
    *[("task.fairness_key", with_fields(fairness_key=name)) for name in BAD_NAMES],
    *[("task.priority", with_fields(priority=number)) for number in (-11, 11, 2**31 - 1, -(2**31))],
    ("task.payload", with_fields(payload=b"x" * (bounds.MAX_PAYLOAD_BYTES + 1))),
    ("task.payload", with_fields(payload=b"x" * bounds.MAX_REQUEST_BYTES)),
    ("task.payload", with_fields(payload=b"x" * (bounds.MAX_REQUEST_BYTES + 1))),
    *[("task.content_type", with_fields(content_type=text)) for text in ("x" * 256, "a\nb", "ü", "\0", "\x7f")],
    ("task.headers", with_map("headers", {f"k{n}": "v" for n in range(65)})),
    ("task.headers", with_map("headers", {"": "v"})),
    ("task.headers", with_map("headers", {"k" * 256: "v"})),
    ("task.headers", with_map("headers", {"ü" * 128: "v"})),
    ("task.headers", with_map("headers", {"k": "v" * bounds.MAX_HEADERS_BYTES})),
    ("task.headers", with_map("headers", {"k": "a\0b"})),
    ("task.headers", with_map("headers", {"a\0b": "v"})),
    ("task.labels", with_map("labels", {f"k{n}": "v" for n in range(33)})),
    *[("task.labels", with_map("labels", {name: "v"})) for name in ["", *BAD_NAMES[:8]]],
    *[("task.labels", with_map("labels", {"k": name})) for name in BAD_NAMES[:8]],
    ("task.when", lambda task: task.ClearField("now")),
    *[("task.run_at", with_time("run_at", seconds)) for seconds in (-1, -(2**62), -62_135_596_800)],
    *[("task.run_at", with_time("run_at", seconds)) for seconds in (FAR + 1, 253_402_300_799, 253_402_300_800, 2**62)],
    *[("task.run_at", with_time("run_at", 1_800_000_000, nanos)) for nanos in (-1, 2_000_000_000, 1_000_000_000)],
    *[("task.delay", with_time("delay", *time)) for time in ((-1, 0), (0, -1), (1, -1), (-1, 1), (0, 2_000_000_000))],
    *[("task.delay", with_time("delay", seconds)) for seconds in (bounds.MAX_DELAY // bounds.SECOND + 1, 2**62)],
    *[
        ("task.attempt_timeout", with_time("attempt_timeout", *time))
        for time in ((0, 0), (0, 99_999_999), (86_400, 1), (86_401, 0), (-1, 0), (2**62, 0), (1, -1), (-1, 1))
    ],
    *[("task.retry_policy.max_attempts", with_retries(max_attempts=number)) for number in (0, -1, 1_001, 2**31 - 1)],
    *[
        ("task.retry_policy.initial_backoff", with_retries(initial_backoff=time))
        for time in ((0, 0), (0, 1), (-1, 0), (86_401, 0), (2**62, 0), (1, -1))
    ],
    *[
        ("task.retry_policy.multiplier", with_retries(multiplier=number))
        for number in (0.0, 0.99, 100.1, -1.0, 1e308, math.nan, math.inf, -math.inf)
    ],
    *[
        ("task.retry_policy.max_backoff", with_retries(max_backoff=time))
        for time in ((0, 0), (0, 999_999), (0, 999_999_999), (-1, 0), (86_401, 0), (1, -1))
    ],
    ("task.retry_policy.max_backoff", with_retries(initial_backoff=(10, 0), max_backoff=(9, 0))),
    *[("task.retry_policy.jitter", with_retries(jitter=number)) for number in (-0.1, 1.1, math.nan, math.inf)],
    *[
        (f"task.{field}", with_deadline(field, after))
        for field in ("start_deadline", "completion_deadline")
        for after in (0, -1, -1_800_000_001)
    ],
    ("task.start_deadline", with_time("start_deadline", 253_402_300_800)),
    ("task.start_deadline", with_time("start_deadline", 2**62)),
    ("task.completion_deadline", with_time("completion_deadline", 0, -1)),
    *[("task.on_lost_attempt", with_fields(on_lost_attempt=number)) for number in (3, -1, 2**31 - 1)],
]


@pytest.mark.parametrize(("field", "change"), REFUSED)
async def test_what_is_malformed_or_out_of_bounds_is_refused_by_name(edge: Edge, field: str, change: Change) -> None:
    task = a_new_task()
    change(task)
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.SubmitTask(task_service_pb2.SubmitTaskRequest(task=task))
    found = told(caught.value)
    assert found.code is grpc.StatusCode.INVALID_ARGUMENT
    assert found.field == field
    assert found.retry_after is None
    assert len(found.message) < 300
    is_far = field in ("task.run_at", "task.delay") and found.reason == "RUN_AT_OUT_OF_RANGE"
    assert is_far or found.reason == "INVALID_FIELD"
    assert edge.commands.stored == {}
    assert edge.metrics.tasks_refused == 1


@pytest.mark.parametrize("seconds", [FAR + 1, 253_402_300_799, 253_402_300_800, 2**62])
async def test_an_instant_that_is_too_far_has_a_reason_of_its_own(edge: Edge, seconds: int) -> None:
    task = a_new_task()
    task.run_at.seconds = seconds
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.SubmitTask(task_service_pb2.SubmitTaskRequest(task=task))
    assert told(caught.value).reason == "RUN_AT_OUT_OF_RANGE"


ACCEPTED: list[Change] = [
    with_fields(task_id="x" * 255),
    with_fields(task_id="AZaz09._:/@+=,-"),
    with_fields(payload=b""),
    with_fields(payload=b"x" * bounds.MAX_PAYLOAD_BYTES),
    with_fields(priority=-10),
    with_fields(priority=10),
    with_fields(content_type="x" * 255),
    with_map("headers", {f"k{n}": "v" for n in range(64)}),
    with_map("headers", {"k" * 255: "ü" * 8_000}),
    with_map("labels", {f"k{n}": "" for n in range(32)}),
    with_time("run_at", 0),
    with_time("run_at", 1),
    with_time("run_at", FAR),
    with_time("run_at", 1_700_000_000, 999_999_999),
    with_time("delay", 0),
    with_time("delay", bounds.MAX_DELAY // bounds.SECOND),
    with_time("attempt_timeout", 0, 100_000_000),
    with_time("attempt_timeout", 86_400),
    with_retries(max_attempts=1),
    with_retries(max_attempts=1_000),
    with_retries(initial_backoff=(0, 1_000_000), max_backoff=(0, 1_000_000)),
    with_retries(initial_backoff=(86_400, 0)),
    with_retries(multiplier=1.0, jitter=0.0),
    with_retries(multiplier=100.0, jitter=1.0),
    with_deadline("start_deadline", 0.000001),
    with_deadline("completion_deadline", 1),
    with_fields(on_lost_attempt=task_pb2.ON_LOST_ATTEMPT_FAIL),
]


@pytest.mark.parametrize("change", ACCEPTED)
async def test_what_is_within_bounds_is_accepted_and_repeats_as_the_same_request(edge: Edge, change: Change) -> None:
    task = a_new_task()
    change(task)
    request = task_service_pb2.SubmitTaskRequest(task=task)
    first = await edge.tasks.SubmitTask(request)
    again = await edge.tasks.SubmitTask(request)
    assert first.submitted.task_id == task.task_id
    assert first.submitted.created
    assert not again.submitted.created
    assert first.submitted.uid == again.submitted.uid


async def test_a_plain_task_gets_every_default(edge: Edge) -> None:
    response = await edge.tasks.SubmitTask(task_service_pb2.SubmitTaskRequest(task=a_new_task()))
    (submission,) = edge.commands.stored.values()
    assert submission.lane == ("default", "default", "send", 0, "")
    assert submission.policy is DEFAULT_POLICY
    assert (submission.run_at, submission.delay) == (None, 0)
    assert (submission.payload, submission.content_type) == (b"", "")
    assert (submission.headers, submission.labels) == ({}, {})
    assert submission.shard == edge.node.port.shard_of("default", "t")
    assert len(submission.uid) == 16
    assert submission.uid == response.submitted.uid


async def test_everything_that_was_submitted_arrives(edge: Edge) -> None:
    task = a_new_task()
    task.queue = "mail"
    task.payload = bytes(range(256))
    task.content_type = "application/octet-stream"
    task.headers["traceparent"] = "00-1"
    task.headers["ключ"] = "значение"
    task.run_at.FromMicroseconds(NOW + 5)
    task.priority = -3
    task.fairness_key = "tenant"
    task.retry_policy.max_attempts = 7
    task.retry_policy.initial_backoff.FromMicroseconds(2_500)
    task.attempt_timeout.FromMicroseconds(bounds.SECOND)
    task.start_deadline.FromMicroseconds(NOW + 6)
    task.completion_deadline.FromMicroseconds(NOW + 7)
    task.on_lost_attempt = task_pb2.ON_LOST_ATTEMPT_FAIL
    task.labels["team"] = "a"
    await edge.tasks.SubmitTask(task_service_pb2.SubmitTaskRequest(namespace="shop", task=task))
    submission = edge.commands.stored[TaskKey("shop", "t")]
    assert submission.lane == ("shop", "mail", "send", -3, "tenant")
    assert submission.payload == bytes(range(256))
    assert submission.headers == {"traceparent": "00-1", "ключ": "значение"}
    assert submission.labels == {"team": "a"}
    assert (submission.run_at, submission.delay) == (NOW + 5, 0)
    policy = submission.policy
    assert (policy.max_attempts, policy.initial_backoff, policy.max_backoff) == (7, 2_500, bounds.DEFAULT_MAX_BACKOFF)
    assert (policy.attempt_timeout, policy.fail_when_lost) == (bounds.SECOND, True)
    assert (policy.start_deadline, policy.completion_deadline) == (NOW + 6, NOW + 7)


async def test_a_delay_stays_a_delay_until_its_acceptance(edge: Edge) -> None:
    task = a_new_task()
    task.delay.FromMicroseconds(1_500_000)
    await edge.tasks.SubmitTask(task_service_pb2.SubmitTaskRequest(task=task))
    (submission,) = edge.commands.stored.values()
    assert (submission.run_at, submission.delay) == (None, 1_500_000)


async def test_a_task_without_an_id_gets_one_and_is_a_new_task_each_time(edge: Edge) -> None:
    request = task_service_pb2.SubmitTaskRequest(task=a_new_task(""))
    first = (await edge.tasks.SubmitTask(request)).submitted
    second = (await edge.tasks.SubmitTask(request)).submitted
    assert first.created
    assert second.created
    assert first.task_id != second.task_id


async def test_trace_headers_do_not_make_another_request_but_other_headers_do(edge: Edge) -> None:
    task = a_new_task()
    task.headers["traceparent"] = "00-1"
    await edge.tasks.SubmitTask(task_service_pb2.SubmitTaskRequest(task=task))
    task.headers["traceparent"] = "00-2"
    task.headers["tracestate"] = "x"
    assert not (await edge.tasks.SubmitTask(task_service_pb2.SubmitTaskRequest(task=task))).submitted.created
    assert not (await edge.tasks.SubmitTask(task_service_pb2.SubmitTaskRequest(task=a_new_task()))).submitted.created
    task.headers["other"] = "x"
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.SubmitTask(task_service_pb2.SubmitTaskRequest(task=task))
    assert told(caught.value).reason == "TASK_EXISTS"


@pytest.mark.parametrize("name", BAD_NAMES[:8])
async def test_a_bad_namespace_refuses_the_call(edge: Edge, name: str) -> None:
    calls: list[Awaitable[Any]] = [
        edge.tasks.SubmitTask(task_service_pb2.SubmitTaskRequest(namespace=name, task=a_new_task())),
        edge.tasks.SubmitTasks(task_service_pb2.SubmitTasksRequest(namespace=name, tasks=[a_new_task()])),
        edge.tasks.GetTask(task_service_pb2.GetTaskRequest(namespace=name, task_id="t")),
        edge.tasks.ListTasks(task_service_pb2.ListTasksRequest(namespace=name)),
        edge.tasks.CancelTask(task_service_pb2.CancelTaskRequest(namespace=name, task_id="t")),
    ]
    for call in calls:
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        assert told(caught.value).field == "namespace"


async def test_a_submission_without_a_task_is_refused(edge: Edge) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.SubmitTask(task_service_pb2.SubmitTaskRequest())
    assert told(caught.value).field == "task"


# Batches.


async def test_a_bad_item_is_refused_alone(edge: Edge) -> None:
    tasks = [a_new_task(f"t{n}") for n in range(1_000)]
    tasks[500].priority = 99
    response = await edge.tasks.SubmitTasks(task_service_pb2.SubmitTasksRequest(tasks=tasks))
    assert len(response.results) == 1_000
    assert len(edge.commands.stored) == 999
    error = response.results[500].error
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert error.field == "tasks[500].priority"
    assert [result.submitted.task_id for result in response.results][499:502] == ["t499", "", "t501"]


async def test_a_batch_of_bad_items_alone_asks_nothing_of_the_node(edge: Edge) -> None:
    response = await edge.tasks.SubmitTasks(task_service_pb2.SubmitTasksRequest(tasks=[task_pb2.NewTask()]))
    assert response.results[0].error.field == "tasks[0].task_type"
    assert edge.commands.stored == {}


async def test_an_item_above_the_bounds_gets_its_own_error(edge: Edge) -> None:
    big = a_new_task("big")
    big.payload = b"x" * (bounds.MAX_PAYLOAD_BYTES + 1)
    request = task_service_pb2.SubmitTasksRequest(tasks=[a_new_task(), big])
    response = await edge.tasks.SubmitTasks(request)
    assert response.results[0].submitted.created
    assert response.results[1].error.field == "tasks[1].payload"


async def test_an_id_that_occurs_twice_is_submitted_twice(edge: Edge) -> None:
    request = task_service_pb2.SubmitTasksRequest(tasks=[a_new_task(), a_new_task()])
    response = await edge.tasks.SubmitTasks(request)
    assert [result.submitted.created for result in response.results] == [True, False]


@pytest.mark.parametrize("count", [0, 1_001, 10_000])
async def test_a_batch_of_none_or_too_many_is_refused(edge: Edge, count: int) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.SubmitTasks(task_service_pb2.SubmitTasksRequest(tasks=[a_new_task()] * count))
    found = told(caught.value)
    assert (found.code, found.field) == (grpc.StatusCode.INVALID_ARGUMENT, "tasks")
    assert edge.commands.stored == {}


async def test_a_request_above_its_bound_is_refused_by_us_and_not_by_the_transport(edge: Edge) -> None:
    task = a_new_task()
    task.payload = b"x" * bounds.MAX_PAYLOAD_BYTES
    with pytest.raises(aio.AioRpcError) as caught:
        await edge.tasks.SubmitTasks(task_service_pb2.SubmitTasksRequest(tasks=[task] * 9))
    found = told(caught.value)
    assert (found.code, found.field) == (grpc.StatusCode.INVALID_ARGUMENT, "tasks")
    assert edge.commands.stored == {}
    response = await edge.tasks.SubmitTasks(task_service_pb2.SubmitTasksRequest(tasks=[task] * 7))
    assert len(response.results) == 7


async def test_what_the_node_answers_comes_back_in_the_order_of_the_request(edge: Edge) -> None:
    edge.commands.answers = {"b": OutcomeUncertain()}
    request = task_service_pb2.SubmitTasksRequest(tasks=[a_new_task("a"), a_new_task("b"), a_new_task("c")])
    response = await edge.tasks.SubmitTasks(request)
    assert [result.WhichOneof("result") for result in response.results] == ["submitted", "error", "submitted"]
