"""What must hold, checked in the very step in which it could break.

The checker keeps a history of its own: it sees what the store applied, what nodes and workers said on the wire, and
what handlers did, and believes none of them alone. Invariants go by their numbers in `docs/reliability.md`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from simulation.clock import Reference
from simulation.history import Grant, History, Record
from simulation.loop import Process, SimulationLoop
from simulation.network import Status
from simulation.store_checks import StoreChecks
from simulation.terms import Terms
from simulation.wire_checks import WireChecks

from duecourse.model.instants import Micros
from duecourse.server.core.fence import Fence
from duecourse.server.core.task import TERMINAL, AttemptOutcome, Progress, ShardId, Task, TaskKey
from duecourse.server.storage import CommitAnswer, Raised, RaiseRefused, ShardBatch, ShardRow


class Checker:
    """See the module's docstring. Implements `network.Watcher` and `store.Observer`.

    What is seen goes to the checks that it concerns; `trace` takes in what they tell of it, None: nobody reads it.
    """

    def __init__(self, loop: SimulationLoop, trace: Callable[[str, str], None] | None) -> None:
        self.reference = Reference(loop)
        """The store's clock."""
        self._history = History(loop, trace)
        self._terms = Terms(self._history)
        self._store = StoreChecks(self._history, self._terms, self.reference)
        self._wire = WireChecks(self._history)
        self.records = self._history.records
        self.violations = self._history.violations
        self.coverage = self._history.coverage
        self.stored = self._history.stored
        self.fail = self._history.fail

    def attach(
        self,
        *,
        strike: Callable[[str, Process], None],
        is_calm: Callable[[str], bool],
        is_counted_on: Callable[[bytes], bool],
        find: Callable[[TaskKey], Task | None],
        retention: Micros,
    ) -> None:
        """Attach it to a run; `History.strike`, `StoreChecks.is_calm` and `StoreChecks.find` say what for."""
        self._history.strike = strike
        self._store.is_calm = is_calm
        self._store.is_counted_on = is_counted_on
        self._store.find = find
        self._store.retention = retention

    # What the store and etcd do.

    def applied(self, process: Process, batches: Sequence[ShardBatch], answers: Mapping[ShardId, CommitAnswer]) -> None:
        """Check a commit."""
        self._store.applied(process, batches, answers)

    def raised(self, process: Process, answers: Mapping[ShardId, Raised | RaiseRefused]) -> None:
        """Check the beginning of terms."""
        self._terms.raised(process, answers)

    def purged(self, process: Process, fence: Fence, ended_before: Micros) -> None:
        """Check a purge."""
        self._store.purged(process, fence, ended_before)

    def set_aside(self, process: Process, fence: Fence, key: TaskKey) -> None:
        """Check the end of a task whose record does not decode."""
        self._store.set_aside(process, fence, key)

    def spoiled(self, key: TaskKey) -> None:
        """Note that a task's record decodes no more."""
        self._history.spoiled.add(key)

    def fell_back(self, rows: Mapping[ShardId, ShardRow], kept: Mapping[TaskKey, Progress]) -> None:
        """Go on from what the store still holds."""
        self._terms.fell_back(rows)
        self._store.fell_back(kept)

    def knew_time(self, process: Process, at: Micros) -> None:
        """Note what a process knows of the store's clock."""
        self.reference.was_read(process, at)

    def happened(self, moment: str, process: Process) -> None:
        """Count it, and let a fault strike."""
        self.coverage[moment] += 1
        if moment == "clock accepted":
            self.reference.accept()
        elif moment == "bound by force":
            self._terms.bound_by_force()
        elif moment == "store refused":
            self._history.refused.add(process)
        self._history.strike(moment, process)

    # What is said.

    def client_says(self, client: Process, method: str, message: Any) -> None:
        """Check what a client or a worker says."""
        self._wire.client_says(client, method, message)

    def server_says(self, server: Process, client: Process, method: str, request: Any, message: Any) -> None:
        """Check what a node says."""
        self._wire.server_says(server, client, method, request, message)

    def server_refuses(self, server: Process, method: str, request: Any, status: Status, since: Micros) -> None:
        """Check what a node refuses."""
        self._wire.server_refuses(server, method, request, status, since)

    # What nodes and handlers do.

    def superseded(self, process: Process) -> None:
        """Check that a node that gave up because of another one was right."""
        self._terms.superseded(process)

    def started(self, worker: Process, token: bytes, task_id: str, attempt: int, payload: bytes) -> None:
        """Check the start of a handler."""
        key = TaskKey("default", task_id)
        grant = self._history.grants.get(token)
        if self._history.is_traced:
            self._history.note(worker.name, f"starts {task_id}, attempt {attempt}")
        if grant is None or grant.record.task.key != key or grant.attempt.number != attempt:
            self.fail("S4", f"{task_id} was started without a durable grant", key)
            return
        record = grant.record
        if grant.started_at is not None:
            self.fail("S4", f"{task_id}: attempt {attempt} was started twice", key)
        grant.started_at = self._history.now
        if payload != record.payload:
            self.fail("S15", f"{task_id}: its payload is not what was submitted", key)
        if grant.outcome is AttemptOutcome.RETURNED:
            self.fail("S11", f"{task_id}: attempt {attempt} was said to be unstarted, and begins", key)
        elif record.is_prevented:
            self.fail("S8", f"{task_id} was said to be prevented, and begins", key)
        elif grant.outcome is not None:
            self.fail("S7", f"{task_id}: attempt {attempt} begins after it has ended {grant.outcome}", key)
        begun = sum(one.started_at is not None for one in record.grants.values())
        if begun > record.task.policy.max_attempts:
            self.fail("S11", f"{task_id} was begun {begun} times", key)
        self.coverage["handler starts"] += 1

    # What is known in the end, and meanwhile.

    def check_store(self, found: Sequence[Task]) -> None:
        """Check that the store holds what it was told, no more and no less."""
        self._store.check_store(found)

    def unfinished(self) -> list[Record]:
        """Return the tasks that have not ended."""
        return [record for record in self.records.values() if record.progress.state not in TERMINAL]

    def grants_from(self, number: int) -> list[Grant]:
        """Return what was granted, but for the first `number` grants."""
        return list(islice(self._history.grants.values(), number, None))

    def has_lost(self, key: TaskKey) -> bool:
        """Tell whether the store has lost something of a task."""
        return key in self._history.lost

    def is_spoiled(self, key: TaskKey) -> bool:
        """Tell whether a task's record decodes no more."""
        return key in self._history.spoiled

    @property
    def shards_behind(self) -> Collection[ShardId]:
        """Return the shards whose leaders may know more than a store that has lost something."""
        return self._history.shards_behind

    def was_behind_since(self, at: Micros) -> bool:
        """Tell whether there has been such a shard since a time."""
        return bool(self._history.shards_behind) or self._history.behind_until >= at

    @property
    def changes_of_leader(self) -> int:
        """How often another process than before began a term of a shard."""
        return self._terms.changes_of_leader

    def holder(self, shard: ShardId) -> Process | None:
        """Return who began the latest term of a shard."""
        term = self._terms.latest(shard)
        return None if term is None else term.holder

    def led_since(self, shard: ShardId) -> Micros:
        """Return when the latest term of a shard began."""
        term = self._terms.latest(shard)
        return 0 if term is None else term.began_at
