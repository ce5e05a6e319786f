"""What a worker knows of one attempt: its lease, how far it has come, and how it ended.

::

            assigned                 start                    end                   verdict
    (none) ──────────▶ WAITING ───────────────▶ RUNNING ───────────────▶ ENDED ───────────────▶ (forgotten)
                          │ (renewed first,        │                       ▲
                          │  if it came short)     │                       │
                          │ late, refused, drained │ lease lost            │
                          ├────────────────────────┼───────────────────────┘ Returned
                          └─ lease lost ▶ forgotten└▶ forgotten; its slot is free when the handler has ended

An ENDED attempt keeps its outcome until a node says that it is recorded or refused.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

from duecourse.model.instants import Micros
from duecourse.v1 import worker_service_pb2 as wire


class Phase(Enum):
    """How far an attempt has come in this worker."""

    WAITING = 1
    RUNNING = 2
    ENDED = 3
    FORGOTTEN = 4


class StopReason(StrEnum):
    """Why a running handler is asked to stop."""

    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    LEASE_LOST = "lease_lost"
    SHUTDOWN = "shutdown"


class FailureKind(StrEnum):
    """How a handler ended without success."""

    RETRYABLE = "retryable"
    NON_RETRYABLE = "non_retryable"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Success:
    """The handler returned."""

    result: bytes
    content_type: str


@dataclass(slots=True)
class Failed:
    """The handler raised, or stopped as it was asked to; texts are cut to their bounds."""

    kind: FailureKind
    type: str
    message: str
    retry_after: Micros | None = None


@dataclass(slots=True)
class Returned:
    """The handler did not start and will not."""


Outcome = Success | Failed | Returned
RETURNED: Final = Returned()
NO_ASSIGNMENT: Final = wire.Assignment()


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt, from its assignment to the verdict on its outcome. Times are elapsed time."""

    token: bytes
    task_id: str
    task_type: str
    shard: int
    epoch: int
    address: str
    """The node that it came from."""
    assignment: wire.Assignment
    """With the payload; `NO_ASSIGNMENT` once it has ended."""
    lease: Micros
    counts_from: Micros
    """When the lease's time began, as far as its own assignment and streams that have ended tell."""
    came_with: Micros
    """When it began by its own assignment alone."""
    renewal_takes: Micros
    """A lease of which less is left may end before it is known to be renewed."""
    is_urgent: bool
    """It is to start within some time, or not at all."""
    deadline: Micros | None
    start_by: Micros | None
    order: int
    """Counts this worker's assignments: the lower one starts first."""
    phase: Phase = Phase.WAITING
    started_at: Micros = 0
    is_start_told: bool = False
    stop_reason: StopReason | None = None
    """The first reason for which the handler was asked to stop."""
    is_lease_lost: bool = False
    outcome: Outcome | None = None
    is_queued: bool = False
    """Its outcome waits to be sent on some stream."""
    sent_on: int = 0
    """The serial of the stream that its outcome was last sent on; 0 for none."""
    progress: str = ""

    def is_short(self, now: Micros) -> bool:
        """Tell whether its lease, unless it was renewed, may end before it is known to be."""
        return self.came_with + self.lease - now < self.renewal_takes
