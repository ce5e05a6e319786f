"""Parsing is total: whatever decodes is accepted within bounds or refused by name; equal lanes are shared."""

import contextlib

from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rpc.edge import NOW

from duecourse.model import bounds
from duecourse.server.core.errors import InvalidField
from duecourse.server.core.task import DEFAULT_POLICY, ShardId, Submission
from duecourse.server.rpc import convert
from duecourse.v1 import task_pb2, task_service_pb2

_numbers = st.one_of(st.integers(-2, 2), st.integers(-(2**63), 2**63 - 1))
_nanos = st.one_of(st.integers(-2, 2), st.integers(-(2**31), 2**31 - 1))


def submissions() -> convert.Submissions:
    return convert.Submissions(lambda slot: ShardId(0))


def a_new_task() -> task_pb2.NewTask:
    return task_pb2.NewTask(task_id="t", task_type="send", now=task_pb2.Now())


def is_within_bounds(one: Submission) -> bool:
    policy = one.policy
    return (
        0 <= one.delay <= bounds.MAX_DELAY
        and (one.run_at is None or 0 <= one.run_at <= NOW + bounds.MAX_DELAY + bounds.SECOND)
        and bounds.MIN_ATTEMPT_TIMEOUT <= policy.attempt_timeout <= bounds.MAX_ATTEMPT_TIMEOUT
        and bounds.MIN_BACKOFF <= policy.initial_backoff <= policy.max_backoff <= bounds.MAX_BACKOFF
        and 1 <= policy.max_attempts <= bounds.MAX_MAX_ATTEMPTS
        and 1 <= policy.multiplier <= bounds.MAX_BACKOFF_MULTIPLIER
        and 0 <= policy.jitter <= 1
    )


@settings(max_examples=500)
@given(seconds=_numbers, nanos=_nanos, field=st.sampled_from(["run_at", "delay", "attempt_timeout", "start_deadline"]))
def test_no_time_or_duration_raises_anything_but_its_refusal(seconds: int, nanos: int, field: str) -> None:
    task = a_new_task()
    getattr(task, field).seconds = seconds
    getattr(task, field).nanos = nanos
    with contextlib.suppress(InvalidField):
        assert is_within_bounds(submissions().one(task_service_pb2.SubmitTaskRequest(task=task), NOW))


@settings(max_examples=500)
@given(
    attempts=st.integers(-(2**31), 2**31 - 1),
    multiplier=st.floats(),
    jitter=st.floats(),
    first=st.tuples(_numbers, _nanos),
    longest=st.tuples(_numbers, _nanos),
)
def test_no_retry_policy_raises_anything_but_its_refusal(
    attempts: int, multiplier: float, jitter: float, first: tuple[int, int], longest: tuple[int, int]
) -> None:
    task = a_new_task()
    policy = task.retry_policy
    policy.max_attempts, policy.multiplier, policy.jitter = attempts, multiplier, jitter
    policy.initial_backoff.seconds, policy.initial_backoff.nanos = first
    policy.max_backoff.seconds, policy.max_backoff.nanos = longest
    with contextlib.suppress(InvalidField):
        assert is_within_bounds(submissions().one(task_service_pb2.SubmitTaskRequest(task=task), NOW))


@settings(max_examples=500)
@given(st.binary(max_size=300))
@example(b"\x12\x00")
def test_no_bytes_raise_anything_but_a_refusal(data: bytes) -> None:
    request = task_service_pb2.SubmitTasksRequest()
    try:
        request.ParseFromString(data)
    except DecodeError:
        return
    with contextlib.suppress(InvalidField):
        for one in submissions().batch(request, NOW):
            assert isinstance(one, InvalidField) or (isinstance(one, Submission) and is_within_bounds(one))


@settings(max_examples=200)
@given(st.text(max_size=10), st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=4), st.binary())
def test_equal_requests_have_equal_fingerprints_and_different_ones_do_not(
    text: str, headers: dict[str, str], payload: bytes
) -> None:
    def fingerprint(task: task_pb2.NewTask) -> bytes | None:
        try:
            return submissions().one(task_service_pb2.SubmitTaskRequest(task=task), NOW).fingerprint
        except InvalidField:
            return None

    task = a_new_task()
    task.payload = payload
    task.headers.update(headers)
    other = task_pb2.NewTask()
    for key, value in reversed(headers.items()):
        other.headers[key] = value
    other.MergeFrom(task)
    first = fingerprint(task)
    assert first == fingerprint(other)
    changed = a_new_task()
    changed.payload = payload + b"!"
    changed.headers.update(headers)
    assert first is None or first != fingerprint(changed)


def test_lanes_and_policies_are_shared_by_equal_tasks() -> None:
    parser = submissions()
    request = task_service_pb2.SubmitTasksRequest()
    for number in range(3):
        task = request.tasks.add()
        task.CopyFrom(a_new_task())
        task.task_id = f"t{number}"
        task.retry_policy.max_attempts = 7 if number else 5
    default, one, other = parser.batch(request, NOW)
    assert isinstance(default, Submission)
    assert isinstance(one, Submission)
    assert isinstance(other, Submission)
    assert default.policy is DEFAULT_POLICY
    assert one.lane is other.lane is default.lane
    assert one.policy is other.policy is not DEFAULT_POLICY


def test_what_is_remembered_of_lanes_and_policies_is_bounded() -> None:
    parser = submissions()
    for number in range(convert.KNOWN_LANES + 10):
        task = a_new_task()
        task.queue = f"q{number}"
        task.retry_policy.initial_backoff.nanos = (number + 1_000) * 1_000
        parser.one(task_service_pb2.SubmitTaskRequest(task=task), NOW)
    assert len(parser._lanes) <= convert.KNOWN_LANES
    assert len(parser._policies) <= convert.KNOWN_POLICIES
