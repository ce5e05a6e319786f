"""What must hold, checked in the very step in which it could break.

The checker keeps a history of its own: it sees what the store applied, what nodes and workers said on the wire, and
what handlers did, and believes none of them alone. Invariants go by their numbers in `docs/reliability.md`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from simulation.clock import START, Reference
from simulation.loop import Process, SimulationLoop
from simulation.network import Status

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.fence import Fence
from duecourse.server.core.task import (
    HELD,
    TERMINAL,
    WAITING,
    Attempt,
    AttemptOutcome,
    Epoch,
    Progress,
    ShardId,
    Task,
    TaskKey,
    TaskState,
)
from duecourse.server.core.writes import Insert, Update
from duecourse.server.storage import CommitAnswer, Committed, Raised, RaiseRefused, Refused, ShardBatch, ShardRow, Stale
from duecourse.v1 import task_service_pb2, worker_service_pb2

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
_SAID: Final = {
    "succeeded": AttemptOutcome.SUCCEEDED,
    worker_service_pb2.FAILURE_KIND_RETRYABLE: AttemptOutcome.FAILED,
    worker_service_pb2.FAILURE_KIND_NON_RETRYABLE: AttemptOutcome.FAILED,
    worker_service_pb2.FAILURE_KIND_TIMED_OUT: AttemptOutcome.TIMED_OUT,
    worker_service_pb2.FAILURE_KIND_CANCELLED: AttemptOutcome.CANCELLED,
    "returned": AttemptOutcome.RETURNED,
}
_JUST_RESUMED: Final = 100 * bounds.MILLISECOND
_FAULTS_OF_OURS: Final = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)


@dataclass(slots=True)
class Grant:
    """An attempt, as the store's writes told it."""

    attempt: Attempt
    record: "Record"
    node: Process
    started_at: Micros | None = None
    said: AttemptOutcome | None = None
    """What its worker said of its end first."""

    @property
    def outcome(self) -> AttemptOutcome | None:
        """How it ended, None while it is open."""
        return self.attempt.outcome


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
    due_since: Micros = 0


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


