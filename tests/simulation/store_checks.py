"""What must hold of what the store applies: every step of every task, its attempts, and what is deleted."""

from collections.abc import Callable, Mapping, Sequence

from simulation import endings
from simulation.clock import START, Reference
from simulation.history import TRANSITIONS, Grant, History, Record
from simulation.loop import Process
from simulation.terms import Terms

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.fence import Fence
from duecourse.server.core.task import (
    HELD,
    TERMINAL,
    WAITING,
    AttemptOutcome,
    FailureReason,
    Progress,
    ShardId,
    Task,
    TaskKey,
    TaskState,
)
from duecourse.server.core.writes import Insert, Update
from duecourse.server.storage import CommitAnswer, Committed, ShardBatch, Stale


class StoreChecks:
    """See the module's docstring."""

    def __init__(self, history: History, terms: Terms, reference: Reference) -> None:
        self.is_calm: Callable[[str], bool] = lambda incarnation: False
        """Tells whether a worker has lived and been in reach for so long that none of its leases may be lost."""
        self.is_counted_on: Callable[[bytes], bool] = lambda token: False
        """Tells whether a worker that lives takes a lease for its own for some time yet."""
        self.find: Callable[[TaskKey], Task | None] = lambda key: None
        """Finds a task in the store."""
        self.retention: Micros = 0
        self._history = history
        self._terms = terms
        self._reference = reference
        self._fail = history.fail
        self._coverage = history.coverage

    def applied(self, process: Process, batches: Sequence[ShardBatch], answers: Mapping[ShardId, CommitAnswer]) -> None:
        """Check a commit."""
        for batch in batches:
            answer = answers[batch.fence.shard]
            if isinstance(answer, Committed):
                self._terms.wrote(process, batch.fence, "wrote")
                self._committed(process, batch, answer)
            elif isinstance(answer, Stale) and self._terms.is_current(batch.fence):
                self._fail("S5", f"{process} was refused under the current fence {batch.fence}")
        self._history.strike("commit applied", process)

    def purged(self, process: Process, fence: Fence, ended_before: Micros) -> None:
        """Check that only what ended long ago was deleted, under the current fence."""
        self._terms.wrote(process, fence, "purged under")
        for key, record in self._history.records.items():
            if record.task.shard != fence.shard or record.is_gone or self.find(key) is not None:
                continue
            record.is_gone = True
            self._coverage["purged"] += 1
            end_time = record.progress.end_time
            if record.progress.state not in TERMINAL or end_time is None or end_time >= ended_before:
                self._fail("S1", f"{key.task_id} was deleted as {record.progress.state}", key)
            elif end_time > self._reference.reached(process) - self.retention:
                self._fail("S1", f"{key.task_id} was deleted before its retention was over", key)

    def set_aside(self, process: Process, fence: Fence, key: TaskKey) -> None:
        """Check that only what does not decode, and its leader has not in memory, was ended for that."""
        self._terms.wrote(process, fence, "set a task aside under")
        record, task = self._history.records.get(key), self.find(key)
        if key not in self._history.spoiled or record is None or task is None or record.progress.state in TERMINAL:
            self._fail("S1", f"{key.task_id} was set aside, and decodes, or had ended", key)
            return
        attempt = record.progress.attempt
        is_held = record.progress.state in HELD
        is_its_own = is_held and attempt is not None and attempt.epoch == fence.epoch
        # It cannot be seen when the leader takes a list in: the lease may have been the current one still.
        is_other_listed = attempt is not None and bool(record.listed - {attempt.lease_token})
        is_given_up = key in self._history.cancel_asked and process in self._history.refused
        may_be_read = record.is_read_again or is_other_listed or is_given_up
        if is_its_own and not may_be_read:
            self._fail("S1", f"{key.task_id} was set aside, and its leader had its lease", key)
        self._coverage[f"set aside {'held' if is_held else 'waiting'}"] += 1
        if (task.progress.state, task.progress.failure_reason) != (TaskState.FAILED, FailureReason.RECORD_CORRUPT):
            self._fail("S12", f"{key.task_id} was set aside, and is {task.progress}", key)
        record.progress = task.progress
        record.changed_at = self._history.now

    def fell_back(self, kept: Mapping[TaskKey, Progress]) -> None:
        """Go on from the tasks that the store still holds."""
        for key, record in list(self._history.records.items()):
            progress = kept.get(key)
            if (progress is None) if record.is_gone else (progress is record.progress):
                continue
            self._history.lost.add(key)
            self._history.shards_behind.add(record.task.shard)
            if progress is None:
                record.is_gone = True
                del self._history.records[key]
            else:
                record.progress, record.is_gone = progress, False

    def check_store(self, found: Sequence[Task]) -> None:
        """Check that the store holds what it was told, no more and no less."""
        kept = {task.key: task for task in found}
        for key, record in self._history.records.items():
            if not record.is_gone:
                self._check_kept(key, record, kept.pop(key, None))
        for key in kept:
            self._fail("S18", f"{key.task_id} came from nowhere", key)

    def _check_kept(self, key: TaskKey, record: Record, task: Task | None) -> None:
        if task is None:
            self._fail("S1", f"{key.task_id} is lost", key)
        elif task.progress != record.progress:
            self._fail("S18", f"{key.task_id} is {task.progress} and should be {record.progress}", key)

    def _committed(self, process: Process, batch: ShardBatch, answer: Committed) -> None:
        for index, insert in enumerate(batch.inserts):
            known = self._history.records.get(insert.task.key)
            is_there = known is not None and not known.is_gone
            if (index in answer.taken) != is_there:
                self._fail("S2", f"{insert.task.task_id}: taken is {index in answer.taken}", insert.task.key)
            elif is_there:
                self._coverage["store taken"] += 1
            else:
                self._inserted(process, insert)
        for index, update in enumerate(batch.updates):
            known = self._history.records.get(update.task.key)
            fits = known is not None and not known.is_gone
            fits = fits and known is not None and known.progress.revision == update.progress.revision - 1
            if (index in answer.mismatched) == fits:
                self._fail("S12", f"{update.task.task_id}: mismatched is {index in answer.mismatched}", update.task.key)
            elif not fits:
                self._coverage["store mismatched"] += 1
                if known is not None:
                    known.is_read_again = True
            elif known is not None:
                self._updated(process, known, update, batch.fence)
        for key in [insert.task.key for insert in batch.inserts] + [update.task.key for update in batch.updates]:
            record = self._history.records.get(key)
            if record is not None and not record.is_gone:
                self._check_kept(key, record, self.find(key))

    def _inserted(self, process: Process, insert: Insert) -> None:
        task = insert.task
        progress = task.progress
        if progress.state is not TaskState.PENDING or progress.revision != 1 or progress.attempt is not None:
            self._fail("S12", f"{task.task_id} came into being as {progress}", task.key)
        self._history.stored.add(task.key)
        self._history.records[task.key] = Record(
            task, insert.submission.payload, progress, changed_at=self._history.now
        )
        self._coverage["none to pending"] += 1
        if self._history.is_traced:
            self._history.note(process.name, f"{task.task_id} stored, due {_relative(progress.due_time)}")

    def _updated(self, process: Process, record: Record, update: Update, fence: Fence) -> None:
        key = record.task.key
        before, after = record.progress, update.progress
        self._coverage[f"{before.state} to {after.state}"] += 1
        if self._history.is_traced:
            self._history.note(process.name, f"{key.task_id} {before.state} to {after.state} {_told(after)}")
        self._check_step(record.task, before, after)
        if before.state in HELD:
            self._held_updated(record, before, after)
        elif after.state in HELD:
            self._granted(process, record, update, fence)
        elif after.state is TaskState.FAILED:
            wrong = endings.after_deadline(record.task.policy, before, after, self._reference.reached(process))
            if wrong is not None:
                self._fail("S12", f"{key.task_id} was {wrong}", key)
        elif after.attempts_used != before.attempts_used or after.attempt is not before.attempt:
            self._fail("S11", f"{key.task_id}: {before.attempts_used} attempts became {after.attempts_used}", key)
        record.progress = after
        record.changed_at = self._history.now

    def _check_step(self, task: Task, before: Progress, after: Progress) -> None:
        """Check what must hold of every step of a task, whatever it is for."""
        key = task.key
        if before.state in TERMINAL:
            self._fail("S12", f"{key.task_id} was {before.state} and became {after.state}", key)
        elif (before.state, after.state) not in TRANSITIONS:
            self._fail("S12", f"{key.task_id}: there is no way from {before.state} to {after.state}", key)
        if (after.state in HELD) != (after.attempt is not None and after.attempt.outcome is None):
            self._fail("S4", f"{key.task_id} is {after.state} with {after.attempt}", key)
        is_ended = after.state in TERMINAL
        if is_ended != (after.due_time is None) or is_ended != (after.end_time is not None):
            self._fail("S12", f"{key.task_id} is {after.state}, due {after.due_time}, ended {after.end_time}", key)
        if not 0 <= after.attempts_used <= task.policy.max_attempts:
            self._fail("S11", f"{key.task_id} has used {after.attempts_used} attempts", key)
        if before.cancel_requested and not (
            after.cancel_requested
            and (after.state in HELD or after.state in (TaskState.SUCCEEDED, TaskState.CANCELLED))
        ):
            self._fail("S9", f"{key.task_id} was to be cancelled and is {after.state}", key)

    def _granted(self, process: Process, record: Record, update: Update, fence: Fence) -> None:
        key = record.task.key
        before, after = record.progress, update.progress
        attempt = after.attempt
        assert attempt is not None
        if attempt.lease_token in self._history.grants:
            self._fail("S4", f"{key.task_id}: its lease token was granted before", key)
        if not attempt.number == after.attempt_count == before.attempt_count + 1:
            self._fail("S11", f"{key.task_id}: attempt {attempt.number} after {before.attempt_count}", key)
        if after.attempts_used != before.attempts_used + 1 or not update.is_grant:
            self._fail("S11", f"{key.task_id}: a grant that is not counted", key)
        if attempt.epoch != fence.epoch:
            self._fail("S4", f"{key.task_id}: granted in epoch {attempt.epoch} under {fence}", key)
        if update.archive is not before.attempt and update.archive != before.attempt:
            self._fail("S18", f"{key.task_id}: its last attempt is not kept", key)
        last = before.attempt
        if last is not None and attempt.fencing_token <= last.fencing_token:
            self._fail("P4", f"{key.task_id}: fencing token {attempt.fencing_token} after {last.fencing_token}", key)
        due_time = before.due_time or 0
        if attempt.lease_time < due_time or due_time > self._reference.reached(process):
            self._fail("S3", f"{key.task_id} was granted {due_time - attempt.lease_time} us before it was due", key)
        self._history.grants[attempt.lease_token] = record.grants[attempt.number] = Grant(
            attempt, record, process, self._history.now, due_time
        )

    def _held_updated(self, record: Record, before: Progress, after: Progress) -> None:
        key = record.task.key
        was, attempt = before.attempt, after.attempt
        assert was is not None
        if attempt is None or attempt.lease_token != was.lease_token or attempt.number != was.number:
            self._fail("S4", f"{key.task_id}: attempt {was} became {attempt}", key)
            return
        # Within a term time does not run backwards.
        if attempt.epoch == was.epoch and attempt.sign_of_life < was.sign_of_life:
            self._fail("S14", f"{key.task_id}: the lease of attempt {was.number} became shorter", key)
        grant = self._history.grants[was.lease_token]
        grant.attempt = attempt
        is_returned = attempt.outcome is AttemptOutcome.RETURNED
        if attempt.outcome is not None:
            self._coverage[f"attempt {attempt.outcome}"] += 1
        if attempt.outcome is AttemptOutcome.LEASE_LOST and self.is_counted_on(attempt.lease_token):
            self._fail("S4", f"{key.task_id}: a lease is given up on which its worker counts", key)
        if attempt.outcome is AttemptOutcome.LEASE_LOST and self.is_calm(attempt.incarnation):
            self._fail("P4", f"{key.task_id}: the lease of a worker that lives and is in reach is lost", key)
        if after.attempts_used != before.attempts_used - is_returned:
            self._fail("S11", f"{key.task_id}: {before.attempts_used} attempts became {after.attempts_used}", key)
        if is_returned and grant.started_at is not None:
            self._fail("S11", f"{key.task_id}: attempt {was.number} had begun and is said to be unstarted", key)
        if after.state in WAITING and not is_returned and after.attempts_used >= record.task.policy.max_attempts:
            self._fail("S11", f"{key.task_id} waits for an attempt more than it has", key)
        if attempt.outcome is not None:
            wrong = endings.after_attempt(record.task.policy, before, after, attempt, grant)
            if wrong is not None:
                self._fail("S12", f"{key.task_id} is {wrong}", key)


def _relative(utc: Micros | None) -> str:
    return "never" if utc is None else f"{(utc - START) / bounds.SECOND:.3f}"


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
