"""What can happen, by name, so that what never did is seen: the checker counts, and this says what is to be counted."""

from collections.abc import Mapping
from typing import Final

from simulation.history import TRANSITIONS
from simulation.plan import CLUSTER_FAULTS, SOLO_FAULTS, Kind, Leaving

from duecourse.server.core.task import AttemptOutcome

EXPECTED: Final = (
    "none to pending",
    *(f"{before} to {after}" for before, after in sorted(TRANSITIONS)),
    *(f"attempt {outcome}" for outcome in AttemptOutcome),
    *(f"store {answer}" for answer in ("committed", "taken", "mismatched", "stale", "raised", "raise refused")),
    *(f"store {fate}" for fate in ("not applied", "lost before", "lost after", "late", "held", "no answer in time")),
    *(f"read {kind}" for kind in ("tasks", "attempt", "lanes", "buckets", "held", "audit")),
    *(f"node says {event}" for event in (
        "welcome", "assignments", "heartbeat", "term_started", "leases_wanted", "outcomes_recorded",
        "cancel_requested", "lease_lost", "credit_returned", "draining",
    )),
    *(f"worker says {event}" for event in (
        "hello", "credit", "started", "succeeded", "failed", "returned", "heartbeat", "leases_held", "goodbye",
    )),
    *(f"verdict outcome_verdict_{verdict}" for verdict in ("recorded", "lease_lost", "unknown_token", "not_leader")),
    *(f"stop stop_reason_{reason}" for reason in ("cancelled", "timed_out")),
    *(f"answer {answer}" for answer in ("created", "existing", "prevented", "requested", "already_finished")),
    *(f"client {error}" for error in ("Unavailable", "OutcomeUncertain", "DeadlineExceeded", "TaskExists")),
    "node drained",
    "purged",
    "handler starts",
)  # fmt: skip


_OF_KIND: Final = {
    Kind.SOLO: (*(f"fault {fault}" for fault in SOLO_FAULTS), "node superseded"),
    Kind.CLUSTER: (
        *(f"fault {fault}" for fault in CLUSTER_FAULTS),
        *(f"node left {leaving}" for leaving in Leaving if leaving is not Leaving.NOTHING),
        *(f"node says {event}" for event in ("demand", "cluster_changed", "term_ended")),
        *(f"node passes {call} on" for call in ("SubmitTask", "SubmitTasks", "CancelTask")),
        "etcd txn applied",
        "store rebound",
        "clock accepted",
        "etcd lease granted",
    ),
}


def missing(kind: Kind, seen: Mapping[str, int]) -> list[str]:
    """Return what did not happen."""
    return [name for name in (*EXPECTED, *_OF_KIND[kind]) if not seen.get(name)]
