"""What can happen, by name, so that what never did is seen: the checker counts, and this says what is to be counted.

Of what the core asks for (`Effects`) nearly all is seen where it arrives: a write at the store, a verdict, a stop, a
lost lease or an assignment on the wire, a read at the store. What arrives nowhere, `Node` counts.
"""

from collections.abc import Mapping
from typing import Any, Final, get_args

from simulation.history import TRANSITIONS
from simulation.plan import FAULTS, Kind, Leaving

from duecourse.server.core.effects import CancelResult, StopReason, Verdict
from duecourse.server.core.task import AttemptOutcome
from duecourse.server.storage import CommitAnswer
from duecourse.v1 import worker_service_pb2

ENOUGH_SEEDS: Final = 500
"""So many of a kind see all of it: even the rarest was seen by one in a hundred of 300."""
_LEAST_COUNTED: Final = {Kind.CLUSTER: 0.9, Kind.SOLO: 0.8}
"""The share of so many seeds that counts, at least: of 300, 96 % and 86 % did. A node that is alone goes on leading
unless a fault ends it, so that more of them see no change of leader."""

_OF_SEVERAL: Final = "demand"
"""What a node says only where there are others."""


def _events(message: Any) -> list[str]:
    return [field.name for field in message.DESCRIPTOR.oneofs_by_name["event"].fields]


EXPECTED: Final = (
    "none to pending",
    *(f"{before} to {after}" for before, after in sorted(TRANSITIONS)),
    *(f"attempt {outcome}" for outcome in AttemptOutcome),
    *(f"store {answer.__name__.lower()}" for answer in get_args(CommitAnswer)),
    *(f"store {answer}" for answer in ("taken", "mismatched", "raised", "raise refused", "purge stale")),
    *(f"store {fate}" for fate in ("not applied", "lost before", "lost after", "late", "held", "no answer in time")),
    *(f"read {kind}" for kind in ("tasks", "attempt", "lanes", "buckets", "held", "audit")),
    *(f"node says {event}" for event in _events(worker_service_pb2.StreamAssignmentsResponse) if event != _OF_SEVERAL),
    *(f"worker says {event}" for event in _events(worker_service_pb2.StreamAssignmentsRequest)),
    *(f"verdict outcome_verdict_{verdict}" for verdict in (*Verdict, "not_leader")),
    *(f"stop stop_reason_{reason}" for reason in StopReason),
    *(f"answer {answer}" for answer in ("created", "existing", *CancelResult)),
    *(f"client {error}" for error in ("Unavailable", "OutcomeUncertain", "DeadlineExceeded", "TaskExists")),
    "effect unmatched",
    "clock accepted",
    "node drained",
    "purged",
    *(f"set aside {state}" for state in ("waiting", "held")),
    "refused CancelTask DATA_LOSS",
    "handler starts",
)
_OF_KIND: Final = {
    Kind.SOLO: (*(f"fault {fault}" for fault in FAULTS[Kind.SOLO]), "node superseded"),
    Kind.CLUSTER: (
        *(f"fault {fault}" for fault in FAULTS[Kind.CLUSTER]),
        *(f"node left {leaving}" for leaving in Leaving if leaving is not Leaving.NOTHING),
        f"node says {_OF_SEVERAL}",
        *(f"node passes {call} on" for call in ("SubmitTask", "SubmitTasks", "CancelTask")),
        "etcd txn applied",
        "etcd lease granted",
        "etcd watch compacted",
        "store rebound",
    ),
}


def lost(kind: Kind, seeds: int, counted: int, seen: Mapping[str, int]) -> list[str]:
    """Return what should have happened and did not, if the seeds were many enough for all of it."""
    if seeds < ENOUGH_SEEDS:
        return []
    too_few = [f"{counted} counted seeds are too few"] if counted < _LEAST_COUNTED[kind] * seeds else []
    return too_few + missing(kind, seen)


def missing(kind: Kind, seen: Mapping[str, int]) -> list[str]:
    """Return what did not happen."""
    return [name for name in (*EXPECTED, *_OF_KIND[kind]) if not seen.get(name)]
