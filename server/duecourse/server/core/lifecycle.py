"""A task's transitions: each takes the last committed progress and returns the next one. All rules of a task are here.

What every transition keeps: the revision grows by one; a terminal state has no due time and is left by none of them; at
most one attempt is open, and it is open exactly while the state is LEASED or RUNNING; `attempts_used` counts every
attempt of the round that was not proven unstarted, from its grant on.

What happens often is built in one piece: `dataclasses.replace` costs several times as much.
"""

from dataclasses import replace

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core import attempts, retry
from duecourse.server.core.fence import Fence
from duecourse.server.core.lease import Holder
from duecourse.server.core.task import (
    TERMINAL,
    Answer,
    Attempt,
    AttemptOutcome,
    Failure,
    FailureReason,
    Progress,
    Task,
    TaskState,
)


def submitted(run_at: Micros) -> Progress:
    """Return the progress of a new task."""
    return Progress(TaskState.PENDING, run_at, 1, 1, 0, 0, 0, False, False, None)


def granted(task: Task, holder: Holder, token: bytes, node: str, fence: Fence, utc: Micros) -> Progress:
    """Open the next attempt: counted from now on, whatever becomes of it."""
    last = task.progress
    number = last.attempt_count + 1
    attempt = attempts.opened(last, holder, token, node, fence, utc)
    return Progress(
        TaskState.LEASED,
        last.due_time,
        last.revision + 1,
        last.round,
        number,
        last.attempts_used + 1,
        last.returns_in_row,
        last.cancel_requested,
        last.earlier_attempt_may_run,
        attempt,
        None,
        None,
        last.answers,
    )


def started(last: Progress, start_time: Micros) -> Progress:
    """Note that the handler began."""
    was = attempts.open_one(last)
    return _held(last, TaskState.RUNNING, attempts.going_on(was, was.sign_of_life, was.epoch, start_time, was.progress))


def renewed(
    last: Progress, sign_of_life: Micros, fence: Fence, start_time: Micros | None, said: str | None = None
) -> Progress:
    """Store a sign of life and the epoch under which the attempt now runs; its start and its handler's word, if new."""
    was = attempts.open_one(last)
    said = was.progress if said is None else said
    if start_time is None:
        return _held(last, last.state, attempts.going_on(was, sign_of_life, fence.epoch, was.start_time, said))
    return _held(last, TaskState.RUNNING, attempts.going_on(was, sign_of_life, fence.epoch, start_time, said))


def succeeded(last: Progress, utc: Micros, start_time: Micros | None, digest: bytes) -> Progress:
    """End the task: a handler did its work, even if a cancellation was requested."""
    return Progress(
        TaskState.SUCCEEDED,
        None,
        last.revision + 1,
        last.round,
        last.attempt_count,
        last.attempts_used,
        0,
        last.cancel_requested,
        last.earlier_attempt_may_run,
        attempts.closed(last, utc, AttemptOutcome.SUCCEEDED, start_time, None, digest),
        utc,
        None,
        last.answers,
    )


def failed(
    task: Task,
    utc: Micros,
    outcome: AttemptOutcome,
    *,
    is_retryable: bool = True,
    is_lost: bool = False,
    start_time: Micros | None = None,
    failure: Failure | None = None,
    digest: bytes | None = None,
    retry_after: Micros | None = None,
) -> Progress:
    """End the open attempt without success, and decide what that means for the task.

    `is_lost`: nobody vouches that the handler has ended.
    """
    last = task.progress
    attempt = attempts.closed(last, utc, outcome, start_time, failure, digest)
    verdict = _verdict(task, is_retryable=is_retryable, is_lost=is_lost)
    due_time = None
    if verdict is None:
        wait = retry_after
        if wait is None:
            wait = retry.backoff(task.policy, last.attempts_used, task.uid, last.attempt_count)
        due_time = utc + wait
        deadline = task.policy.completion_deadline
        if deadline is not None and due_time >= deadline:
            due_time = None
            verdict = (TaskState.FAILED, FailureReason.COMPLETION_DEADLINE)
    state, reason = verdict or (TaskState.RETRY_WAIT, None)
    return Progress(
        state,
        due_time,
        last.revision + 1,
        last.round,
        last.attempt_count,
        last.attempts_used,
        0,
        last.cancel_requested,
        last.earlier_attempt_may_run or is_lost,
        attempt,
        utc if due_time is None else None,
        reason,
        last.answers,
    )


