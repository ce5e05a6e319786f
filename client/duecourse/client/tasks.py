"""Tasks as applications see them: aware datetimes, timedeltas and plain values, never protobufs.

What a field means, its range and its default are the API's: see `duecourse/v1/task.proto`.
"""

import enum
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta


class TaskState(enum.StrEnum):
    """Where a task stands. One that is due and waits for a worker is PENDING or RETRY_WAIT."""

    PENDING = "pending"
    LEASED = "leased"
    RUNNING = "running"
    RETRY_WAIT = "retry_wait"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class FailureReason(enum.StrEnum):
    """Why a task is FAILED."""

    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    NON_RETRYABLE = "non_retryable"
    START_DEADLINE = "start_deadline"
    COMPLETION_DEADLINE = "completion_deadline"
    OUTCOME_UNKNOWN = "outcome_unknown"
    RECORD_CORRUPT = "record_corrupt"


class OnLostAttempt(enum.StrEnum):
    """What happens when an attempt is lost: tried again, or given up because its effect must not repeat."""

    RETRY = "retry"
    FAIL = "fail"


class AttemptOutcome(enum.StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    LEASE_LOST = "lease_lost"
    RETURNED = "returned"
    CANCELLED = "cancelled"


class CancelResult(enum.StrEnum):
    """What a cancellation achieved."""

    PREVENTED = "prevented"
    """No handler ran or will run for the current attempt."""
    REQUESTED = "requested"
    """A handler may be running and was asked to stop."""
    ALREADY_FINISHED = "already_finished"
    """The task had ended before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and when a failed task is tried again. What is None is left to the server's default."""

    max_attempts: int | None = None
    initial_backoff: timedelta | None = None
    multiplier: float | None = None
    max_backoff: timedelta | None = None
    jitter: float | None = None


@dataclass(slots=True)
class NewTask:
    """A task to submit. Due at `run_at`, or `delay` after the server accepted it; at once if neither is given.

    A `payload` that is not bytes is sent as JSON. Without a `task_id` each submission gets one of its own. Not frozen,
    because frozen ones cost several times as much to make.
    """

    task_type: str
    payload: object = b""
    _: KW_ONLY
    run_at: datetime | None = None
    delay: timedelta | None = None
    queue: str = "default"
    task_id: str | None = None
    content_type: str | None = None
    """Default: `application/json` for a payload that is not bytes, else none."""
    headers: Mapping[str, str] | None = None
    priority: int = 0
    fairness_key: str = ""
    retry_policy: RetryPolicy | None = None
    attempt_timeout: timedelta | None = None
    start_deadline: datetime | None = None
    completion_deadline: datetime | None = None
    on_lost_attempt: OnLostAttempt | None = None
    labels: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.run_at is not None:
            require_aware("run_at", self.run_at)
            if self.delay is not None:
                raise ValueError("give run_at or delay, not both")
        if self.start_deadline is not None:
            require_aware("start_deadline", self.start_deadline)
        if self.completion_deadline is not None:
            require_aware("completion_deadline", self.completion_deadline)


@dataclass(slots=True)
class SubmittedTask:
    """A task that is durable."""

    task_id: str
    uid: bytes
    """Names this task among all tasks that ever had its id: 16 bytes."""
    created: bool
    """False if the same request had created it before; that may have been an earlier try of this very call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a handler failed, in the worker's words."""

    type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a task."""

    number: int
    round: int
    worker: str
    incarnation: str
    node: str
    shard: int
    epoch: int
    fencing_token: int
    lease_time: datetime
    start_time: datetime | None
    """When the handler began, if the server was told."""
    end_time: datetime | None
    """None while it is open."""
    outcome: AttemptOutcome | None
    failure: Failure | None
    progress: str
    """The handler's last word on how far it has come, as of the last stored sign of life; may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task as it is stored. `payload`, `result` and `attempts` are None unless the full view was asked for."""

    namespace: str
    task_id: str
    uid: bytes
    queue: str
    task_type: str
    content_type: str
    headers: Mapping[str, str]
    run_at: datetime
    priority: int
    fairness_key: str
    retry_policy: RetryPolicy
    attempt_timeout: timedelta
    start_deadline: datetime | None
    completion_deadline: datetime | None
    on_lost_attempt: OnLostAttempt
    labels: Mapping[str, str]
    state: TaskState
    failure_reason: FailureReason | None
    cancel_requested: bool
    revision: int
    round: int
    attempt_count: int
    create_time: datetime
    due_time: datetime | None
    """When it is next eligible; None once it has ended."""
    end_time: datetime | None
    payload: bytes | None = field(default=None, repr=False)
    result: bytes | None = field(default=None, repr=False)
    result_content_type: str = ""
    attempts: tuple[Attempt, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """Which tasks to list: those for which everything that is given here holds."""

    queue: str | None = None
    states: frozenset[TaskState] = frozenset()
    run_at_from: datetime | None = None
    """At or after this instant."""
    run_at_before: datetime | None = None
    """Before this instant."""

    def __post_init__(self) -> None:
        """Refuse instants without a zone."""
        if self.run_at_from is not None:
            require_aware("run_at_from", self.run_at_from)
        if self.run_at_before is not None:
            require_aware("run_at_before", self.run_at_before)


@dataclass(frozen=True, slots=True)
class TaskPage:
    """Some tasks in the order of their ids; may be empty before the last page."""

    tasks: tuple[Task, ...]
    next_page_token: str
    """Empty: this was the last page."""


@dataclass(frozen=True, slots=True)
class Cancellation:
    """What a cancellation achieved."""

    result: CancelResult
    state: TaskState
    earlier_attempt_may_run: bool
    """An attempt before the current one was lost or timed out, and its handler may still be alive."""


def require_aware(name: str, instant: datetime) -> None:
    """Raise TypeError for an instant that does not say its zone, so that nothing ever runs an hour off."""
    if instant.utcoffset() is None:
        raise TypeError(f"{name} has no time zone; give an aware datetime, for example one with tzinfo=datetime.UTC")
