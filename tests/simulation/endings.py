"""What becomes of a task whose attempt or deadline has ended, as `docs/semantics.md` says it.

Written from the document, not from the core, so that what both say alike is not wrong for the same reason.
"""

from simulation.history import Grant
from simulation.plan import RETRY_AFTER

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import Attempt, AttemptOutcome, FailureReason, Policy, Progress, TaskState
from duecourse.worker import RetryAfter


def after_attempt(policy: Policy, before: Progress, after: Progress, attempt: Attempt, grant: Grant) -> str | None:
    """Say what is wrong with how a task goes on after an attempt, None if nothing is."""
    expected = _expected(policy, before, after, attempt, grant)
    found = after.state, after.failure_reason
    return None if found in expected else f"{found} after {attempt.outcome}, and not {expected}"


def after_deadline(policy: Policy, before: Progress, after: Progress, reached: Micros) -> str | None:
    """Say what is wrong with how a task that waited was given up by a time of the store's clock, None if nothing is."""
    deadline = {
        FailureReason.START_DEADLINE: None if before.attempts_used else policy.start_deadline,
        FailureReason.COMPLETION_DEADLINE: policy.completion_deadline,
    }.get(after.failure_reason or FailureReason.RECORD_CORRUPT)
    is_over = deadline is not None and deadline <= reached
    return None if is_over else f"given up for {after.failure_reason}, which was not to be before {deadline}"


def _expected(
    policy: Policy, before: Progress, after: Progress, attempt: Attempt, grant: Grant
) -> list[tuple[TaskState, FailureReason | None]]:
    outcome = attempt.outcome
    if outcome is AttemptOutcome.SUCCEEDED:
        return [(TaskState.SUCCEEDED, None)]
    if before.cancel_requested:
        return [(TaskState.CANCELLED, None)]
    if outcome is AttemptOutcome.RETURNED:
        return [(TaskState.RETRY_WAIT if after.attempts_used else TaskState.PENDING, None)]
    # Without a worker's word there is no digest of it.
    is_unsaid = outcome is AttemptOutcome.TIMED_OUT and attempt.outcome_digest is None
    if policy.fail_when_lost and (outcome is AttemptOutcome.LEASE_LOST or is_unsaid):
        return [(TaskState.FAILED, FailureReason.OUTCOME_UNKNOWN)]
    if outcome is AttemptOutcome.FAILED and grant.is_said_to_be_final:
        return [(TaskState.FAILED, FailureReason.NON_RETRYABLE)]
    if before.attempts_used >= policy.max_attempts:
        return [(TaskState.FAILED, FailureReason.ATTEMPTS_EXHAUSTED)]
    least, most = _wait(policy, before.attempts_used, attempt)
    end_time, deadline = attempt.end_time or 0, policy.completion_deadline
    expected: list[tuple[TaskState, FailureReason | None]] = []
    if deadline is None or end_time + least < deadline:
        waited = (after.due_time or end_time + least) - end_time
        expected += [(TaskState.RETRY_WAIT, None)] if least <= waited <= most else []
    if deadline is not None and end_time + most >= deadline:
        expected.append((TaskState.FAILED, FailureReason.COMPLETION_DEADLINE))
    return expected


def _wait(policy: Policy, failures: int, attempt: Attempt) -> tuple[Micros, Micros]:
    """Return how long a task waits at least and at most after so many failures, the last of them that of an attempt."""
    wait = min(policy.max_backoff, policy.initial_backoff * policy.multiplier ** (failures - 1))
    least, most = int(wait * (1 - policy.jitter)) - 1, max(bounds.MIN_BACKOFF, int(wait * (1 + policy.jitter)) + 1)
    if attempt.failure is not None and attempt.failure.type.endswith(RetryAfter.__name__):
        # The handler may have been told to stop just before, and then it is not asked when.
        return min(least, RETRY_AFTER), max(most, RETRY_AFTER)
    return least, most
