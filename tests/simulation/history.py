"""A history of a run's tasks: what was stored and granted, what is broken, and how often what happened.

All checks write into one, and read in it what the others have seen.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from simulation.loop import Process, SimulationLoop

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import Attempt, AttemptOutcome, Progress, ShardId, Task, TaskKey, TaskState

_P, _L, _R, _W = TaskState.PENDING, TaskState.LEASED, TaskState.RUNNING, TaskState.RETRY_WAIT
_S, _F, _C = TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED
TRANSITIONS: Final = frozenset(
    (
        (_P, _L), (_P, _C), (_P, _F),
        (_W, _L), (_W, _C), (_W, _F),
        (_L, _L), (_L, _R), (_L, _P), (_L, _W), (_L, _S), (_L, _F), (_L, _C),
        (_R, _R), (_R, _W), (_R, _S), (_R, _F), (_R, _C),
    )
)  # fmt: skip
"""The task's life, as `docs/semantics.md` draws it; renewals and requested cancellations keep the state."""


@dataclass(slots=True)
class Grant:
    """An attempt, as the store's writes told it."""

    attempt: Attempt
    record: "Record"
    node: Process
    at: Micros
    due_time: Micros
    """Of the task, when it was granted."""
    started_at: Micros | None = None
    said: AttemptOutcome | None = None
    """What its worker said of its end first."""
    is_said_to_be_final: bool = False
    """Whether it said that another attempt is of no use."""

    @property
    def outcome(self) -> AttemptOutcome | None:
        """How it ended, None while it is open."""
        return self.attempt.outcome

    @property
    def is_recorded_as_said(self) -> bool:
        """Whether it ended by the word of its worker."""
        return self.outcome is not None and self.outcome is self.said and self.attempt.outcome_digest is not None

    @property
    def is_lost(self) -> bool:
        """Whether it was given up without a word of its worker, so that its handler may run on."""
        outcome = self.outcome
        return outcome is AttemptOutcome.LEASE_LOST or (
            outcome is AttemptOutcome.TIMED_OUT and self.said is not outcome
        )


@dataclass(slots=True)
class Record:
    """A task, as the store's writes told it."""

    task: Task
    payload: bytes
    progress: Progress
    grants: dict[int, Grant] = field(default_factory=dict)
    acknowledged_at: Micros | None = None
    was_told_created: bool = False
    is_prevented: bool = False
    is_gone: bool = False
    """Deleted after its retention."""
    is_read_again: bool = False
    """Whether its leader had reason to read it although it was in memory: a revision did not match."""
    listed: set[bytes] = field(default_factory=set)
    """The tokens of its leases that workers have listed in its shard's term: an older one has its leader read it."""
    changed_at: Micros = 0


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken."""

    invariant: str
    text: str
    at: Micros
    key: TaskKey | None

    def __str__(self) -> str:
        """Say it in a line."""
        return f"{self.invariant} at {self.at / bounds.SECOND:.6f}: {self.text}"


class History:
    """See the module's docstring. `trace` takes in a line of who did what; None: nobody reads it."""

    def __init__(self, loop: SimulationLoop, trace: Callable[[str, str], None] | None) -> None:
        self.records: dict[TaskKey, Record] = {}
        self.grants: dict[bytes, Grant] = {}
        """By lease token."""
        self.violations: list[Violation] = []
        self.coverage: Counter[str] = Counter()
        self.stored: set[TaskKey] = set()
        """All tasks that were ever stored."""
        self.lost: set[TaskKey] = set()
        """Tasks of which the store has lost something."""
        self.spoiled: set[TaskKey] = set()
        """Tasks whose records decode no more."""
        self.cancel_asked: set[TaskKey] = set()
        """Tasks that clients wanted to cancel: a cancellation may be given up, and its task read again, by a node
        whose commits were `refused`."""
        self.refused: set[Process] = set()
        self.shards_behind: set[ShardId] = set()
        """Shards whose leaders may know more than a store that has lost something, until they begin a new term."""
        self.behind_until: Micros = -1
        """When the last one of those began a new term."""
        self.strike: Callable[[str, Process], None] = lambda moment, process: None
        """Told of each moment at which a fault may strike."""
        self.is_traced = trace is not None
        """Whether anybody reads the notes: ask before making one, which costs more than most checks."""
        self._loop = loop
        self._trace = trace

    @property
    def now(self) -> Micros:
        """How long the run has lasted."""
        return self._loop.now

    def fail(self, invariant: str, text: str, key: TaskKey | None = None) -> None:
        """Note a violation. What a store has lost is not held against the nodes."""
        if key in self.lost:
            return
        self.violations.append(Violation(invariant, text, self.now, key))
        self.note("!", f"{invariant}: {text}")

    def note(self, who: str, text: str) -> None:
        """Write a line of the trace."""
        if self._trace is not None:
            self._trace(who, text)
