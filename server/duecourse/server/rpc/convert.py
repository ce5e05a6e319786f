"""From a request to the domain: every check of what clients send, with the path of the field at fault.

What leaves this module is well-formed and within bounds, so nothing behind it can stumble over a time, a length or a
name. A request's validity depends on the request alone (only the longest delay is held against the clock, and time can
but shorten it), so that a submission that was accepted once is accepted again when it is repeated.

The hot path is a batch of plain tasks: each field is read once, a lane is checked once and found again by its names, a
policy is made once for equal specifications.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Final

import uuid_utils
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from duecourse.model import bounds, slots
from duecourse.model.instants import Micros
from duecourse.model.names import ALPHABET, is_name
from duecourse.server.core.errors import DomainError, InvalidField, RunAtOutOfRange
from duecourse.server.core.task import DEFAULT_POLICY, Lane, Policy, ShardId, Submission
from duecourse.v1 import task_pb2, task_service_pb2

DEFAULT_NAMESPACE: Final = "default"
DEFAULT_QUEUE: Final = "default"
FINGERPRINT_VERSION: Final = b"\x01"
TRACE_HEADERS: Final = ("traceparent", "tracestate")
KNOWN_LANES: Final = 16_384
KNOWN_POLICIES: Final = 1_024
_LATEST_SECOND: Final = 253_402_300_799
_LONGEST_SECONDS: Final = 315_576_000_000
_NANOS: Final = 1_000_000_000
_NAME_PROBLEM: Final = f"1 to {bounds.MAX_NAME_BYTES} bytes of {ALPHABET} are wanted, neither `.` nor `..`"


class Submissions:
    """Turns requests into submissions, remembering the lanes and policies that it has seen."""

    def __init__(self, shard_of_slot: Callable[[int], ShardId]) -> None:
        self._shard_of_slot = shard_of_slot
        self._lanes: dict[tuple[str, str, str, int, str], Lane] = {}
        self._policies: dict[Policy, Policy] = {}

    def one(self, request: task_service_pb2.SubmitTaskRequest, now: Micros) -> Submission:
        """Parse a single submission. Raises InvalidField."""
        namespace = namespace_of(request.namespace)
        if not request.HasField("task"):
            raise InvalidField("task", "is required")
        try:
            return self._submission(namespace, request.task, now)[0]
        except InvalidField as error:
            error.field = f"task.{error.field}"
            raise

    def batch(self, request: task_service_pb2.SubmitTasksRequest, now: Micros) -> list[Submission | DomainError]:
        """Parse a batch: for each item its submission or what is wrong with it. Raises InvalidField for the whole."""
        namespace = namespace_of(request.namespace)
        tasks = request.tasks
        if not 1 <= len(tasks) <= bounds.MAX_BATCH:
            raise InvalidField("tasks", f"1 to {bounds.MAX_BATCH} are wanted")
        parsed: list[Submission | DomainError] = []
        room = bounds.MAX_REQUEST_BYTES
        for task in tasks:
            try:
                submission, size = self._submission(namespace, task, now)
            except InvalidField as error:
                error.field = f"tasks[{len(parsed)}].{error.field}"
                error.__traceback__ = None
                parsed.append(error)
                size = task.ByteSize()
            else:
                parsed.append(submission)
            room -= size
            if room < 0:
                raise InvalidField("tasks", f"at most {bounds.MAX_REQUEST_BYTES} bytes are wanted in one request")
        return parsed

    def _submission(self, namespace: str, task: task_pb2.NewTask, now: Micros) -> tuple[Submission, int]:
        """Parse one task; returns its serialised size too."""
        uid = uuid_utils.uuid7()
        task_id = task.task_id
        if not task_id:
            # Kept in the request: passed on to another node, or tried again, it is the same submission.
            task_id = task.task_id = str(uid)
        elif not is_name(task_id):
            raise InvalidField("task_id", _NAME_PROBLEM)
        names = (namespace, task.queue, task.task_type, task.priority, task.fairness_key)
        lane = self._lanes.get(names) or self._lane(names)
        payload = task.payload
        if len(payload) > bounds.MAX_PAYLOAD_BYTES:
            raise InvalidField("payload", f"at most {bounds.MAX_PAYLOAD_BYTES} bytes are wanted")
        content_type = task.content_type
        if content_type and not is_content_type(content_type):
            raise InvalidField("content_type", f"at most {bounds.MAX_CONTENT_TYPE_BYTES} bytes of printable ASCII")
        run_at, delay = _when(task, now)
        has = task.HasField
        if (
            has("retry_policy")
            or has("attempt_timeout")
            or has("start_deadline")
            or has("completion_deadline")
            or task.on_lost_attempt
        ):
            policy = self._policy(task, run_at)
        else:
            policy = DEFAULT_POLICY
        headers = _headers(task) if task.headers else {}
        labels = _labels(task.labels) if task.labels else {}
        # Deterministic order matters only to maps, and costs a third more.
        sent = task.SerializeToString(deterministic=True) if headers or labels else task.SerializeToString()
        fingerprint = FINGERPRINT_VERSION + blake2b(sent, digest_size=16).digest()
        slot = slots.slot_of(namespace, task_id)
        return Submission(
            namespace,
            task_id,
            slot,
            self._shard_of_slot(slot),
            lane,
            uid.bytes,
            run_at,
            delay,
            policy,
            payload,
            content_type,
            headers,
            labels,
            fingerprint,
        ), len(sent)

    def _lane(self, names: tuple[str, str, str, int, str]) -> Lane:
        namespace, queue, task_type, priority, fairness_key = names
        if queue and not is_name(queue):
            raise InvalidField("queue", _NAME_PROBLEM)
        if not is_name(task_type):
            raise InvalidField("task_type", _NAME_PROBLEM if task_type else "is required")
        if not bounds.MIN_PRIORITY <= priority <= bounds.MAX_PRIORITY:
            raise InvalidField("priority", f"{bounds.MIN_PRIORITY} to {bounds.MAX_PRIORITY} is wanted")
        if fairness_key and not is_name(fairness_key):
            raise InvalidField("fairness_key", _NAME_PROBLEM)
        if len(self._lanes) >= KNOWN_LANES:
            self._lanes.clear()
        lane = Lane(namespace, queue or DEFAULT_QUEUE, task_type, priority, fairness_key)
        self._lanes[names] = lane
        return lane

    def _policy(self, task: task_pb2.NewTask, run_at: Micros | None) -> Policy:
        policy = _policy(task, run_at)
        if policy == DEFAULT_POLICY:
            return DEFAULT_POLICY
        if policy.start_deadline is not None or policy.completion_deadline is not None:
            return policy
        if len(self._policies) >= KNOWN_POLICIES:
            self._policies.clear()
        return self._policies.setdefault(policy, policy)


def namespace_of(sent: str) -> str:
    """Check a namespace; empty is the default one."""
    if not sent:
        return DEFAULT_NAMESPACE
    if not is_name(sent):
        raise InvalidField("namespace", _NAME_PROBLEM)
    return sent


def required_name(sent: str, path: str) -> str:
    """Check a name that must be there."""
    if not is_name(sent):
        raise InvalidField(path, _NAME_PROBLEM if sent else "is required")
    return sent


def optional_name(sent: str, path: str) -> str:
    """Check a name that may be empty."""
    if sent and not is_name(sent):
        raise InvalidField(path, _NAME_PROBLEM)
    return sent


def is_content_type(text: str) -> bool:
    """Tell whether a text can be a media type: short printable ASCII."""
    return text.isascii() and text.isprintable() and len(text) <= bounds.MAX_CONTENT_TYPE_BYTES


def instant(sent: Timestamp, path: str) -> Micros:
    """Check an instant of the years 1970 to 9999; nanoseconds are cut to microseconds."""
    seconds = sent.seconds
    nanos = sent.nanos
    if not 0 <= nanos < _NANOS:
        raise InvalidField(path, "nanos from 0 to 999,999,999 are wanted")
    micros = seconds * bounds.SECOND + nanos // 1_000
    if micros < bounds.MIN_RUN_AT or seconds > _LATEST_SECOND:
        raise InvalidField(path, "an instant of the years 1970 to 9999 is wanted")
    return micros


def duration(sent: Duration, path: str, shortest: Micros, longest: Micros) -> Micros:
    """Check a duration; nanoseconds are cut to microseconds."""
    seconds, nanos = sent.seconds, sent.nanos
    if not -_NANOS < nanos < _NANOS or abs(seconds) > _LONGEST_SECONDS or seconds * nanos < 0:
        raise InvalidField(path, "seconds and nanos of one sign and in their range are wanted")
    total = seconds * _NANOS + nanos
    if not shortest * 1_000 <= total <= longest * 1_000:
        raise InvalidField(path, f"{_seconds(shortest)} to {_seconds(longest)} is wanted")
    return total // 1_000


def cancel_fingerprint(expected_revision: int | None) -> bytes:
    """Tell a repeated cancellation of a task from a different one; how long it waits makes no difference."""
    sent = f"cancel {expected_revision}".encode()
    return FINGERPRINT_VERSION + blake2b(sent, digest_size=16).digest()


def _when(task: task_pb2.NewTask, now: Micros) -> tuple[Micros | None, Micros]:
    """Return the instant, or None and the delay from acceptance."""
    when = task.WhichOneof("when")
    if when == "run_at":
        sent = task.run_at
        # Compared first, so that an instant that no calendar has is too far ahead as well.
        if sent.seconds * bounds.SECOND > now + bounds.MAX_DELAY:
            raise RunAtOutOfRange("run_at", f"at most {bounds.MAX_DELAY // bounds.DAY} days ahead is wanted")
        return instant(sent, "run_at"), 0
    if when == "delay":
        if task.delay.seconds * bounds.SECOND > bounds.MAX_DELAY:
            raise RunAtOutOfRange("delay", f"at most {bounds.MAX_DELAY // bounds.DAY} days is wanted")
        return None, duration(task.delay, "delay", 0, bounds.MAX_DELAY)
    if when == "now":
        return None, 0
    raise InvalidField("when", "one of run_at, delay and now is required")


def _policy(task: task_pb2.NewTask, run_at: Micros | None) -> Policy:
    lost = task.on_lost_attempt
    if lost not in (
        task_pb2.ON_LOST_ATTEMPT_UNSPECIFIED,
        task_pb2.ON_LOST_ATTEMPT_RETRY,
        task_pb2.ON_LOST_ATTEMPT_FAIL,
    ):
        raise InvalidField("on_lost_attempt", "RETRY or FAIL is wanted")
    timeout = bounds.DEFAULT_ATTEMPT_TIMEOUT
    if task.HasField("attempt_timeout"):
        timeout = duration(
            task.attempt_timeout, "attempt_timeout", bounds.MIN_ATTEMPT_TIMEOUT, bounds.MAX_ATTEMPT_TIMEOUT
        )
    max_attempts, initial, multiplier, longest, jitter = _retries(task.retry_policy)
    return Policy(
        max_attempts=max_attempts,
        initial_backoff=initial,
        multiplier=multiplier,
        max_backoff=longest,
        jitter=jitter,
        attempt_timeout=timeout,
        start_deadline=_deadline(task, "start_deadline", run_at),
        completion_deadline=_deadline(task, "completion_deadline", run_at),
        fail_when_lost=lost == task_pb2.ON_LOST_ATTEMPT_FAIL,
    )


def _retries(policy: task_pb2.RetryPolicy) -> tuple[int, Micros, float, Micros, float]:
    max_attempts = policy.max_attempts if policy.HasField("max_attempts") else bounds.DEFAULT_MAX_ATTEMPTS
    if not 1 <= max_attempts <= bounds.MAX_MAX_ATTEMPTS:
        raise InvalidField("retry_policy.max_attempts", f"1 to {bounds.MAX_MAX_ATTEMPTS} is wanted")
    initial = bounds.DEFAULT_INITIAL_BACKOFF
    if policy.HasField("initial_backoff"):
        path = "retry_policy.initial_backoff"
        initial = duration(policy.initial_backoff, path, bounds.MIN_BACKOFF, bounds.MAX_BACKOFF)
    multiplier = policy.multiplier if policy.HasField("multiplier") else bounds.DEFAULT_BACKOFF_MULTIPLIER
    # Written so that NaN, which compares to nothing, is refused.
    if not 1.0 <= multiplier <= bounds.MAX_BACKOFF_MULTIPLIER:
        raise InvalidField("retry_policy.multiplier", f"1 to {bounds.MAX_BACKOFF_MULTIPLIER:g} is wanted")
    longest = max(initial, bounds.DEFAULT_MAX_BACKOFF)
    if policy.HasField("max_backoff"):
        path = "retry_policy.max_backoff"
        longest = duration(policy.max_backoff, path, bounds.MIN_BACKOFF, bounds.MAX_BACKOFF)
        if longest < initial:
            raise InvalidField(path, "at least initial_backoff is wanted")
    jitter = policy.jitter if policy.HasField("jitter") else bounds.DEFAULT_JITTER
    if not 0.0 <= jitter <= 1.0:
        raise InvalidField("retry_policy.jitter", "0 to 1 is wanted")
    return max_attempts, initial, multiplier, longest, jitter


def _deadline(task: task_pb2.NewTask, path: str, run_at: Micros | None) -> Micros | None:
    if not task.HasField(path):  # type: ignore[arg-type]
        return None
    deadline = instant(getattr(task, path), path)
    if run_at is not None and deadline <= run_at:
        raise InvalidField(path, "an instant after run_at is wanted")
    return deadline


def _headers(task: task_pb2.NewTask) -> dict[str, str]:
    """Check the headers, and take those out of the message that do not tell requests apart."""
    sent = task.headers
    if len(sent) > bounds.MAX_HEADERS:
        raise InvalidField("headers", f"at most {bounds.MAX_HEADERS} are wanted")
    headers = dict(sent)
    size = 0
    for key, value in headers.items():
        length = len(key.encode())
        if not 1 <= length <= bounds.MAX_NAME_BYTES:
            raise InvalidField("headers", f"keys of 1 to {bounds.MAX_NAME_BYTES} bytes are wanted")
        if "\0" in key or "\0" in value:
            raise InvalidField("headers", "the character NUL is not wanted")
        size += length + len(value.encode())
    if size > bounds.MAX_HEADERS_BYTES:
        raise InvalidField("headers", f"at most {bounds.MAX_HEADERS_BYTES} bytes of keys and values are wanted")
    for key in TRACE_HEADERS:
        if key in headers:
            del sent[key]
    return headers


def _labels(sent: Mapping[str, str]) -> dict[str, str]:
    if len(sent) > bounds.MAX_LABELS:
        raise InvalidField("labels", f"at most {bounds.MAX_LABELS} are wanted")
    labels = dict(sent)
    for key, value in labels.items():
        if not is_name(key) or (value and not is_name(value)):
            raise InvalidField("labels", f"keys and values: {_NAME_PROBLEM}; values may be empty")
    return labels


def _seconds(micros: Micros) -> str:
    return f"{micros / bounds.SECOND:g} s"
