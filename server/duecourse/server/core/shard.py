"""`Shard`: the tasks of a range of slots during one term. Events in, effects out; it does nothing by itself.

A write that is asked for makes its task *busy* until the store has answered, and a read of what memory lacks makes its
key busy as well; events for a busy key wait in its line. So no event is handled against a state that is about to
change, and events for a task are handled in the order in which they came.

All of it ends with the term: the node drops the shard, and `close` answers those who still wait.
"""

import heapq
import itertools
from dataclasses import dataclass
from typing import Any, assert_never

from duecourse.model import bounds
from duecourse.model.instants import Micros, Now
from duecourse.server.core import errors, lifecycle
from duecourse.server.core.effects import (
    Assignment,
    Cancelled,
    CancelResult,
    Effects,
    StopReason,
    Submitted,
    Verdict,
)
from duecourse.server.core.events import (
    AttemptRead,
    Audited,
    BucketsLoaded,
    Cancel,
    Committed,
    End,
    Event,
    Grant,
    HeldLoaded,
    Hold,
    LaneLoaded,
    OutcomeKind,
    Report,
    Start,
    Submit,
    TasksRead,
    Tick,
    Unsent,
    WriteRefused,
)
from duecourse.server.core.fence import Fence
from duecourse.server.core.lease import CancelWait, Lease
from duecourse.server.core.near import Near
from duecourse.server.core.task import (
    HELD,
    TERMINAL,
    WAITING,
    Answer,
    Attempt,
    AttemptOutcome,
    Progress,
    Submission,
    Task,
    TaskKey,
    TaskState,
)
from duecourse.server.core.writes import Insert, Update, Write

