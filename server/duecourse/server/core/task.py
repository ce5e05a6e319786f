"""What a task is: its identity, its policy, its progress and its attempts.

`Task` is what never changes after acceptance; everything that changes is in `Progress`, which is replaced as a whole by
every transition and never altered in place. Payloads are not here: they stay in the store until they are granted.
Times are microseconds since 1970 UTC on the cluster clock, durations are microseconds.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

from duecourse.model import bounds
from duecourse.model.instants import Micros

ShardId = NewType("ShardId", int)
Epoch = NewType("Epoch", int)


class TaskState(StrEnum):
    """Where a task stands; the same words in SQL and in metrics."""

    PENDING = "pending"
    LEASED = "leased"
    RUNNING = "running"
    RETRY_WAIT = "retry_wait"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


WAITING = frozenset((TaskState.PENDING, TaskState.RETRY_WAIT))
HELD = frozenset((TaskState.LEASED, TaskState.RUNNING))
TERMINAL = frozenset((TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED))


class AttemptOutcome(StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    LEASE_LOST = "lease_lost"
    RETURNED = "returned"
    CANCELLED = "cancelled"


class FailureReason(StrEnum):
    """Why a task is FAILED."""

    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    NON_RETRYABLE = "non_retryable"
    START_DEADLINE = "start_deadline"
    COMPLETION_DEADLINE = "completion_deadline"
    OUTCOME_UNKNOWN = "outcome_unknown"
    RECORD_CORRUPT = "record_corrupt"


class TaskKey(NamedTuple):
    """How a task is found."""

    namespace: str
    task_id: str


class Lane(NamedTuple):
    """The tasks that wait in one line."""

    namespace: str
    queue: str
    task_type: str
    priority: int
    fairness_key: str


class DueKey(NamedTuple):
    """A task's place in its lane."""

    due_time: Micros
    sequence: int


@dataclass(frozen=True, slots=True)
class Policy:
    """How a task is tried, and when it is given up."""

    max_attempts: int = bounds.DEFAULT_MAX_ATTEMPTS
    initial_backoff: Micros = bounds.DEFAULT_INITIAL_BACKOFF
    multiplier: float = bounds.DEFAULT_BACKOFF_MULTIPLIER
    max_backoff: Micros = bounds.DEFAULT_MAX_BACKOFF
    jitter: float = bounds.DEFAULT_JITTER
    attempt_timeout: Micros = bounds.DEFAULT_ATTEMPT_TIMEOUT
    start_deadline: Micros | None = None
    completion_deadline: Micros | None = None
    fail_when_lost: bool = False


DEFAULT_POLICY = Policy()


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker said of a handler's failure, cut to its bounds at the edge."""

    type: str
    message: str


@dataclass(slots=True)
class Attempt:
    """One try at a task, open while `outcome` is None. Never altered: `attempts` makes the next version."""

    number: int
    round: int
    lease_token: bytes
    worker: str
    incarnation: str
    node: str
    epoch: Epoch
    fencing_token: int
    lease_time: Micros
    """When it was granted."""
    sign_of_life: Micros
    """The last stored renewal, the grant at first."""
    start_time: Micros | None = None
    end_time: Micros | None = None
    outcome: AttemptOutcome | None = None
    failure: Failure | None = None
    outcome_digest: bytes | None = None
    """Tells a repeated outcome from a different one under the same token."""
    progress: str = ""
    """The handler's last word on how far it has come, as of the last stored sign of life."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a cancellation that carried a request id, kept to answer its repeat."""

    request_id: str
    fingerprint: bytes
    attempt: int
    """The number of the attempt that was out, 0 if none was."""
    was_prevented: bool
    """No attempt was out: the answer was PREVENTED at once."""
    earlier_attempt_may_run: bool


@dataclass(slots=True)
class Progress:
    """All that changes about a task. Never altered; every transition makes a new one with the next revision."""

    state: TaskState
    due_time: Micros | None
    """When it is next eligible; kept while an attempt is out; None once it has ended."""
    revision: int
    round: int
    attempt_count: int
    """Attempts granted so far; the number of the latest one."""
    attempts_used: int
    """Attempts of this round that count against `max_attempts`."""
    returns_in_row: int
    cancel_requested: bool
    earlier_attempt_may_run: bool
    """An attempt was lost or timed out, and its handler may still be alive."""
    attempt: Attempt | None
    """The latest attempt, open or ended; moved to the attempt records by the next grant."""
    end_time: Micros | None = None
    failure_reason: FailureReason | None = None
    answers: tuple[Answer, ...] = ()


@dataclass(slots=True, eq=False)
class Task:
    """A task in memory: what never changes, and the progress that was last committed."""

    key: TaskKey
    """How it is found."""
    shard: ShardId
    lane: Lane
    uid: bytes
    sequence: int
    run_at: Micros
    create_time: Micros
    policy: Policy
    progress: Progress
    is_ready: bool = False
    """Due, in its lane's head, and the matcher may take it."""

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self.key.namespace

    @property
    def task_id(self) -> str:
        """Its id, unique in the namespace."""
        return self.key.task_id

    def __lt__(self, other: "Task") -> bool:
        """Tie with every other: heaps hold a task twice, with the same key, once it was dropped and loaded again."""
        return False


@dataclass(slots=True, eq=False)
class Submission:
    """A task as a client submitted it, parsed and checked at the edge; stored whole by its `Insert`."""

    namespace: str
    task_id: str
    slot: int
    shard: ShardId
    lane: Lane
    uid: bytes
    run_at: Micros | None
    """None: due after `delay`."""
    delay: Micros
    policy: Policy
    payload: bytes
    content_type: str
    headers: dict[str, str]
    labels: dict[str, str]
    fingerprint: bytes
    """Tells a repeated request from a different one under the same id; its first byte is the version."""


@dataclass(slots=True, eq=False)
class Delivery:
    """What a worker needs of a granted task and memory does not hold; the grant's commit brings it."""

    payload: bytes
    content_type: str
    headers: dict[str, str]
