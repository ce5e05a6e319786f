"""`Cancellations`: what a shard answers those who cancel a task, and when.

A waiting task is cancelled at once: PREVENTED. Of one whose attempt is out `cancel_requested` is committed first; then
its worker is asked to stop, and the answer waits for the worker's word whether the handler had begun, as long as the
caller lets it. Proven unstarted is PREVENTED; begun, or no word in time, is REQUESTED.
"""

import heapq
import itertools

from duecourse.model.instants import Micros, Now
from duecourse.server.core import errors, lifecycle
from duecourse.server.core.effects import Cancelled, CancelResult, Effects, StopReason
from duecourse.server.core.events import Cancel, Found
from duecourse.server.core.lease import CancelWait, Lease
from duecourse.server.core.leases import Leases
from duecourse.server.core.lines import Lines
from duecourse.server.core.near import Near
from duecourse.server.core.task import HELD, TERMINAL, WAITING, Answer, AttemptOutcome, Progress, Task, TaskState


class Cancellations:
    """See the module's docstring."""

    def __init__(self, near: Near, leases: Leases, lines: Lines) -> None:
        self._near = near
        self._leases = leases
        self._lines = lines
        self._waits: list[tuple[Micros, int, Lease, CancelWait]] = []
        """A heap; what was answered already stays in it until its time."""
        self._order = itertools.count()

    def cancel(self, event: Cancel, now: Now, out: Effects) -> None:
        """Cancel a task."""
        key = event.key
        if key in self._lines.busy:
            self._lines.add(key, event)
            return
        lease = self._leases.by_task.get(key)
        task: Found = lease.task if lease is not None else self._near.tasks.get(key) or self._lines.fresh.get(key)
        if task is None:
            if key in self._lines.fresh:
                out.answers.append((event.origin, errors.TaskNotFound(key.task_id)))
            else:
                self._lines.read(key, [event], out)
        elif task is False:
            out.answers.append((event.origin, errors.RecordCorrupt(key.task_id)))
        else:
            self._cancel_task(task, event, now, out)

    def committed(self, task: Task, event: Cancel, now: Now, out: Effects) -> None:
        """Go on with a cancellation that is durable now."""
        if task.progress.state is TaskState.CANCELLED:
            out.answers.append((event.origin, _answer(CancelResult.PREVENTED, task.progress)))
        else:
            self._ask(task, event, now, out)

    def settle(self, lease: Lease, out: Effects) -> None:
        """Answer those who wait for the fate of an attempt: it is known now."""
        progress = lease.task.progress
        attempt = progress.attempt
        is_prevented = attempt is not None and attempt.outcome is AttemptOutcome.RETURNED
        result = CancelResult.PREVENTED if is_prevented else CancelResult.REQUESTED
        out.answers.extend((wait.origin, _answer(result, progress)) for wait in lease.cancel_waits)
        lease.cancel_waits.clear()

    def expire(self, elapsed: Micros, out: Effects) -> None:
        """Answer those who have waited for as long as they would."""
        while self._waits and self._waits[0][0] <= elapsed:
            _, _, lease, wait = heapq.heappop(self._waits)
            if wait in lease.cancel_waits:
                lease.cancel_waits.remove(wait)
                out.answers.append((wait.origin, _answer(CancelResult.REQUESTED, lease.task.progress)))

    def next_wait(self) -> Micros | None:
        """Return the elapsed time at which somebody has to be answered, None if nobody waits."""
        return self._waits[0][0] if self._waits else None

    def close(self, out: Effects) -> None:
        """Answer all who wait: the term is over."""
        for _, _, lease, wait in self._waits:
            if wait in lease.cancel_waits:
                out.answers.append((wait.origin, _answer(CancelResult.REQUESTED, lease.task.progress)))

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
            out.answers.append((event.origin, _answer(CancelResult.ALREADY_FINISHED, last)))
            return
        answers = last.answers
        is_waiting = last.state in WAITING
        if event.request_id:
            attempt = 0 if is_waiting else last.attempt_count
            kept = Answer(event.request_id, event.fingerprint, attempt, is_waiting, last.earlier_attempt_may_run)
            answers = lifecycle.with_answer(answers, kept)
        if is_waiting:
            if task.key in self._near.tasks:
                self._near.take(task)
            self._lines.update(task, lifecycle.cancelled(last, now.latest, answers), event, out)
        else:
            self._lines.update(task, lifecycle.cancel_requested(last, answers), event, out)

    def _repeat(self, task: Task, event: Cancel, answer: Answer, now: Now, out: Effects) -> None:
        """Answer a repeated cancellation as the first one was, from the record of the attempt that was out."""
        last = task.progress
        attempt = last.attempt if last.attempt is not None and last.attempt.number == answer.attempt else None
        if answer.fingerprint != event.fingerprint:
            out.answers.append((event.origin, errors.RequestIdReused(event.request_id)))
        elif last.state in HELD and attempt is not None:
            self._ask(task, event, now, out)
        else:
            was_returned = attempt is not None and attempt.outcome is AttemptOutcome.RETURNED
            result = CancelResult.PREVENTED if answer.was_prevented or was_returned else CancelResult.REQUESTED
            out.answers.append((event.origin, Cancelled(result, last.state, answer.earlier_attempt_may_run)))

    def _ask(self, task: Task, event: Cancel, now: Now, out: Effects) -> None:
        """Ask the worker to stop, and wait for its word if it has not said yet that the handler began."""
        lease = self._leases.by_task[task.key]
        if lease.holder is not None and lease.holder.is_open:
            out.stops.append((lease.holder, lease.token, StopReason.CANCELLED))
        if task.progress.state is TaskState.RUNNING or not event.wait:
            out.answers.append((event.origin, _answer(CancelResult.REQUESTED, task.progress)))
            return
        wait = CancelWait(event.origin, now.elapsed + event.wait)
        lease.cancel_waits.append(wait)
        heapq.heappush(self._waits, (wait.until, next(self._order), lease, wait))


def _answer(result: CancelResult, progress: Progress) -> Cancelled:
    return Cancelled(result, progress.state, progress.earlier_attempt_may_run)
