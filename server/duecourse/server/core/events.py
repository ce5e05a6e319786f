"""What can happen to a shard: a closed union.

Events about a task name it by its key. Events carry batches where they come in batches.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from duecourse.model.instants import Micros
from duecourse.server.core.lease import Holder, Lease
from duecourse.server.core.task import Attempt, DueKey, Failure, Lane, Submission, Task, TaskKey
from duecourse.server.core.writes import Write

Found = Task | Literal[False] | None
"""What a read of a task found: None where there is none, False if its record does not decode."""


class OutcomeKind(StrEnum):
    """What a worker says of an attempt's end."""

    SUCCEEDED = "succeeded"
    RETRYABLE = "retryable"
    NON_RETRYABLE = "non_retryable"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    RETURNED = "returned"


@dataclass(slots=True, eq=False)
class Submit:
    """Clients submitted tasks: each with the origin that `Effects.answers` will name."""

    submissions: list[tuple[Submission, Any]]


@dataclass(slots=True, eq=False)
class Cancel:
    """A client cancels a task."""

    key: TaskKey
    request_id: str
    fingerprint: bytes
    expected_revision: int | None
    wait: Micros
    origin: Any


@dataclass(slots=True, eq=False)
class Grant:
    """The matcher gives a ready task to a worker."""

    task: Task
    holder: Holder
    lease_token: bytes
    duration: Micros
    """The lease time."""
    last_read: int
    """The number of the last message read from the worker."""


@dataclass(slots=True, eq=False)
class Start:
    """A worker says that a handler began."""

    key: TaskKey
    lease_token: bytes
    start_time: Micros


@dataclass(slots=True, eq=False)
class Report:
    """A worker passes on a handler's word on its progress."""

    key: TaskKey
    lease_token: bytes
    progress: str


@dataclass(slots=True, eq=False)
class End:
    """A worker says how an attempt ended; the holder is told what became of it."""

    key: TaskKey
    lease_token: bytes
    holder: Holder
    kind: OutcomeKind
    digest: bytes
    start_time: Micros | None = None
    failure: Failure | None = None
    result: tuple[bytes, str] | None = None
    retry_after: Micros | None = None


@dataclass(slots=True, eq=False)
class Hold:
    """A worker lists the leases that it holds; what it does not list it can have only if it is on its way.

    Every led shard gets one, with the leases whose task lies in it. `is_complete` False: presence only (Hello, whose
    tokens come without their tasks and go to every shard).
    """

    holder: Holder
    leases: dict[bytes, tuple[TaskKey | None, bool]]
    """By token: the task, if it is known, and whether the handler began."""
    last_assignments: int
    is_complete: bool


@dataclass(slots=True, eq=False)
class Unsent:
    """An assignment did not leave the node, because its stream had ended."""

    lease: Lease


@dataclass(slots=True, eq=False)
class Committed:
    """Writes are durable. `taken` and `mismatched` are those of them that were not applied."""

    writes: list[Write]
    taken: dict[int, Any]
    """By index into `writes`, for inserts: the storage's `Existing`."""
    mismatched: set[int]
    deliveries: dict[int, Any]
    """By index into `writes`, for grants: the `Delivery`, False if it does not decode."""


@dataclass(slots=True, eq=False)
class WriteRefused:
    """A write was set aside because the store refuses its data."""

    write: Write
    detail: str


@dataclass(slots=True, eq=False)
class TasksRead:
    """Single tasks were read, as the shard had asked."""

    tasks: list[tuple[TaskKey, Found]]


@dataclass(slots=True, eq=False)
class AttemptRead:
    """The attempt that an outcome names was read: None if nothing is known of its token."""

    end: End
    attempt: Attempt | None


@dataclass(slots=True, eq=False)
class HeldLoaded:
    """The leased and running tasks, at the start of a term."""

    tasks: list[Task]
    raises: tuple[Micros, ...]


@dataclass(slots=True, eq=False)
class BucketsLoaded:
    """Waiting tasks of a range of buckets, which begins at `due_from`; `cut`: see `storage.LoadedBuckets`."""

    tasks: list[Task]
    cut: dict[Lane, DueKey]
    due_from: Micros = 0


@dataclass(slots=True, eq=False)
class LaneLoaded:
    """The rest of a lane was read on; `version` is that of the request."""

    lane: Lane
    version: int
    tasks: list[Task]
    is_end: bool
    """There was no more."""


@dataclass(slots=True, eq=False)
class Audited:
    """The oldest due tasks, and those that are held, as the store has them; `corrupt` do not decode."""

    tasks: list[Task]
    corrupt: list[TaskKey] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Tick:
    """Time passed."""


Event = (
    Submit
    | Cancel
    | Grant
    | Start
    | Report
    | End
    | Hold
    | Unsent
    | Committed
    | WriteRefused
    | TasksRead
    | AttemptRead
    | HeldLoaded
    | BucketsLoaded
    | LaneLoaded
    | Audited
    | Tick
)
