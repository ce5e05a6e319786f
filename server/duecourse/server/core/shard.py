"""`Shard`: the tasks of a range of slots during one term. Events in, effects out; it does nothing by itself.

It holds what is in memory of them: the waiting ones that are near (`Near`), the leases of the held ones (`Leases`), who
waits for a cancellation (`Cancellations`), and which ones are busy (`Lines`): what is asked of the store is true only
once it has answered, and until then no further event for that task is handled.

All of it ends with the term: the node drops the shard, and `close` answers those who still wait.
"""

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any, assert_never

from duecourse.model import bounds
from duecourse.model.instants import Micros, Now
from duecourse.server.core import callers, errors, leases, lifecycle
from duecourse.server.core.cancellations import Cancellations
from duecourse.server.core.effects import Assignment, Effects, Submitted, Verdict
from duecourse.server.core.events import (
    AttemptRead,
    Audited,
    BucketsLoaded,
    Cancel,
    Committed,
    End,
    Event,
    Found,
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
from duecourse.server.core.lease import Lease
from duecourse.server.core.leases import Leases
from duecourse.server.core.lines import Lines
from duecourse.server.core.near import Near
from duecourse.server.core.task import HELD, WAITING, AttemptOutcome, Progress, Submission, Task, TaskKey, TaskState
from duecourse.server.core.writes import Insert, Update

_REFUSED_PAUSE = 5 * bounds.SECOND
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
        self.lines = Lines(fence.shard)
        self.leases = Leases(fence, options.lease, options.heartbeat, self.lines)
        self.cancellations = Cancellations(self.near, self.leases, self.lines)
        self._node = options.node
        self._sequence = itertools.count(first_sequence)
        self._audited: dict[TaskKey, int] = {}
        """Tasks that the audit misses, by the revisions that it saw, while they are read again."""
        self._refused: deque[tuple[Micros, TaskKey]] = deque()
        """Tasks whose grant the store refused for its data, and when they are read again; busy until then."""
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
                self.leases.report(event)
            case Cancel():
                self.cancellations.cancel(event, now, out)
            case Hold():
                self.leases.hold(event, now, out)
            case Unsent():
                self.leases.end_unstarted(event.lease, event, now, out)
            case TasksRead():
                for key, task in event.tasks:
                    self._task_read(key, task, now, out)
            case AttemptRead():
                self._attempt_read(event, now, out)
            case WriteRefused():
                self._write_refused(event, now, out)
            case HeldLoaded():
                for task in event.tasks:
                    self.leases.restore(task, event.raises, now)
            case Audited():
                self._audit(event, out)
            case _:
                assert_never(event)

    @property
    def tasks_in_memory(self) -> int:
        """How many tasks are in memory: near and held ones."""
        return len(self.near.tasks) + len(self.leases)

    @property
    def is_settled(self) -> bool:
        """Whether the store has answered all that was asked of it."""
        return len(self.lines.busy) == len(self._refused)

    def collect_loads(self, out: Effects) -> None:
        """Ask for the rest of the lanes that run low; once after each turn."""
        self.near.collect_loads(out.lane_loads)

    def close(self, out: Effects) -> None:
        """Answer those who wait in line: the term is over. `callers` answers those whose writes are under way."""
        no_leader = errors.NoLeader(self.fence.shard)
        for line in self.lines.busy.values():
            for event in line or ():
                callers.turn_away(event, no_leader, out)
        self.cancellations.close(out)
        self.near.clear()

    # Submitting.

    def _submit(self, submission: Submission, origin: Any, now: Now, out: Effects) -> None:
        key = TaskKey(submission.namespace, submission.task_id)
        busy = self.lines.busy
        if key in busy:
            self.lines.add(key, Submit([(submission, origin)]))
            return
        run_at = submission.run_at
        if run_at is None:
            run_at = (now.latest if submission.delay else now.earliest) + submission.delay
        task = Task(
            key,
            self.fence.shard,
            submission.lane,
            submission.uid,
            next(self._sequence),
            run_at,
            now.latest,
            submission.policy,
            lifecycle.submitted(run_at),
        )
        busy[key] = None
        out.writes.append(Insert(submission, task, origin))

    def _inserted(self, write: Insert, existing: Any, now: Now, out: Effects) -> None:
        task = write.task
        if existing is None:
            out.answers.append((write.origin, Submitted(task.uid, True)))
            if task.key in self.near.tasks or task.key in self.leases.by_task:
                # The store has forgotten a task of this id that memory still has: it was set back.
                self._drop_outdated(task.key, task, now, out)
            self.near.place(task, out.ready, now.earliest)
        elif existing.fingerprint == write.submission.fingerprint:
            out.answers.append((write.origin, Submitted(existing.uid, False)))
        else:
            out.answers.append((write.origin, errors.TaskExists(task.task_id)))

    # Attempts.

    def _grant(self, event: Grant, now: Now, out: Effects) -> None:
        task = event.task
        busy = self.lines.busy
        if task.key in busy:
            self.lines.add(task.key, event)
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
                self.lines.update(task, ended, None, out)
                return
        progress = lifecycle.granted(task, event.holder, event.lease_token, self._node, self.fence, now.latest)
        busy[task.key] = None
        out.writes.append(Update(task, progress, task.progress.attempt, None, True, event))

    def _granted(self, task: Task, event: Grant, delivery: Any, now: Now, out: Effects) -> None:
        attempt = task.progress.attempt
        assert attempt is not None, "a grant opens an attempt"
        time_left = leases.time_left(task, attempt, now)
        lease = Lease(
            task,
            event.lease_token,
            event.holder,
            event.duration,
            now.elapsed + event.duration,
            now.elapsed + time_left,
            now.elapsed,
        )
        self.leases.add(lease)
        start_within = None
        if task.policy.start_deadline is not None and task.progress.attempts_used == 1:
            start_within = max(0, task.policy.start_deadline - now.latest)
        out.assignments.append(Assignment(lease, delivery, event.last_read, time_left, start_within))

    def _start(self, event: Start, now: Now, out: Effects) -> None:
        if event.key in self.lines.busy:
            self.lines.add(event.key, event)
            return
        lease = self.leases.by_token.get(event.lease_token)
        if lease is None or lease.task.key != event.key or lease.task.progress.state is not TaskState.LEASED:
            return
        task = lease.task
        attempt = task.progress.attempt
        assert attempt is not None, "a lease has an attempt"
        start_time = max(event.start_time, attempt.lease_time)
        self.lines.update(task, lifecycle.started(task.progress, start_time), event, out)

    def _end(self, event: End, now: Now, out: Effects) -> None:
        if event.key in self.lines.busy:
            self.lines.add(event.key, event)
            return
        lease = self.leases.by_token.get(event.lease_token)
        if lease is None or lease.task.key != event.key:
            if self.lines.fresh.get(event.key) is False:
                out.verdicts.append((event.holder, event.lease_token, Verdict.UNKNOWN_TOKEN))
            else:
                out.attempt_reads.append((self.fence.shard, event))
            return
        task = lease.task
        if event.kind is OutcomeKind.SUCCEEDED:
            progress = lifecycle.succeeded(task.progress, now.latest, event.start_time, event.digest)
            self.lines.busy[task.key] = None
            out.writes.append(Update(task, progress, None, event.result, False, event))
        elif event.kind is OutcomeKind.RETURNED:
            self.leases.end_unstarted(lease, event, now, out)
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
            self.lines.update(task, progress, event, out)

    def _attempt_read(self, event: AttemptRead, now: Now, out: Effects) -> None:
        end = event.end
        attempt = event.attempt
        lease = self.leases.by_task.get(end.key)
        if end.key in self.lines.busy or (lease is not None and lease.token == end.lease_token):
            self._end(end, now, out)
            return
        if attempt is None:
            verdict = Verdict.UNKNOWN_TOKEN
        elif attempt.outcome is None:
            # Open in the store but not in memory: what memory lacks is read, then the outcome is handled again.
            self.lines.read(end.key, [end], out)
            return
        elif attempt.outcome_digest == end.digest:
            verdict = Verdict.RECORDED
        else:
            verdict = Verdict.LEASE_LOST
        out.verdicts.append((end.holder, end.lease_token, verdict))

    # What the store answers.

    def _committed(self, event: Committed, now: Now, out: Effects) -> None:
        busy = self.lines.busy
        for index, write in enumerate(event.writes):
            key = write.task.key
            line = busy.pop(key)
            if isinstance(write, Insert):
                self._inserted(write, event.taken.get(index), now, out)
            elif index in event.mismatched:
                self._mismatched(write, line, out)
                continue
            else:
                self._updated(write, event.deliveries.get(index), now, out)
            if line:
                self._handle_line(line, now, out)

    def _updated(self, write: Update, delivery: Any, now: Now, out: Effects) -> None:
        task = write.task
        last = task.progress
        progress = task.progress = write.progress
        cause = write.cause
        if isinstance(cause, Grant):
            if delivery is False:
                out.unmatched.append((task.lane, cause.holder))
                self.lines.update(task, lifecycle.undeliverable(progress, now.latest), None, out)
            else:
                self._granted(task, cause, delivery, now, out)
            return
        lease = self.leases.by_task.get(task.key)
        if lease is not None:
            self._lease_changed(lease, last, progress, cause, out)
        if isinstance(cause, End):
            out.verdicts.append((cause.holder, cause.lease_token, Verdict.RECORDED))
        elif isinstance(cause, Cancel):
            self.cancellations.committed(task, cause, now, out)
        if progress.state in WAITING:
            self.near.place(task, out.ready, now.earliest)

    def _lease_changed(self, lease: Lease, last: Progress, progress: Progress, cause: Any, out: Effects) -> None:
        attempt = progress.attempt
        assert attempt is not None, "a lease has an attempt"
        if attempt.start_time is not None and last.attempt is not None and last.attempt.start_time is None:
            out.lateness.append((_lateness(lease.task, last, attempt.start_time), progress.attempts_used > 1))
        if attempt.outcome is None:
            if progress.state is TaskState.RUNNING and lease.cancel_waits:
                self.cancellations.settle(lease, out)
            return
        self.leases.drop(lease)
        out.ended.append(attempt.outcome)
        if lease.cancel_waits:
            self.cancellations.settle(lease, out)
        if not isinstance(cause, End | Unsent) and lease.holder is not None and lease.holder.is_open:
            out.lost.append((lease.holder, lease.token))

    def _mismatched(self, write: Update, line: list[Event] | None, out: Effects) -> None:
        """Read a task that is not what memory held, then handle again what led to the write."""
        task = write.task
        cause = write.cause
        if isinstance(cause, Grant):
            out.unmatched.append((task.lane, cause.holder))
        again = [] if cause is None or isinstance(cause, Grant) else [cause]
        self.lines.read(task.key, again + (line or []), out)

    def _write_refused(self, event: WriteRefused, now: Now, out: Effects) -> None:
        """Set a write aside: tell its caller, and read its task again so that memory is what the store holds.

        What was to be granted would be granted again at once, so that is read only after a pause.
        """
        write = event.write
        callers.give_up(write, errors.StoreFailed(event.detail), out)
        if isinstance(write, Update) and isinstance(write.cause, Grant):
            self._refused.append((now.elapsed + _REFUSED_PAUSE, write.task.key))
            return
        line = self.lines.busy.pop(write.task.key)
        if isinstance(write, Update):
            self.lines.read(write.task.key, line, out)
        elif line:
            self._handle_line(line, now, out)

    def _task_read(self, key: TaskKey, task: Found, now: Now, out: Effects) -> None:
        line = self.lines.busy.pop(key, None)
        self._drop_outdated(key, task, now, out)
        if isinstance(task, Task) and task.progress.state in WAITING:
            self.near.place(task, out.ready, now.earliest)
            # One that has changed since may have been in memory when it did.
            is_as_audited = self._audited.get(key) == task.progress.revision
            out.audit_misses += is_as_audited and key in self.near.tasks
        self._audited.pop(key, None)
        if line:
            self.lines.fresh[key] = task
            self._handle_line(line, now, out)
            del self.lines.fresh[key]

    def _drop_outdated(self, key: TaskKey, found: Found, now: Now, out: Effects) -> None:
        """Let go of what memory has of a task, but for a lease that is the one which was found."""
        outdated = self.near.tasks.get(key)
        if outdated is not None:
            self.near.take(outdated)
        outdated_lease = self.leases.agree(key, found, now, out)
        if outdated_lease is not None:
            self.cancellations.settle(outdated_lease, out)

    def _handle_line(self, line: list[Event], now: Now, out: Effects) -> None:
        for event in line:
            # Once the key is busy again, `handle` lines the rest up behind it.
            self.handle(event, now, out)

    def _buckets_loaded(self, event: BucketsLoaded, now: Now, out: Effects) -> None:
        for lane, key in event.cut.items():
            self.near.lower_cursor(lane, key)
        for task in event.tasks:
            if not self._knows_better(task):
                self.near.place(task, out.ready, now.earliest)
        self.near.covered(event.due_from)

    def _audit(self, event: Audited, out: Effects) -> None:
        """Hold tasks that the store takes for due or held against memory; what memory misses is read again.

        So is what does not decode, and that read sets it aside; a task that memory knows goes on from there.
        """
        for task in event.tasks:
            if not self._is_known(task.key) and (task.progress.state in HELD or self.near.is_complete_up_to(task)):
                self._audited[task.key] = task.progress.revision
                self.lines.read(task.key, None, out)
        for key in event.corrupt:
            if not self._is_known(key):
                self.lines.read(key, None, out)

    # Time.

    def _tick(self, now: Now, out: Effects) -> None:
        self.near.collect_due(now.earliest, out.ready)
        gap = now.elapsed - self._last_tick
        self._last_tick = now.elapsed
        if gap > bounds.LOOP_GAP + bounds.LONGEST_SLEEP:
            # Nothing could be heard while the loop did not run.
            self.leases.excuse(gap, now)
        self.cancellations.expire(now.elapsed, out)
        if now.elapsed >= self._next_sweep:
            self._next_sweep = now.elapsed + bounds.LONGEST_SLEEP // 2
            self.leases.sweep(now, out)
            while self._refused and self._refused[0][0] <= now.elapsed:
                _, key = self._refused.popleft()
                self.lines.read(key, self.lines.busy.pop(key), out)
            for task in [task for task in self.near.with_deadline if lifecycle.passed_deadline(task, now.earliest)]:
                if task.key in self.lines.busy:
                    continue
                ended = lifecycle.expired(task, now.earliest)
                assert ended is not None, "its deadline has passed"
                self.near.take(task)
                self.lines.update(task, ended, None, out)

    # What memory knows.

    def _is_known(self, key: TaskKey) -> bool:
        return key in self.lines.busy or key in self.near.tasks or key in self.leases.by_task

    def _knows_better(self, task: Task) -> bool:
        """Tell whether memory has newer word of a task than a load."""
        key = task.key
        if key in self.lines.busy:
            # An insert that finds the id taken leaves nothing in memory: then the load's word is wanted after all.
            self.lines.add(key, BucketsLoaded([task], {}))
            return True
        return key in self.near.tasks or key in self.leases.by_task


def _lateness(task: Task, last: Progress, start_time: Micros) -> Micros:
    wanted = max(task.run_at, task.create_time)
    if last.attempts_used > 1 and last.due_time is not None:
        wanted = last.due_time
    return start_time - wanted
