"""From the edge's values to the API's requests.

Instants keep their microseconds exactly. What cannot be sent is refused here as `InvalidArgument`, before anything is;
bounds that only the server can judge are left to it.
"""

import json
import operator
from datetime import UTC, datetime, timedelta
from typing import Final

import uuid_utils
from google.protobuf import duration_pb2, timestamp_pb2

from duecourse.client import errors, tasks
from duecourse.model import bounds
from duecourse.v1 import task_pb2, task_service_pb2

JSON: Final = "application/json"
MAX_TASKS_BYTES: Final = bounds.MAX_REQUEST_BYTES - 1024
"""How much the tasks of one request may take, so that namespace and framing fit beside them."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_uuid7 = uuid_utils.uuid7
_options = operator.attrgetter(
    "content_type",
    "headers",
    "priority",
    "fairness_key",
    "retry_policy",
    "attempt_timeout",
    "start_deadline",
    "completion_deadline",
    "on_lost_attempt",
    "labels",
)
_NO_OPTIONS: Final = (None, None, 0, "", None, None, None, None, None, None)


def new_id() -> str:
    """Make an id that nobody else makes, growing with time."""
    return str(_uuid7())


def write_task(message: task_pb2.NewTask, task: tasks.NewTask, task_id: str | None = None) -> tuple[str, int]:
    """Write a task; return its id and the size of its payload. The hot path: a task costs about a microsecond here.

    `task_id` is the id of one that has none, if the caller has made it already.
    """
    try:
        if task.task_id is not None:
            task_id = task.task_id
        elif task_id is None:
            task_id = str(_uuid7())
        message.task_id = task_id
        message.task_type = task.task_type
        message.queue = task.queue
        payload = task.payload
        if type(payload) is not bytes:
            payload = _write_payload(message, payload)
        if len(payload) > bounds.MAX_PAYLOAD_BYTES:
            raise errors.InvalidArgument(
                f"payload has {len(payload)} bytes; a task can carry {bounds.MAX_PAYLOAD_BYTES}", field="payload"
            )
        message.payload = payload
        if task.run_at is not None:
            write_instant(message.run_at, task.run_at)
        elif task.delay is not None:
            write_duration(message.delay, task.delay)
        else:
            message.now.SetInParent()
        if _options(task) != _NO_OPTIONS:
            _write_options(message, task)
        return task_id, len(payload)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise errors.InvalidArgument(f"the task cannot be sent: {error}") from error


def check_size(task: task_pb2.NewTask) -> None:
    """Refuse a task that no request can carry; gRPC would answer a request that is too large as an overload."""
    size = task.ByteSize()
    if size > MAX_TASKS_BYTES:
        raise errors.InvalidArgument(f"the task has {size} bytes; a request can carry {MAX_TASKS_BYTES}")


def list_tasks(
    namespace: str, wanted: tasks.TaskFilter, page_size: int, page_token: str
) -> task_service_pb2.ListTasksRequest:
    """Ask for a page."""
    request = task_service_pb2.ListTasksRequest(
        namespace=namespace, queue=wanted.queue or "", page_size=page_size, page_token=page_token
    )
    request.states.extend(task_pb2.TaskState.Value(f"TASK_STATE_{state.name}") for state in sorted(wanted.states))
    if wanted.run_at_from is not None:
        write_instant(request.run_at_from, wanted.run_at_from)
    if wanted.run_at_before is not None:
        write_instant(request.run_at_before, wanted.run_at_before)
    return request


def write_instant(message: timestamp_pb2.Timestamp, instant: datetime) -> None:
    """Write an aware instant; a naive one raises TypeError."""
    since = instant - _EPOCH
    message.seconds = since.days * 86_400 + since.seconds
    message.nanos = since.microseconds * 1_000


def write_duration(message: duration_pb2.Duration, duration: timedelta) -> None:
    """Write a duration; both parts of it have its sign, as the format wants."""
    micros = duration // _MICROSECOND
    seconds, rest = divmod(abs(micros), 1_000_000)
    message.seconds, message.nanos = (seconds, rest * 1_000) if micros >= 0 else (-seconds, -rest * 1_000)


def _write_payload(message: task_pb2.NewTask, payload: object) -> bytes:
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    message.content_type = JSON
    try:
        return _encode_json(payload).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidArgument(f"payload is neither bytes nor JSON: {error}", field="payload") from error


def _write_options(message: task_pb2.NewTask, task: tasks.NewTask) -> None:
    """Write what most tasks leave at its default."""
    if task.content_type is not None:
        message.content_type = task.content_type
    if task.headers:
        message.headers.update(task.headers)
    if task.priority:
        message.priority = task.priority
    if task.fairness_key:
        message.fairness_key = task.fairness_key
    if task.retry_policy is not None:
        _write_policy(message.retry_policy, task.retry_policy)
    if task.attempt_timeout is not None:
        write_duration(message.attempt_timeout, task.attempt_timeout)
    if task.start_deadline is not None:
        write_instant(message.start_deadline, task.start_deadline)
    if task.completion_deadline is not None:
        write_instant(message.completion_deadline, task.completion_deadline)
    if task.on_lost_attempt is not None:
        word = tasks.OnLostAttempt(task.on_lost_attempt).name
        message.on_lost_attempt = task_pb2.OnLostAttempt.Value(f"ON_LOST_ATTEMPT_{word}")
    if task.labels:
        message.labels.update(task.labels)


def _write_policy(message: task_pb2.RetryPolicy, policy: tasks.RetryPolicy) -> None:
    message.SetInParent()
    if policy.max_attempts is not None:
        message.max_attempts = policy.max_attempts
    if policy.initial_backoff is not None:
        write_duration(message.initial_backoff, policy.initial_backoff)
    if policy.multiplier is not None:
        message.multiplier = policy.multiplier
    if policy.max_backoff is not None:
        write_duration(message.max_backoff, policy.max_backoff)
    if policy.jitter is not None:
        message.jitter = policy.jitter