def returned(last: Progress, utc: Micros, digest: bytes | None = None) -> Progress:
    """End an attempt that is proven unstarted: it costs nothing, and the task waits again as it did before."""
    returns = last.returns_in_row + 1
    used = last.attempts_used - 1
    end_time = due_time = None
    if last.cancel_requested:
        state = TaskState.CANCELLED
        end_time = utc
    else:
        state = TaskState.RETRY_WAIT if used else TaskState.PENDING
        wait = retry.return_backoff(returns)
        due_time = utc + wait if wait else last.due_time
    return Progress(
        state,
        due_time,
        last.revision + 1,
        last.round,
        last.attempt_count,
        used,
        returns,
        last.cancel_requested,
        last.earlier_attempt_may_run,
        attempts.closed(last, utc, AttemptOutcome.RETURNED, None, None, digest),
        end_time,
        None,
        last.answers,
    )


def undeliverable(last: Progress, utc: Micros) -> Progress:
    """End a task that was granted and does not decode where it matters to its worker, who has not been sent it."""
    back = returned(last, utc)
    return back if back.state in TERMINAL else _ended(back, TaskState.FAILED, utc, FailureReason.RECORD_CORRUPT)


def cancelled(last: Progress, utc: Micros, answers: tuple[Answer, ...]) -> Progress:
    """End a waiting task."""
    return _ended(replace(last, revision=last.revision + 1, answers=answers), TaskState.CANCELLED, utc)


def cancel_requested(last: Progress, answers: tuple[Answer, ...]) -> Progress:
    """Note the cancellation of a task whose attempt is out, before anyone is asked."""
    return replace(last, revision=last.revision + 1, cancel_requested=True, answers=answers)


def expired(task: Task, utc: Micros) -> Progress | None:
    """Return the end of a waiting task whose deadline has passed, None if none has."""
    reason = passed_deadline(task, utc)
    if reason is None:
        return None
    return _ended(replace(task.progress, revision=task.progress.revision + 1), TaskState.FAILED, utc, reason)


def passed_deadline(task: Task, utc: Micros) -> FailureReason | None:
    """Tell which deadline of a waiting task has passed; `start_deadline` counts only while no attempt was used."""
    policy = task.policy
    if policy.completion_deadline is not None and utc >= policy.completion_deadline:
        return FailureReason.COMPLETION_DEADLINE
    if policy.start_deadline is not None and utc >= policy.start_deadline and not task.progress.attempts_used:
        return FailureReason.START_DEADLINE
    return None


def first_deadline(task: Task) -> Micros | None:
    """Return the instant at which a waiting task's first deadline passes, None if it has none."""
    policy = task.policy
    if policy.start_deadline is None or task.progress.attempts_used:
        return policy.completion_deadline
    if policy.completion_deadline is None:
        return policy.start_deadline
    return min(policy.start_deadline, policy.completion_deadline)


def with_answer(answers: tuple[Answer, ...], answer: Answer) -> tuple[Answer, ...]:
    """Keep an answer with the last ones."""
    return (*answers, answer)[-bounds.MAX_REQUEST_ANSWERS :]


def _verdict(task: Task, *, is_retryable: bool, is_lost: bool) -> tuple[TaskState, FailureReason | None] | None:
    """Say how an attempt without success ends its task; None: there may be another attempt.

    In order: a requested cancellation ends the task CANCELLED; a lost attempt ends it where `fail_when_lost` says so;
    then what is not retryable, and the number of attempts.
    """
    if task.progress.cancel_requested:
        return TaskState.CANCELLED, None
    if is_lost and task.policy.fail_when_lost:
        return TaskState.FAILED, FailureReason.OUTCOME_UNKNOWN
    if not is_retryable:
        return TaskState.FAILED, FailureReason.NON_RETRYABLE
    if task.progress.attempts_used >= task.policy.max_attempts:
        return TaskState.FAILED, FailureReason.ATTEMPTS_EXHAUSTED
    return None


def _ended(last: Progress, state: TaskState, utc: Micros, reason: FailureReason | None = None) -> Progress:
    return replace(last, state=state, due_time=None, end_time=utc, failure_reason=reason)


def _held(last: Progress, state: TaskState, attempt: Attempt) -> Progress:
    return Progress(
        state,
        last.due_time,
        last.revision + 1,
        last.round,
        last.attempt_count,
        last.attempts_used,
        last.returns_in_row,
        last.cancel_requested,
        last.earlier_attempt_may_run,
        attempt,
        None,
        None,
        last.answers,
    )
