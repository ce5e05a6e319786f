"""Leases in memory, and who holds them.

A lease is renewed by the stream that holds it, all leases of a stream at once: a heartbeat whose digest agrees sets
`Holder.renewed_at`. So a running attempt costs nothing between its start and its end but its part in a sweep.
"""

from dataclasses import dataclass, field
from typing import Any

from duecourse.model.instants import Micros
from duecourse.server.core.task import Task

UNSENT = 2**62
"""The assignment number of a lease that has not left the node yet: larger than any that a worker can have seen."""


@dataclass(slots=True, eq=False)
class Holder:
    """A worker's stream. Its fields are set by the streams' room, in the node's loop."""

    stream_id: int
    namespace: str
    worker: str
    incarnation: str
    renewed_at: Micros
    """Elapsed time of the last sign of life for all its leases."""
    is_open: bool = True


@dataclass(slots=True, eq=False)
class CancelWait:
    """A cancellation that waits for the worker's word whether the handler had begun."""

    origin: Any
    until: Micros
    """Elapsed time at which it is answered anyway."""


@dataclass(slots=True, eq=False)
class Lease:
    """A worker's time-limited right to run one attempt."""

    task: Task
    token: bytes
    holder: Holder | None
    """None until its worker has been heard in this term."""
    duration: Micros
    unexpired_until: Micros
    """Elapsed time before which it does not expire, whatever is heard."""
    timeout_at: Micros
    """Elapsed time at which the worker is asked to stop."""
    stored_at: Micros
    """Elapsed time of the last stored sign of life."""
    assignment_number: int = UNSENT
    """The number of the Assignments message that carried it on its holder's stream; 0 if another stream did."""
    stop_asked_at: Micros | None = None
    """Elapsed time at which the worker was asked to stop for lack of time."""
    said: str | None = None
    """What its handler last said of its progress, stored or not; None: nothing in this term."""
    cancel_waits: list[CancelWait] = field(default_factory=list)

    def expires_at(self) -> Micros:
        """Return the elapsed time at which it expires unless its holder is heard again."""
        if self.holder is None:
            return self.unexpired_until
        return max(self.unexpired_until, self.holder.renewed_at + self.duration)
