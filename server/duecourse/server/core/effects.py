"""What a shard may ask for. One `Effects` gathers what a turn of the node's loop brings, a list for each kind.

Lists by kind in place of one list of a union: the loop carries out each kind in one batch anyway, and a task's way
through the core is the hot path. Order holds within a kind.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from duecourse.model.instants import Micros
from duecourse.server.core.errors import DomainError
from duecourse.server.core.events import End
from duecourse.server.core.lease import Holder, Lease
from duecourse.server.core.task import AttemptOutcome, Delivery, DueKey, Lane, ShardId, Task, TaskKey, TaskState
from duecourse.server.core.writes import Write


@dataclass(slots=True)
class Submitted:
    """A task is durable."""

    uid: bytes
    created: bool


class CancelResult(StrEnum):
    """What a cancellation achieved."""

    PREVENTED = "prevented"
    REQUESTED = "requested"
    ALREADY_FINISHED = "already_finished"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The answer to a cancellation."""

    result: CancelResult
    state: TaskState
    earlier_attempt_may_run: bool


Answer = Submitted | Cancelled | DomainError


class Verdict(StrEnum):
    """What became of an outcome."""

    RECORDED = "recorded"
    LEASE_LOST = "lease_lost"
    UNKNOWN_TOKEN = "unknown_token"  # noqa: S105


class StopReason(StrEnum):
    """Why an attempt is asked to stop."""

    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


@dataclass(slots=True, eq=False)
class Assignment:
    """A lease that is durable, to be sent to its holder."""

    lease: Lease
    delivery: Delivery
    last_read: int
    time_left: Micros
    """What is left of the attempt's time."""
    start_within: Micros | None
    """The handler must begin within so much, or not at all; None: no bound."""


@dataclass(slots=True, eq=False)
class LaneLoad:
    """Read on in a lane: after a key, due before an instant."""

    shard: ShardId
    lane: Lane
    version: int
    after: DueKey
    due_before: Micros
    limit: int


@dataclass(slots=True)
class Effects:
    """What is to be done; see the module's docstring."""

    writes: list[Write] = field(default_factory=list)
    answers: list[tuple[Any, Answer]] = field(default_factory=list)
    """Origin and answer."""
    assignments: list[Assignment] = field(default_factory=list)
    verdicts: list[tuple[Holder, bytes, Verdict]] = field(default_factory=list)
    """Holder, lease token, what became of its outcome."""
    stops: list[tuple[Holder, bytes, StopReason]] = field(default_factory=list)
    lost: list[tuple[Holder, bytes]] = field(default_factory=list)
    """Leases that are no longer their holder's."""
    adopted: list[tuple[Holder, bytes]] = field(default_factory=list)
    """Leases that a holder has listed; it may have ended and forgotten them since."""
    ready: list[Task] = field(default_factory=list)
    """Tasks that are due and wait for a worker, for the matcher."""
    unmatched: list[tuple[Lane, Holder]] = field(default_factory=list)
    """Grants that came to nothing: their holder's credit is free again."""
    task_reads: list[tuple[ShardId, TaskKey]] = field(default_factory=list)
    attempt_reads: list[tuple[ShardId, End]] = field(default_factory=list)
    lane_loads: list[LaneLoad] = field(default_factory=list)
    # For metrics only.
    ended: list[AttemptOutcome] = field(default_factory=list)
    lateness: list[tuple[Micros, bool]] = field(default_factory=list)
    """Handler start minus due time, and whether it was a retry."""
    audit_misses: int = 0
