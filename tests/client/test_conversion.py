"""What goes out is what was given, exactly; what comes in is what was sent, or a fault that says so."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services.scripted import a_task

from duecourse.client import (
    AttemptOutcome,
    FailureReason,
    InvalidArgument,
    NewTask,
    OnLostAttempt,
    RetryPolicy,
    ServerFault,
    TaskFilter,
    TaskState,
    answers,
    requests,
)
from duecourse.model import bounds
from duecourse.v1 import task_pb2

zones = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
instants = st.datetimes(datetime(1970, 1, 2), datetime(9990, 1, 1), timezones=zones)  # noqa: DTZ001
durations = st.timedeltas(timedelta(days=-4_000), timedelta(days=4_000))
texts = st.text(st.characters(codec="utf-8"), max_size=20)
maps = st.dictionaries(texts, texts, max_size=3)
policies = st.builds(
    RetryPolicy,
    max_attempts=st.none() | st.integers(-(2**31), 2**31 - 1),
    initial_backoff=st.none() | durations,
    multiplier=st.none() | st.floats(allow_nan=False),
    max_backoff=st.none() | durations,
    jitter=st.none() | st.floats(allow_nan=False),
)
new_tasks = st.builds(
    NewTask,
    task_type=texts,
    payload=st.binary(max_size=50),
    run_at=instants,
    queue=texts,
    task_id=texts,
    content_type=texts,
    headers=maps,
    priority=st.integers(-(2**31), 2**31 - 1),
    fairness_key=texts,
    retry_policy=policies,
    attempt_timeout=durations,
    start_deadline=st.none() | instants,
    completion_deadline=st.none() | instants,
    on_lost_attempt=st.sampled_from(OnLostAttempt),
    labels=maps,
)


def _write(task: NewTask) -> task_pb2.NewTask:
    message = task_pb2.NewTask()
    requests.write_task(message, task)
    return message


def _as_stored(sent: task_pb2.NewTask) -> task_pb2.Task:
    """Make a server's answer of a request, by way of the wire; both number their fields apart, so by name."""
    received = task_pb2.NewTask.FromString(sent.SerializeToString())
    stored = task_pb2.Task(state=task_pb2.TASK_STATE_PENDING)
    for field, value in received.ListFields():
        target = getattr(stored, field.name)
        if field.message_type is None:
            setattr(stored, field.name, value)
        elif field.message_type.GetOptions().map_entry:
            target.update(value)
        else:
            target.CopyFrom(value)
    return stored


@given(new_tasks)
def test_a_task_comes_back_as_it_was_submitted(task: NewTask) -> None:
    read = answers.task(_as_stored(_write(task)), full=True)
    names = [name for name in NewTask.__dataclass_fields__ if name not in ("_", "delay")]
    assert {name: getattr(read, name) for name in names} == {name: getattr(task, name) for name in names}


@given(instants)
def test_an_instant_keeps_its_microseconds_whatever_its_zone(instant: datetime) -> None:
    stored = _as_stored(_write(NewTask("remind", run_at=instant, on_lost_attempt=OnLostAttempt.RETRY)))
    assert answers.task(stored, full=False).run_at == instant


@given(durations)
def test_a_durations_parts_have_its_sign(duration: timedelta) -> None:
    message = _write(NewTask("remind", delay=duration)).delay
    assert message.seconds * message.nanos >= 0
    assert message.ToTimedelta() == duration


def test_what_is_zero_is_still_sent() -> None:
    assert _write(NewTask("remind", run_at=datetime(1970, 1, 1, tzinfo=UTC))).WhichOneof("when") == "run_at"
    assert _write(NewTask("remind", delay=timedelta(0))).WhichOneof("when") == "delay"
    assert _write(NewTask("remind", retry_policy=RetryPolicy(max_attempts=0))).retry_policy.HasField("max_attempts")


def test_a_task_without_a_time_is_due_now_and_says_so() -> None:
    assert _write(NewTask("remind")).WhichOneof("when") == "now"


def test_two_submissions_of_the_same_task_are_the_same_bytes() -> None:
    task = NewTask("remind", {"to": "ann"}, task_id="t1", queue="mail", priority=2)
    assert _write(task).SerializeToString() == _write(task).SerializeToString()


@pytest.mark.parametrize("name", ["run_at", "start_deadline", "completion_deadline"])
def test_a_naive_instant_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} has no time zone"):
        NewTask("remind", **{name: datetime(2030, 1, 1)})  # type: ignore[arg-type]  # noqa: DTZ001