class Checker:
    """See the module's docstring. Implements `network.Watcher` and `store.Observer`."""

    def __init__(self, loop: SimulationLoop, note: Callable[[str, str], None]) -> None:
        self.records: dict[TaskKey, Record] = {}
        self.grants: dict[bytes, Grant] = {}
        self.violations: list[Violation] = []
        self.coverage: Counter[str] = Counter()
        self.stored: set[TaskKey] = set()
        """All tasks that were ever stored."""
        self.changes_of_leader = 0
        """How often another process than before began a term of a shard."""
        self.reference = Reference(loop)
        """The store's clock."""
        self.strike: Callable[[str, Process], None] = lambda moment, process: None
        """Told of each moment at which a fault may strike."""
        self.is_calm: Callable[[str], bool] = lambda incarnation: False
        """Tells whether a worker has lived and been in reach for so long that none of its leases may be lost."""
        self.exists: Callable[[TaskKey], bool] = lambda key: True
        self._loop = loop
        self._note = note
        self._rows: dict[ShardId, tuple[Fence, Process, Micros]] = {}
        self._epochs: dict[ShardId, set[Epoch]] = {}
        """All that were ever given."""
        self._lost: set[TaskKey] = set()
        """Tasks of which the store has lost something."""

    def fail(self, invariant: str, text: str, key: TaskKey | None = None) -> None:
        """Note a violation. What a store has lost is not held against the nodes."""
        if key in self._lost:
            return
        self.violations.append(Violation(invariant, text, self._loop.now, key))
        self._note("!", f"{invariant}: {text}")

    def happened(self, moment: str, process: Process) -> None:
        """Count it, and let a fault strike."""
        self.coverage[moment] += 1
        if moment == "clock accepted":
            self.reference.accept()
        elif moment == "bound by force":
            for shard, (fence, process, at) in self._rows.items():
                self._rows[shard] = (Fence(shard, fence.epoch, b""), process, at)
        self.strike(moment, process)

    def knew_time(self, process: Process, at: Micros) -> None:
        """Note what a process knows of the store's clock."""
        self.reference.was_read(process, at)

    # What the store applies.

    def applied(self, process: Process, batches: Sequence[ShardBatch], answers: Mapping[ShardId, CommitAnswer]) -> None:
        """Check a commit."""
        for batch in batches:
            answer = answers[batch.fence.shard]
            self.coverage[f"store {type(answer).__name__.lower()}"] += 1
            row = self._rows.get(batch.fence.shard)
            is_current = row is not None and row[0] == batch.fence
            if isinstance(answer, Committed):
                if not is_current:
                    self.fail("S5", f"{process} wrote {batch.fence}, while {row} stands")
                self._committed(process, batch, answer)
            elif isinstance(answer, Stale) and is_current:
                self.fail("S5", f"{process} was refused under the current fence {batch.fence}")
            elif isinstance(answer, Refused):
                self.coverage["store refused data"] += 1
        self.strike("commit applied", process)

    def raised(self, process: Process, answers: Mapping[ShardId, Raised | RaiseRefused]) -> None:
        """Check that epochs grow."""
        for shard, answer in answers.items():
            if isinstance(answer, RaiseRefused):
                self.coverage["store raise refused"] += 1
                continue
            self.coverage["store raised"] += 1
            before = self._rows.get(shard)
            if before is not None and answer.fence.epoch <= before[0].epoch:
                self.fail("S6", f"epoch {answer.fence.epoch} of shard {shard} after {before[0].epoch}")
            given = self._epochs.setdefault(shard, set())
            if answer.fence.epoch in given:
                self.fail("S6", f"epoch {answer.fence.epoch} of shard {shard} for the second time")
            given.add(answer.fence.epoch)
            self._rows[shard] = (answer.fence, process, self._loop.now)
            self._note(process.name, f"leads shard {shard} in epoch {answer.fence.epoch}")
            self.changes_of_leader += before is not None and before[1] is not process
        self.strike("raised", process)

    def purged(self, process: Process, fence: Fence, ended_before: Micros) -> None:
        """Check that only what ended long ago was deleted, under the current fence."""
        row = self._rows.get(fence.shard)
        if row is None or row[0] != fence:
            self.fail("S5", f"{process} purged under {fence}, while {row} stands")
        for key, record in self.records.items():
            if record.task.shard != fence.shard or record.is_gone or self.exists(key):
                continue
            record.is_gone = True
            self.coverage["purged"] += 1
            end_time = record.progress.end_time
            if record.progress.state not in TERMINAL or end_time is None or end_time >= ended_before:
                self.fail("S1", f"{key.task_id} was deleted as {record.progress.state}", key)

    def holder(self, shard: ShardId) -> Process | None:
        """Return who began the latest term of a shard."""
        row = self._rows.get(shard)
        return None if row is None else row[1]

    def led_since(self, shard: ShardId) -> Micros:
        """Return when the latest term of a shard began."""
        row = self._rows.get(shard)
        return 0 if row is None else row[2]

    @property
    def has_fallen_back(self) -> bool:
        """Whether the store has lost something."""
        return bool(self._lost)

    def fell_back(self, rows: Mapping[ShardId, ShardRow], kept: Mapping[TaskKey, Progress]) -> None:
        """Go on from what the store still holds."""
        for shard, row in rows.items():
            if shard in self._rows:
                _, process, at = self._rows[shard]
                self._rows[shard] = (Fence(shard, row.epoch, row.holder), process, at)
        for key, record in list(self.records.items()):
            progress = kept.get(key)
            if (progress is None) if record.is_gone else (progress is record.progress):
                continue
            self._lost.add(key)
            if progress is None:
                record.is_gone = True
                del self.records[key]
            else:
                record.progress, record.is_gone = progress, False

    def superseded(self, process: Process) -> None:
        """Check that a node that gave up because of another one was right."""
        if not any(holder is not process and at >= process.began_at for _, holder, at in self._rows.values()):
            self.fail("L4", f"{process} gave up, though nobody has taken a shard from it")

    def _committed(self, process: Process, batch: ShardBatch, answer: Committed) -> None:
        for index, insert in enumerate(batch.inserts):
            known = self.records.get(insert.task.key)
            is_there = known is not None and not known.is_gone
            if (index in answer.taken) != is_there:
                self.fail("S2", f"{insert.task.task_id}: taken is {index in answer.taken}", insert.task.key)
            elif is_there:
                self.coverage["store taken"] += 1
            else:
                self._inserted(process, insert)
        for index, update in enumerate(batch.updates):
            known = self.records.get(update.task.key)
            fits = known is not None and not known.is_gone
            fits = fits and known is not None and known.progress.revision == update.progress.revision - 1
            if (index in answer.mismatched) == fits:
                self.fail("S12", f"{update.task.task_id}: mismatched is {index in answer.mismatched}", update.task.key)
            elif not fits:
                self.coverage["store mismatched"] += 1
            elif known is not None:
                self._updated(process, known, update, batch.fence)

    def _inserted(self, process: Process, insert: Insert) -> None:
        task = insert.task
        progress = task.progress
        if progress.state is not _P or progress.revision != 1 or progress.attempt is not None:
            self.fail("S12", f"{task.task_id} came into being as {progress}", task.key)
        self.stored.add(task.key)
        self.records[task.key] = Record(task, insert.submission.payload, progress, due_since=self._loop.now)
        self.coverage["none to pending"] += 1
        self._note(process.name, f"{task.task_id} stored, due {self._relative(progress.due_time)}")

    def _updated(self, process: Process, record: Record, update: Update, fence: Fence) -> None:
        key = record.task.key
        before, after = record.progress, update.progress
        step = (before.state, after.state)
        self.coverage[f"{before.state} to {after.state}"] += 1
        self._note(process.name, f"{key.task_id} {before.state} to {after.state} {_told(after)}")
        if before.state in TERMINAL:
            self.fail("S12", f"{key.task_id} was {before.state} and became {after.state}", key)
        elif step not in TRANSITIONS:
            self.fail("S12", f"{key.task_id}: there is no way from {before.state} to {after.state}", key)
        if (after.state in HELD) != (after.attempt is not None and after.attempt.outcome is None):
            self.fail("S4", f"{key.task_id} is {after.state} with {after.attempt}", key)
        is_ended = after.state in TERMINAL
        if is_ended != (after.due_time is None) or is_ended != (after.end_time is not None):
            self.fail("S12", f"{key.task_id} is {after.state}, due {after.due_time}, ended {after.end_time}", key)
        if not 0 <= after.attempts_used <= record.task.policy.max_attempts:
            self.fail("S11", f"{key.task_id} has used {after.attempts_used} attempts", key)
        if before.cancel_requested and not (
            after.cancel_requested and (after.state in HELD or after.state in (_S, _C))
        ):
            self.fail("S9", f"{key.task_id} was to be cancelled and is {after.state}", key)
        if before.state in HELD:
            self._held_updated(record, before, after)
        elif after.state in HELD:
            self._granted(process, record, update, fence)
        elif after.attempts_used != before.attempts_used or after.attempt is not before.attempt:
            self.fail("S11", f"{key.task_id}: {before.attempts_used} attempts became {after.attempts_used}", key)
        record.progress = after

    def _granted(self, process: Process, record: Record, update: Update, fence: Fence) -> None:
        key = record.task.key
        before, after = record.progress, update.progress
        attempt = after.attempt
        assert attempt is not None
        if attempt.lease_token in self.grants:
            self.fail("S4", f"{key.task_id}: its lease token was granted before", key)
        if not attempt.number == after.attempt_count == before.attempt_count + 1:
            self.fail("S11", f"{key.task_id}: attempt {attempt.number} after {before.attempt_count}", key)
        if after.attempts_used != before.attempts_used + 1 or not update.is_grant:
            self.fail("S11", f"{key.task_id}: a grant that is not counted", key)
        if attempt.epoch != fence.epoch:
            self.fail("S4", f"{key.task_id}: granted in epoch {attempt.epoch} under {fence}", key)
        if update.archive is not before.attempt and update.archive != before.attempt:
            self.fail("S18", f"{key.task_id}: its last attempt is not kept", key)
        last = before.attempt
        if last is not None and attempt.fencing_token <= last.fencing_token:
            self.fail("P4", f"{key.task_id}: fencing token {attempt.fencing_token} after {last.fencing_token}", key)
        due_time = before.due_time or 0
        if attempt.lease_time < due_time or due_time > self.reference.reached(process):
            self.fail("S3", f"{key.task_id} was granted {due_time - attempt.lease_time} us before it was due", key)
        self.grants[attempt.lease_token] = record.grants[attempt.number] = Grant(attempt, record, process)

    def _held_updated(self, record: Record, before: Progress, after: Progress) -> None:
        key = record.task.key
        was, attempt = before.attempt, after.attempt
        assert was is not None
        if attempt is None or attempt.lease_token != was.lease_token or attempt.number != was.number:
            self.fail("S4", f"{key.task_id}: attempt {was} became {attempt}", key)
            return
        grant = self.grants[was.lease_token]
        grant.attempt = attempt
        is_returned = attempt.outcome is AttemptOutcome.RETURNED
        if attempt.outcome is not None:
            self.coverage[f"attempt {attempt.outcome}"] += 1
        if attempt.outcome is AttemptOutcome.LEASE_LOST and self.is_calm(attempt.incarnation):
            self.fail("P4", f"{key.task_id}: the lease of a worker that lives and is in reach is lost", key)
        if after.attempts_used != before.attempts_used - is_returned:
            self.fail("S11", f"{key.task_id}: {before.attempts_used} attempts became {after.attempts_used}", key)
        if is_returned and grant.started_at is not None:
            self.fail("S11", f"{key.task_id}: attempt {was.number} had begun and is said to be unstarted", key)
        if after.state in WAITING and not is_returned and after.attempts_used >= record.task.policy.max_attempts:
            self.fail("S11", f"{key.task_id} waits for an attempt more than it has", key)

    # What is said.

    def client_says(self, client: Process, method: str, message: Any) -> None:
        """Remember what a worker says of its attempts' ends."""
        if not isinstance(message, worker_service_pb2.StreamAssignmentsRequest):
            if not client.name.startswith("client"):
                self.coverage[f"node passes {method.rpartition('/')[2]} on"] += 1
            return
        event = message.WhichOneof("event")
        self.coverage[f"worker says {event}"] += 1
        match event:
            case "succeeded":
                for success in message.succeeded.attempts:
                    self._said(success.attempt.lease_token, _SAID["succeeded"])
            case "failed":
                for failed in message.failed.attempts:
                    self._said(failed.attempt.lease_token, _SAID[failed.kind])
            case "returned":
                for reference in message.returned.attempts:
                    self._said(reference.lease_token, _SAID["returned"])
            case "heartbeat" | "credit":
                return
        self._note(client.name, f"says {event} {_brief(message)}")

    def _said(self, token: bytes, outcome: AttemptOutcome) -> None:
        grant = self.grants.get(token)
        if grant is None:
            self.fail("S13", f"a worker tells of {outcome} under a token that nobody granted")
        elif grant.said is None:
            grant.said = outcome
        elif grant.said is not outcome:
            self.fail("S13", f"a worker said {grant.said} and then {outcome}", grant.record.task.key)

    def server_says(self, server: Process, client: Process, method: str, request: Any, message: Any) -> None:
        """Check that nothing leaves a node before it is true in the store."""
        match message:
            case worker_service_pb2.StreamAssignmentsResponse():
                self._stream_says(server, client, message)
            case task_service_pb2.SubmitTaskResponse():
                self._acknowledged(client, request.task, message.submitted)
                self.strike("submission answered", server)
            case task_service_pb2.SubmitTasksResponse():
                for task, result in zip(request.tasks, message.results, strict=True):
                    if result.HasField("submitted"):
                        self._acknowledged(client, task, result.submitted)
                    elif result.error.code in [code.value[0] for code in _FAULTS_OF_OURS]:
                        self.fail("S20", f"{task.task_id}: {result.error.message}")
                self.strike("submission answered", server)
            case task_service_pb2.CancelTaskResponse():
                self._cancelled(request, message)
            case _:
                pass

    def _stream_says(self, server: Process, client: Process, message: Any) -> None:
        event = message.WhichOneof("event")
        self.coverage[f"node says {event}"] += 1
        match event:
            case "assignments":
                for assignment in message.assignments.assignments:
                    grant = self.grants.get(assignment.lease_token)
                    if grant is None:
                        self.fail("S4", f"{assignment.task.task_id} was assigned before its grant was durable")
                self.strike("assignments said", server)
            case "outcomes_recorded":
                for token in message.outcomes_recorded.recorded:
                    self._verdict(token, worker_service_pb2.OUTCOME_VERDICT_RECORDED)
                for other in message.outcomes_recorded.others:
                    self._verdict(other.lease_token, other.verdict)
                self.strike("outcomes recorded", server)
            case "cancel_requested":
                for token in message.cancel_requested.lease_tokens:
                    self._stop_asked(token, message.cancel_requested.reason)
                self.strike("cancel requested", server)
            case "lease_lost":
                for token in message.lease_lost.lease_tokens:
                    grant = self.grants.get(token)
                    if grant is not None and grant.outcome is None and not grant.record.is_gone:
                        self.fail("S13", "a worker is told that a current lease is lost", grant.record.task.key)
            case "heartbeat":
                return
        self._note(server.name, f"says {event} to {client} {_brief(message)}")

    def _verdict(self, token: bytes, verdict: int) -> None:
        grant = self.grants.get(token)
        self.coverage[f"verdict {worker_service_pb2.OutcomeVerdict.Name(verdict).lower()}"] += 1  # type: ignore[arg-type]
        key = None if grant is None else grant.record.task.key
        is_known = grant is not None and not grant.record.is_gone
        match verdict:
            case worker_service_pb2.OUTCOME_VERDICT_RECORDED:
                if grant is None or grant.outcome is None:
                    self.fail("S13", "an outcome is said to be recorded, and is not", key)
                elif grant.outcome is not grant.said and (grant.outcome, grant.said) != (
                    AttemptOutcome.LEASE_LOST,
                    AttemptOutcome.RETURNED,
                ):
                    self.fail("S13", f"{grant.said} is said to be recorded, {grant.outcome} is", key)
            case worker_service_pb2.OUTCOME_VERDICT_LEASE_LOST:
                if is_known and grant is not None and grant.outcome is None:
                    self.fail("S13", "an outcome is refused, while its attempt is open", key)
            case worker_service_pb2.OUTCOME_VERDICT_UNKNOWN_TOKEN:
                if is_known:
                    self.fail("S13", "a token is said to be unknown, and is not", key)
            case _:
                pass

    def _stop_asked(self, token: bytes, reason: int) -> None:
        grant = self.grants.get(token)
        self.coverage[f"stop {worker_service_pb2.StopReason.Name(reason).lower()}"] += 1  # type: ignore[arg-type]
        if reason == worker_service_pb2.STOP_REASON_CANCELLED and (
            grant is None or not grant.record.progress.cancel_requested
        ):
            key = None if grant is None else grant.record.task.key
            self.fail("S9", "a worker is asked to stop before the cancellation is durable", key)

    def _acknowledged(self, client: Process, asked: Any, submitted: Any) -> None:
        task_id, created = asked.task_id, submitted.created
        key = TaskKey("default", task_id)
        record = self.records.get(key)
        self.coverage["answer created" if created else "answer existing"] += 1
        if record is None:
            self.fail("S1", f"{task_id} is acknowledged and not stored", key)
            return
        if record.acknowledged_at is None:
            record.acknowledged_at = self._loop.now
        if record.payload != asked.payload:
            self.fail("S2", f"{task_id} is acknowledged to another request than the one that is stored", key)
        if record.task.uid != submitted.uid:
            self.fail("S2", f"{task_id} is acknowledged under another uid", key)
        if client.name.startswith("client"):
            # What one node tells another is passed on.
            if created and record.was_told_created:
                self.fail("S2", f"{task_id} is said to be created twice", key)
            record.was_told_created |= created

    def _cancelled(self, request: Any, answer: Any) -> None:
        key = TaskKey("default", request.task_id)
        record = self.records.get(key)
        result = task_service_pb2.CancelResult.Name(answer.result).removeprefix("CANCEL_RESULT_")
        self.coverage[f"answer {result.lower()}"] += 1
        self._note("client", f"is told {result} of {request.task_id}")
        if record is None:
            self.fail("S9", f"{request.task_id} is said to be {result} and was never there", key)
            return
        progress = record.progress
        match result:
            case "PREVENTED":
                record.is_prevented = True
                if progress.state is not _C:
                    self.fail("S8", f"{key.task_id} is said to be prevented and is {progress.state}", key)
                latest = record.grants.get(progress.attempt_count)
                if latest is not None and latest.outcome is AttemptOutcome.RETURNED and latest.started_at is not None:
                    self.fail("S8", f"{key.task_id} is said to be prevented, and had begun", key)
                may_run = any(grant.started_at is not None for grant in record.grants.values() if _is_lost(grant))
                if may_run and not answer.earlier_attempt_may_run:
                    self.fail("S8", f"{key.task_id} is said to be prevented, and an earlier attempt may run", key)
            case "REQUESTED":
                if not progress.cancel_requested and not record.is_gone:
                    self.fail("S9", f"the cancellation of {key.task_id} is answered and not durable", key)
            case "ALREADY_FINISHED":
                if progress.state not in TERMINAL:
                    self.fail("S9", f"{key.task_id} is said to be finished and is {progress.state}", key)

    def server_refuses(self, server: Process, method: str, request: Any, status: Status, since: Micros) -> None:
        """Check that nothing but what may go wrong goes wrong."""
        self.coverage[f"refused {method.rpartition('/')[2]} {status.code.name}"] += 1
        self._note(server.name, f"refuses {method.rpartition('/')[2]}: {status.code.name} {status.details}")
        if status.code in _FAULTS_OF_OURS:
            self.fail("S20", f"{server} ended {method} with {status.code.name}: {status.details}")
        elif method.endswith("StreamAssignments") and status.code is grpc.StatusCode.INVALID_ARGUMENT:
            self.fail("S20", f"a stream was ended for a violation of the protocol: {status.details}")
        elif status.code is grpc.StatusCode.NOT_FOUND:
            record = self.records.get(TaskKey("default", request.task_id))
            acknowledged_at = None if record is None or record.is_gone else record.acknowledged_at
            if record is not None and acknowledged_at is not None and acknowledged_at < since:
                self.fail("S1", f"{request.task_id} was acknowledged and is not found", record.task.key)

    # What handlers do.

    def started(self, worker: Process, token: bytes, task_id: str, attempt: int, payload: bytes) -> None:
        """Check the start of a handler."""
        key = TaskKey("default", task_id)
        grant = self.grants.get(token)
        self._note(worker.name, f"starts {task_id}, attempt {attempt}")
        if grant is None or grant.record.task.key != key or grant.attempt.number != attempt:
            self.fail("S4", f"{task_id} was started without a durable grant", key)
            return
        record = grant.record
        if grant.started_at is not None:
            self.fail("S4", f"{task_id}: attempt {attempt} was started twice", key)
        grant.started_at = self._loop.now
        if payload != record.payload:
            self.fail("S15", f"{task_id}: its payload is not what was submitted", key)
        if grant.outcome is AttemptOutcome.RETURNED:
            self.fail("S11", f"{task_id}: attempt {attempt} was said to be unstarted, and begins", key)
        elif record.is_prevented:
            self.fail("S8", f"{task_id} was said to be prevented, and begins", key)
        elif grant.outcome is not None and self._loop.now - worker.resumed_at > _JUST_RESUMED:
            self.fail("S7", f"{task_id}: attempt {attempt} begins after it has ended {grant.outcome}", key)
        begun = sum(one.started_at is not None for one in record.grants.values())
        if begun > record.task.policy.max_attempts:
            self.fail("S11", f"{task_id} was begun {begun} times", key)
        self.coverage["handler starts"] += 1

    # At the end.

    def check_store(self, found: Sequence[Task]) -> None:
        """Check that the store holds what it was told, no more and no less."""
        kept = {task.key: task for task in found}
        for key, record in self.records.items():
            if record.is_gone:
                continue
            task = kept.pop(key, None)
            if task is None:
                self.fail("S1", f"{key.task_id} is lost", key)
            elif task.progress != record.progress:
                self.fail("S18", f"{key.task_id} is {task.progress} and should be {record.progress}", key)
        for key in kept:
            self.fail("S18", f"{key.task_id} came from nowhere", key)

    def unfinished(self) -> list[Record]:
        """Return the tasks that have not ended."""
        return [record for record in self.records.values() if record.progress.state not in TERMINAL]

    def has_lost(self, key: TaskKey) -> bool:
        """Tell whether the store has lost something of a task."""
        return key in self._lost

    def _relative(self, utc: Micros | None) -> str:
        return "never" if utc is None else f"{(utc - START) / bounds.SECOND:.3f}"


def _is_lost(grant: Grant) -> bool:
    outcome = grant.outcome
    return outcome is AttemptOutcome.LEASE_LOST or (outcome is AttemptOutcome.TIMED_OUT and grant.said is not outcome)


def _told(progress: Progress) -> str:
    attempt = progress.attempt
    parts = [f"r{progress.revision}"]
    if attempt is not None:
        parts.append(f"attempt {attempt.number} {attempt.outcome or 'open'} {attempt.lease_token.hex()[:6]}")
    if progress.cancel_requested:
        parts.append("cancel requested")
    if progress.failure_reason:
        parts.append(str(progress.failure_reason))
    return " ".join(parts)


def _brief(message: Any) -> str:
    """Say which attempts a message is about."""
    event = getattr(message, message.WhichOneof("event") or "", None)
    tokens: list[bytes] = []
    for name in ("lease_tokens", "recorded"):
        tokens += getattr(event, name, ())
    for name in ("attempts", "assignments", "leases", "others"):
        for one in getattr(event, name, ()):
            tokens.append(
                one.attempt.lease_token
                if hasattr(one, "attempt") and hasattr(one.attempt, "lease_token")
                else one.lease_token
            )
    return " ".join(token.hex()[:6] for token in tokens)