_OUTCOMES = {
    OutcomeKind.RETRYABLE: AttemptOutcome.FAILED,
    OutcomeKind.NON_RETRYABLE: AttemptOutcome.FAILED,
    OutcomeKind.TIMED_OUT: AttemptOutcome.TIMED_OUT,
    OutcomeKind.CANCELLED: AttemptOutcome.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """What a shard is told at its start."""

    node: str
    lease: Micros = bounds.DEFAULT_LEASE
    heartbeat: Micros = bounds.DEFAULT_HEARTBEAT
    head: int = bounds.HEAD


class Shard:
    """See the module's docstring."""

    def __init__(self, fence: Fence, first_sequence: int, horizon: Micros, options: ShardOptions, now: Now) -> None:
        self.fence = fence
        self.near = Near(fence.shard, horizon, options.head)
        self.leases: dict[bytes, Lease] = {}
        """By lease token."""
        self.held: dict[TaskKey, Lease] = {}
        self._options = options
        self._sequence = itertools.count(first_sequence)
        self._busy: dict[TaskKey, list[Event] | None] = {}
        self._fresh: dict[TaskKey, Task | bool | None] = {}
        """What was just read, while the line that waited for it is handled."""
        self._audited: set[TaskKey] = set()
        self._waits: list[tuple[Micros, int, Lease, CancelWait]] = []
        self._order = itertools.count()
        self._last_tick = now.elapsed
        self._next_sweep = now.elapsed

    def handle(self, event: Event, now: Now, out: Effects) -> None:
        """Handle one event; what is to be done is added to `out`."""
        match event:
            case Submit():
                for submission, origin in event.submissions:
                    self._submit(submission, origin, now, out)
            case Committed():
                self._committed(event, now, out)
            case Grant():
                self._grant(event, now, out)
            case End():
                self._end(event, now, out)
            case Start():
                self._start(event, now, out)
            case Tick():
                self._tick(now, out)
            case LaneLoaded():
                self.near.lane_loaded(
                    event.lane, event.version, event.tasks, event.is_end, self._knows_better, out.ready, now.earliest
                )
            case BucketsLoaded():
                self._buckets_loaded(event, now, out)
            case Report():
                self._report(event)
            case Cancel():
                self._cancel(event, now, out)
            case Hold():
                self._hold(event, now, out)
            case Unsent():
                self._unsent(event.lease, event, now, out)
            case TasksRead():
                for key, task in event.tasks:
                    self._task_read(key, task, now, out)
            case AttemptRead():
                self._attempt_read(event, now, out)
            case WriteRefused():
                self._write_refused(event, now, out)
            case HeldLoaded():
                self._held_loaded(event, now)
            case Audited():
                self._audit(event.tasks, out)
            case _:
                assert_never(event)

    @property
    def tasks_in_memory(self) -> int:
        """How many tasks are in memory: near and held ones."""
        return len(self.near.tasks) + len(self.held)

    def collect_loads(self, out: Effects) -> None:
        """Ask for the rest of the lanes that run low; once after each turn."""
        self.near.collect_loads(out.lane_loads)

    def next_wait(self) -> Micros | None:
        """Return the elapsed time at which a cancellation has to be answered, None if none waits."""
        return self._waits[0][0] if self._waits else None

    def close(self, out: Effects) -> None:
        """Answer those who wait in line: the term is over. `give_up` answers those whose writes are under way."""
        no_leader = errors.NoLeader(self.fence.shard)
        for line in self._busy.values():
            for event in line or ():
                turn_away(event, no_leader, out)
        for _, _, lease, wait in self._waits:
            if wait in lease.cancel_waits:
                out.answers.append((wait.origin, _requested(lease.task.progress)))
        self.near.clear()

    # Submitting.

    def _submit(self, submission: Submission, origin: Any, now: Now, out: Effects) -> None:
        key = TaskKey(submission.namespace, submission.task_id)
        if key in self._busy:
            self._queue(key, Submit([(submission, origin)]))
            return
        run_at = submission.run_at
        if run_at is None:
            run_at = (now.latest if submission.delay else now.earliest) + submission.delay
        task = Task(
            submission.namespace,
            submission.task_id,
            self.fence.shard,
            submission.lane,
            submission.uid,
            next(self._sequence),
            run_at,
            now.latest,
            submission.policy,
            lifecycle.submitted(run_at),
        )
        self._busy[key] = None
        out.writes.append(Insert(submission, task, origin))

    def _inserted(self, write: Insert, existing: Any, now: Now, out: Effects) -> None:
        task = write.task
        if existing is None:
            out.answers.append((write.origin, Submitted(task.uid, True)))
            self.near.place(task, out.ready, now.earliest)
        elif existing.fingerprint == write.submission.fingerprint:
            out.answers.append((write.origin, Submitted(existing.uid, False)))
        else:
            out.answers.append((write.origin, errors.TaskExists(task.task_id)))

    # Attempts.

    def _grant(self, event: Grant, now: Now, out: Effects) -> None:
        task = event.task
        if self._queue_if_busy(task.key, event):
            return
        if not task.is_ready or self.near.tasks.get(task.key) is not task:
            out.unmatched.append((task.lane, event.holder))
            return
        self.near.take(task)
        policy = task.policy
        if policy.start_deadline is not None or policy.completion_deadline is not None:
            ended = lifecycle.expired(task, now.earliest)
            if ended is not None:
                out.unmatched.append((task.lane, event.holder))
                self._update(task, ended, None, out)
                return
        progress = lifecycle.granted(task, event.holder, event.lease_token, self._options.node, self.fence, now.latest)
        self._busy[task.key] = None
        out.writes.append(Update(task, progress, task.progress.attempt, None, True, event))

    def _granted(self, task: Task, event: Grant, delivery: Any, now: Now, out: Effects) -> None:
        attempt = task.progress.attempt
        assert attempt is not None, "a grant opens an attempt"
        time_left = _time_left(task, attempt, now)
        lease = Lease(
            task,
            event.lease_token,
            event.holder,
            event.duration,
            now.elapsed + event.duration,
            now.elapsed + time_left,
            now.elapsed,
        )
        self.leases[lease.token] = lease
        self.held[task.key] = lease
        start_within = None
        if task.policy.start_deadline is not None and task.progress.attempts_used == 1:
            start_within = max(0, task.policy.start_deadline - now.latest)
        out.assignments.append(Assignment(lease, delivery, event.last_read, time_left, start_within))

    def _start(self, event: Start, now: Now, out: Effects) -> None:
        if self._queue_if_busy(event.key, event):
            return
        lease = self.leases.get(event.lease_token)
        if lease is None or lease.task.key != event.key or lease.task.progress.state is not TaskState.LEASED:
            return
        task = lease.task
        attempt = task.progress.attempt
        assert attempt is not None, "a lease has an attempt"
        start_time = max(event.start_time, attempt.lease_time)
        self._update(task, lifecycle.started(task.progress, start_time), event, out)

    def _report(self, event: Report) -> None:
        """Keep what a handler says of its progress; the sweep stores it."""
        lease = self.leases.get(event.lease_token)
        if lease is not None and lease.task.key == event.key:
            lease.said = event.progress

    def _end(self, event: End, now: Now, out: Effects) -> None:
        if self._queue_if_busy(event.key, event):
            return
        lease = self.leases.get(event.lease_token)
        if lease is None or lease.task.key != event.key:
            if self._fresh.get(event.key) is False:
                out.verdicts.append((event.holder, event.lease_token, Verdict.UNKNOWN_TOKEN))
            else:
                out.attempt_reads.append((self.fence.shard, event))
            return
        task = lease.task
        if event.kind is OutcomeKind.SUCCEEDED:
            progress = lifecycle.succeeded(task.progress, now.latest, event.start_time, event.digest)
            self._busy[task.key] = None
            out.writes.append(Update(task, progress, None, event.result, False, event))
        elif event.kind is OutcomeKind.RETURNED:
            self._unsent(lease, event, now, out)
        else:
            progress = lifecycle.failed(
                task,
                now.latest,
                _OUTCOMES[event.kind],
                is_retryable=event.kind is not OutcomeKind.NON_RETRYABLE,
                start_time=event.start_time,
                failure=event.failure,
                digest=event.digest,
                retry_after=event.retry_after,
            )
            self._update(task, progress, event, out)

    def _unsent(self, lease: Lease, cause: Event, now: Now, out: Effects) -> None:
        """End an attempt that is proven unstarted; lost, if it was recorded as running all the same."""
        task = lease.task
        if self._queue_if_busy(task.key, cause) or self.leases.get(lease.token) is not lease:
            return
        digest = cause.digest if isinstance(cause, End) else None
        if task.progress.state is TaskState.RUNNING:
            self._lose(task, AttemptOutcome.LEASE_LOST, cause, digest, now, out)
        else:
            self._update(task, lifecycle.returned(task.progress, now.latest, digest), cause, out)

    def _lose(
        self, task: Task, outcome: AttemptOutcome, cause: Any, digest: bytes | None, now: Now, out: Effects
    ) -> None:
        self._update(task, lifecycle.failed(task, now.latest, outcome, is_lost=True, digest=digest), cause, out)

    def _attempt_read(self, event: AttemptRead, now: Now, out: Effects) -> None:
        end = event.end
        attempt = event.attempt
        lease = self.held.get(end.key)
        if end.key in self._busy or (lease is not None and lease.token == end.lease_token):
            self._end(end, now, out)
            return
        if attempt is None:
            verdict = Verdict.UNKNOWN_TOKEN
        elif attempt.outcome is None:
            # Open in the store but not in memory: what memory lacks is read, then the outcome is handled again.
            self._read(end.key, end, out)
            return
        elif attempt.outcome_digest == end.digest:
            verdict = Verdict.RECORDED
        else:
            verdict = Verdict.LEASE_LOST
        out.verdicts.append((end.holder, end.lease_token, verdict))

    def _hold(self, event: Hold, now: Now, out: Effects) -> None:
        holder = event.holder
        for token, (key, has_started) in event.leases.items():
            lease = self.leases.get(token)
            if lease is not None:
                key = lease.task.key
            if key is not None and key in self._busy:
                self._queue(key, Hold(holder, {token: (key, has_started)}, event.last_assignments, is_complete=False))
            elif lease is not None:
                self._adopt(lease, event, has_started, now, out)
            elif key is not None:
                one = Hold(holder, {token: (key, has_started)}, event.last_assignments, is_complete=False)
                self._look_for(token, key, one, out)
        if not event.is_complete:
            return
        for lease in list(self.leases.values()):
            if lease.token not in event.leases and self._is_absent(lease, event):
                self._unsent(lease, Unsent(lease), now, out)

    def _look_for(self, token: bytes, key: TaskKey, event: Hold, out: Effects) -> None:
        """Say that a lease is lost only after a read: a replaced leader does not know its successor's grants."""
        if key in self._fresh:
            out.lost.append((event.holder, token))
        else:
            self._read(key, event, out)

    def _adopt(self, lease: Lease, event: Hold, has_started: bool, now: Now, out: Effects) -> None:
        if lease.holder is not event.holder:
            lease.holder = event.holder
            lease.assignment_number = 0
            if lease.task.progress.cancel_requested:
                out.stops.append((event.holder, lease.token, StopReason.CANCELLED))
            elif lease.stop_asked_at is not None:
                out.stops.append((event.holder, lease.token, StopReason.TIMED_OUT))
        lease.unexpired_until = max(lease.unexpired_until, now.elapsed + lease.duration)
        task = lease.task
        attempt = task.progress.attempt
        assert attempt is not None, "a lease has an attempt"
        is_news = has_started and task.progress.state is TaskState.LEASED
        if attempt.epoch < self.fence.epoch or is_news:
            start_time = now.latest if is_news else None
            lease.stored_at = now.elapsed
            progress = lifecycle.renewed(task.progress, now.latest, self.fence, start_time, lease.said)
            self._update(task, progress, event, out)

    def _is_absent(self, lease: Lease, event: Hold) -> bool:
        """Tell whether a lease that the worker does not list can surely not reach it any more."""
        attempt = lease.task.progress.attempt
        if attempt is None or attempt.incarnation != event.holder.incarnation:
            return False
        if lease.holder is event.holder:
            return lease.assignment_number <= event.last_assignments
        # Sent on an older stream of this worker, which it had given up before it opened this one, or never.
        return lease.holder is None or not lease.holder.is_open

    # Cancelling.

    def _cancel(self, event: Cancel, now: Now, out: Effects) -> None:
        if self._queue_if_busy(event.key, event):
            return
        task = self._find(event.key)
        if task is None:
            if event.key in self._fresh:
                out.answers.append((event.origin, errors.TaskNotFound(event.key.task_id)))
            else:
                self._read(event.key, event, out)
        elif isinstance(task, bool):
            out.answers.append((event.origin, errors.RecordCorrupt(event.key.task_id)))
        else:
            self._cancel_task(task, event, now, out)

    def _cancel_task(self, task: Task, event: Cancel, now: Now, out: Effects) -> None:
        last = task.progress
        for answer in last.answers:
            if event.request_id and answer.request_id == event.request_id:
                self._repeat(task, event, answer, now, out)
                return
        if event.expected_revision is not None and event.expected_revision != last.revision:
            out.answers.append((event.origin, errors.RevisionMismatch(event.expected_revision, last.revision)))
            return
        if last.state in TERMINAL:
            finished = Cancelled(CancelResult.ALREADY_FINISHED, last.state, last.earlier_attempt_may_run)
            out.answers.append((event.origin, finished))
            return
        answers = last.answers
        is_waiting = last.state in WAITING
        if event.request_id:
            attempt = 0 if is_waiting else last.attempt_count
            kept = Answer(event.request_id, event.fingerprint, attempt, is_waiting, last.earlier_attempt_may_run)
            answers = lifecycle.with_answer(answers, kept)
        if is_waiting:
            if task.key in self.near.tasks:
                self.near.take(task)
            self._update(task, lifecycle.cancelled(last, now.latest, answers), event, out)
        else:
            self._update(task, lifecycle.cancel_requested(last, answers), event, out)

    def _repeat(self, task: Task, event: Cancel, answer: Answer, now: Now, out: Effects) -> None:
        """Answer a repeated cancellation as the first one was, from the record of the attempt that was out."""
        last = task.progress
        attempt = last.attempt
        if answer.fingerprint != event.fingerprint:
            out.answers.append((event.origin, errors.RequestIdReused(event.request_id)))
        elif last.state in HELD and attempt is not None and attempt.number == answer.attempt:
            self._ask(task, event, now, out)
        else:
            was_returned = (
                attempt is not None and attempt.number == answer.attempt and attempt.outcome is AttemptOutcome.RETURNED
            )
            result = CancelResult.PREVENTED if answer.was_prevented or was_returned else CancelResult.REQUESTED
            out.answers.append((event.origin, Cancelled(result, last.state, answer.earlier_attempt_may_run)))

    def _ask(self, task: Task, event: Cancel, now: Now, out: Effects) -> None:
        """Ask the worker to stop, and wait for its word if it has not said yet that the handler began."""
        lease = self.held[task.key]
        if lease.holder is not None and lease.holder.is_open:
            out.stops.append((lease.holder, lease.token, StopReason.CANCELLED))
        if task.progress.state is TaskState.RUNNING or not event.wait:
            out.answers.append((event.origin, _requested(task.progress)))
            return
        wait = CancelWait(event.origin, now.elapsed + event.wait)
        lease.cancel_waits.append(wait)
        heapq.heappush(self._waits, (wait.until, next(self._order), lease, wait))

    def _settle_waits(self, lease: Lease, out: Effects) -> None:
        """Answer the cancellations of an attempt whose fate is known now."""
        progress = lease.task.progress
        attempt = progress.attempt
        is_prevented = attempt is not None and attempt.outcome is AttemptOutcome.RETURNED
        for wait in lease.cancel_waits:
            if is_prevented:
                answer = Cancelled(CancelResult.PREVENTED, progress.state, progress.earlier_attempt_may_run)
            else:
                answer = _requested(progress)
            out.answers.append((wait.origin, answer))
        lease.cancel_waits.clear()

    # What the store answers.

    def _committed(self, event: Committed, now: Now, out: Effects) -> None:
        for index, write in enumerate(event.writes):
            key = write.task.key
            line = self._busy.pop(key)
            if isinstance(write, Insert):
                self._inserted(write, event.taken.get(index), now, out)
            elif index in event.mismatched:
                self._mismatched(write, line, out)
                continue
            else:
                self._updated(write, event.deliveries.get(index), now, out)
            if line:
                self._handle_line(key, line, now, out)

    def _updated(self, write: Update, delivery: Any, now: Now, out: Effects) -> None:
        task = write.task
        last = task.progress
        progress = task.progress = write.progress
        cause = write.cause
        if isinstance(cause, Grant):
            self._granted(task, cause, delivery, now, out)
            return
        lease = self.held.get(task.key)
        if lease is not None:
            self._lease_changed(lease, last, progress, cause, out)
        if isinstance(cause, End):
            out.verdicts.append((cause.holder, cause.lease_token, Verdict.RECORDED))
        elif isinstance(cause, Cancel):
            if progress.state is TaskState.CANCELLED:
                result = Cancelled(CancelResult.PREVENTED, progress.state, progress.earlier_attempt_may_run)
                out.answers.append((cause.origin, result))
            else:
                self._ask(task, cause, now, out)
        if progress.state in WAITING:
            self.near.place(task, out.ready, now.earliest)

    def _lease_changed(self, lease: Lease, last: Progress, progress: Progress, cause: Any, out: Effects) -> None:
        attempt = progress.attempt
        assert attempt is not None, "a lease has an attempt"
        if attempt.start_time is not None and last.attempt is not None and last.attempt.start_time is None:
            out.lateness.append((_lateness(lease.task, last, attempt.start_time), progress.attempts_used > 1))
        if progress.state in HELD:
            if progress.state is TaskState.RUNNING and lease.cancel_waits:
                self._settle_waits(lease, out)
            return
        del self.leases[lease.token]
        del self.held[lease.task.key]
        assert attempt.outcome is not None, "a lease ends with its attempt"
        out.ended.append(attempt.outcome)
        if lease.cancel_waits:
            self._settle_waits(lease, out)
        if not isinstance(cause, End | Unsent) and lease.holder is not None and lease.holder.is_open:
            out.lost.append((lease.holder, lease.token))

    def _mismatched(self, write: Update, line: list[Event] | None, out: Effects) -> None:
        """Read a task that is not what memory held, then handle again what led to the write."""
        task = write.task
        cause = write.cause
        if isinstance(cause, Grant):
            out.unmatched.append((task.lane, cause.holder))
        again = [cause] if isinstance(cause, End | Cancel | Start) else []
        self._read_again(task.key, again + (line or []), out)

    def _write_refused(self, event: WriteRefused, now: Now, out: Effects) -> None:
        """Set a write aside: tell its caller, and read its task again so that memory is what the store holds."""
        write = event.write
        give_up(write, errors.StoreFailed(event.detail), out)
        line = self._busy.pop(write.task.key)
        if isinstance(write, Update):
            self._read_again(write.task.key, line or [], out)
        elif line:
            self._handle_line(write.task.key, line, now, out)

    def _task_read(self, key: TaskKey, task: Task | bool | None, now: Now, out: Effects) -> None:
        line = self._busy.pop(key, None)
        outdated = self.near.tasks.get(key)
        if outdated is not None:
            self.near.take(outdated)
        self._replace_lease(key, task, now, out)
        if isinstance(task, Task) and task.progress.state in WAITING:
            self.near.place(task, out.ready, now.earliest)
            out.audit_misses += key in self._audited and key in self.near.tasks
        self._audited.discard(key)
        if line:
            self._fresh[key] = task
            self._handle_line(key, line, now, out)
            del self._fresh[key]

    def _replace_lease(self, key: TaskKey, task: Task | bool | None, now: Now, out: Effects) -> None:
        """Make the lease of a task agree with what was just read of it."""
        attempt = task.progress.attempt if isinstance(task, Task) and task.progress.state in HELD else None
        lease = self.held.get(key)
        if lease is not None and attempt is not None and attempt.lease_token == lease.token:
            assert isinstance(task, Task), "it has an attempt"
            lease.task = task
            return
        if lease is not None:
            del self.held[key]
            del self.leases[lease.token]
            if lease.holder is not None and lease.holder.is_open:
                out.lost.append((lease.holder, lease.token))
            self._settle_waits(lease, out)
        if attempt is not None:
            assert isinstance(task, Task), "it has an attempt"
            self._restore(task, now, ())

    def _held_loaded(self, event: HeldLoaded, now: Now) -> None:
        for task in event.tasks:
            self._restore(task, now, event.raises)

    def _restore(self, task: Task, now: Now, raises: tuple[Micros, ...]) -> None:
        """Take a lease in that an earlier term granted: it gets the time that is left of its grace, and time to listen.

        The grace ends one lease time after the first takeover since the last stored sign of life.
        """
        attempt = task.progress.attempt
        assert attempt is not None, "a held task has an attempt"
        duration = self._options.lease
        takeover = next((raised for raised in raises if raised > attempt.sign_of_life), now.latest)
        grace = max(0, min(duration, takeover + duration - now.latest))
        listen = bounds.SILENT_INTERVALS * self._options.heartbeat + bounds.LISTEN_MARGIN
        lease = Lease(
            task,
            attempt.lease_token,
            None,
            duration,
            now.elapsed + max(grace, listen),
            now.elapsed + _time_left(task, attempt, now),
            now.elapsed,
        )
        self.leases[lease.token] = lease
        self.held[task.key] = lease

    def _buckets_loaded(self, event: BucketsLoaded, now: Now, out: Effects) -> None:
        for lane, key in event.cut.items():
            self.near.lower_cursor(lane, key)
        for task in event.tasks:
            if not self._knows_better(task):
                self.near.place(task, out.ready, now.earliest)

    def _audit(self, tasks: list[Task], out: Effects) -> None:
        """Hold the store's oldest due tasks against memory; what memory misses is read again."""
        for task in tasks:
            if not self._is_known(task.key) and self.near.is_complete_up_to(task):
                self._audited.add(task.key)
                self._read(task.key, None, out)

    # Time.

    def _tick(self, now: Now, out: Effects) -> None:
        self.near.collect_due(now.earliest, out.ready)
        gap = now.elapsed - self._last_tick
        self._last_tick = now.elapsed
        if gap > bounds.LOOP_GAP + bounds.LONGEST_SLEEP:
            # Nothing could be heard while the loop did not run.
            for lease in self.leases.values():
                lease.unexpired_until = lease.expires_at() + gap
        while self._waits and self._waits[0][0] <= now.elapsed:
            _, _, lease, wait = heapq.heappop(self._waits)
            if wait in lease.cancel_waits:
                lease.cancel_waits.remove(wait)
                out.answers.append((wait.origin, _requested(lease.task.progress)))
        if now.elapsed >= self._next_sweep:
            self._next_sweep = now.elapsed + bounds.LONGEST_SLEEP // 2
            for lease in list(self.leases.values()):
                if lease.task.key not in self._busy:
                    self._sweep(lease, now, out)
            for task in [task for task in self.near.with_deadline if lifecycle.passed_deadline(task, now.earliest)]:
                if task.key in self._busy:
                    continue
                ended = lifecycle.expired(task, now.earliest)
                assert ended is not None, "its deadline has passed"
                self.near.take(task)
                self._update(task, ended, None, out)

    def _sweep(self, lease: Lease, now: Now, out: Effects) -> None:
        """Look after a running attempt: out of time, its lease expired, or a sign of life to be stored."""
        task = lease.task
        holder = lease.holder
        if now.elapsed >= lease.expires_at():
            self._lose(task, AttemptOutcome.LEASE_LOST, None, None, now, out)
        elif holder is None:
            return  # Its worker was not heard yet, and may know how the attempt ended: time-outs wait for that.
        elif lease.stop_asked_at is not None:
            if now.elapsed >= lease.stop_asked_at + bounds.STOP_GRACE:
                self._lose(task, AttemptOutcome.TIMED_OUT, None, None, now, out)
        elif now.elapsed >= lease.timeout_at:
            lease.stop_asked_at = now.elapsed
            if holder.is_open:
                out.stops.append((holder, lease.token, StopReason.TIMED_OUT))
        elif holder.renewed_at >= lease.stored_at + lease.duration or (
            lease.said is not None and self._is_news(lease, lease.said, now)
        ):
            lease.stored_at = now.elapsed
            self._update(task, lifecycle.renewed(task.progress, now.latest, self.fence, None, lease.said), None, out)

    def _is_news(self, lease: Lease, said: str, now: Now) -> bool:
        """Tell whether a handler's word is to be stored: it differs, and the last write was a heartbeat ago."""
        attempt = lease.task.progress.attempt
        assert attempt is not None, "a lease has an attempt"
        return said != attempt.progress and now.elapsed >= lease.stored_at + self._options.heartbeat

    # Memory.

    def _update(self, task: Task, progress: Progress, cause: Any, out: Effects) -> None:
        self._busy[task.key] = None
        out.writes.append(Update(task, progress, None, None, False, cause))

    def _read(self, key: TaskKey, event: Event | None, out: Effects) -> None:
        self._busy[key] = None if event is None else [event]
        out.task_reads.append((self.fence.shard, key))

    def _read_again(self, key: TaskKey, line: list[Event], out: Effects) -> None:
        self._busy[key] = line
        out.task_reads.append((self.fence.shard, key))

    def _queue_if_busy(self, key: TaskKey, event: Event) -> bool:
        if key not in self._busy:
            return False
        self._queue(key, event)
        return True

    def _queue(self, key: TaskKey, event: Event) -> None:
        line = self._busy[key]
        if line is None:
            self._busy[key] = [event]
        else:
            line.append(event)

    def _handle_line(self, key: TaskKey, line: list[Event], now: Now, out: Effects) -> None:
        for event in line:
            # Once the key is busy again, `handle` lines the rest up behind it.
            self.handle(event, now, out)

    def _find(self, key: TaskKey) -> Task | bool | None:
        lease = self.held.get(key)
        if lease is not None:
            return lease.task
        return self.near.tasks.get(key) or self._fresh.get(key)

    def _is_known(self, key: TaskKey) -> bool:
        return key in self._busy or key in self.near.tasks or key in self.held

    def _knows_better(self, task: Task) -> bool:
        """Tell whether memory has newer word of a task than a load."""
        key = task.key
        if key in self._busy:
            # An insert that finds the id taken leaves nothing in memory: then the load's word is wanted after all.
            self._queue(key, BucketsLoaded([task], {}))
            return True
        return key in self.near.tasks or key in self.held


def _time_left(task: Task, attempt: Attempt, now: Now) -> Micros:
    """Return what is left of an attempt's time, between nothing and all of it whatever the clocks say."""
    timeout = task.policy.attempt_timeout
    left = attempt.lease_time + timeout - now.latest
    if task.policy.completion_deadline is not None:
        left = min(left, task.policy.completion_deadline - now.latest)
    return max(0, min(timeout, left))


def _lateness(task: Task, last: Progress, start_time: Micros) -> Micros:
    wanted = max(task.run_at, task.create_time)
    if last.attempts_used > 1 and last.due_time is not None:
        wanted = last.due_time
    return start_time - wanted


def _requested(progress: Progress) -> Cancelled:
    return Cancelled(CancelResult.REQUESTED, progress.state, progress.earlier_attempt_may_run)


def give_up(write: Write, error: errors.DomainError, out: Effects) -> None:
    """Tell those who wait for a write that it did not come to pass."""
    if isinstance(write, Insert):
        out.answers.append((write.origin, error))
    elif isinstance(write.cause, Cancel):
        out.answers.append((write.cause.origin, error))
    elif isinstance(write.cause, Grant):
        out.unmatched.append((write.task.lane, write.cause.holder))


def turn_away(event: Event, error: errors.DomainError, out: Effects) -> None:
    """Tell those who wait for an event that it is not handled any more; what it did before it came is uncertain."""
    match event:
        case Submit():
            out.answers.extend((origin, error) for _, origin in event.submissions)
        case Cancel():
            out.answers.append((event.origin, error))
        case Grant():
            out.unmatched.append((event.task.lane, event.holder))
        case Committed():
            for write in event.writes:
                give_up(write, errors.OutcomeUncertain(), out)
        case WriteRefused():
            give_up(event.write, error, out)
        case _:
            pass