@pytest.mark.parametrize("name", ["run_at_from", "run_at_before"])
def test_a_naive_instant_in_a_filter_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} has no time zone"):
        TaskFilter(**{name: datetime(2030, 1, 1)})  # type: ignore[arg-type]  # noqa: DTZ001


def test_a_task_has_one_time() -> None:
    with pytest.raises(ValueError, match="not both"):
        NewTask("remind", run_at=datetime(2030, 1, 1, tzinfo=UTC), delay=timedelta(1))


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**60), 2**60)
        | st.floats(allow_nan=False, allow_infinity=False)
        | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    )
)
def test_a_payload_that_is_not_bytes_is_json(payload: object) -> None:
    message = _write(NewTask("remind", payload))
    assert message.content_type == "application/json"
    assert json.loads(message.payload) == payload


@pytest.mark.parametrize("payload", [b"raw", bytearray(b"raw"), memoryview(b"raw")])
def test_bytes_go_as_they_are(payload: object) -> None:
    message = _write(NewTask("remind", payload))
    assert (message.payload, message.content_type) == (b"raw", "")


def test_a_content_type_that_is_given_wins() -> None:
    assert (
        _write(NewTask("remind", [1], content_type="application/vnd.x+json")).content_type == "application/vnd.x+json"
    )


@pytest.mark.parametrize(
    "task",
    [
        NewTask("remind", object()),
        NewTask("remind", float("nan")),
        NewTask("remind", "\ud800"),
        NewTask("remind", bytes(bounds.MAX_PAYLOAD_BYTES + 1)),
        NewTask("remind", "x" * bounds.MAX_PAYLOAD_BYTES),
        NewTask("\ud800"),
        NewTask(4711),  # type: ignore[arg-type]
        NewTask("remind", priority=2**31),
        NewTask("remind", labels={"a": 1}),  # type: ignore[dict-item]
        NewTask("remind", delay=5),  # type: ignore[arg-type]
        NewTask("remind", on_lost_attempt="perhaps"),  # type: ignore[arg-type]
        NewTask("remind", retry_policy=RetryPolicy(max_attempts=2**31)),
    ],
    ids=range(12),
)
def test_what_cannot_be_sent_is_an_invalid_argument(task: NewTask) -> None:
    with pytest.raises(InvalidArgument):
        _write(task)


def test_a_full_view_has_payload_result_and_attempts() -> None:
    message = a_task(
        payload=b"p",
        result=b"r",
        result_content_type="text/plain",
        failure_reason=task_pb2.FAILURE_REASON_NON_RETRYABLE,
        attempts=[
            task_pb2.Attempt(
                number=2,
                round=1,
                worker="w",
                outcome=task_pb2.ATTEMPT_OUTCOME_FAILED,
                failure=task_pb2.Failure(type="ValueError", message="no"),
            ),
            task_pb2.Attempt(number=3, progress="half"),
        ],
    )
    message.state = task_pb2.TASK_STATE_FAILED
    full, basic = answers.task(message, full=True), answers.task(message, full=False)
    assert full.attempts is not None
    failed, open_attempt = full.attempts
    assert (failed.number, failed.outcome, open_attempt.outcome) == (2, AttemptOutcome.FAILED, None)
    assert (failed.progress, open_attempt.progress) == ("", "half")
    assert failed.failure is not None
    assert (failed.failure.type, failed.failure.message) == ("ValueError", "no")
    assert (full.payload, full.result, full.result_content_type) == (b"p", b"r", "text/plain")
    assert (full.state, full.failure_reason) == (TaskState.FAILED, FailureReason.NON_RETRYABLE)
    assert (basic.payload, basic.result, basic.attempts) == (None, None, None)


def _with(task: task_pb2.Task, change: Any) -> task_pb2.Task:
    change(task)
    return task


@pytest.mark.parametrize(
    "change",
    [
        lambda task: setattr(task, "state", task_pb2.TASK_STATE_UNSPECIFIED),
        lambda task: setattr(task, "state", 99),
        lambda task: setattr(task, "failure_reason", 99),
        lambda task: setattr(task.run_at, "seconds", 2**62),
        lambda task: setattr(task.run_at, "seconds", -(2**62)),
        lambda task: setattr(task.attempt_timeout, "seconds", 2**62),
    ],
    ids=range(6),
)
def test_an_answer_that_makes_no_sense_is_the_servers_fault(change: Any) -> None:
    with pytest.raises(ServerFault):
        answers.task(_with(a_task(), change), full=True)


def test_importing_the_client_needs_no_server() -> None:
    script = (
        "import sys, duecourse.client; print([m for m in sys.modules if 'asyncpg' in m or 'duecourse.server' in m])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
