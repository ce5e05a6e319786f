"""The table of states and events in `docs/semantics.md`, row by row, and the rules under it."""

from typing import Any

import pytest
from core.builders import START
from core.one_shard import HELD, LEASE, OneShard, any_state, ended, held, retrying, waiting

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core import errors, events
from duecourse.server.core.effects import StopReason, Submitted, Verdict
from duecourse.server.core.events import OutcomeKind
from duecourse.server.core.task import AttemptOutcome, FailureReason, Policy, TaskState

MINUTE = bounds.MINUTE

# Submitting.


def test_a_submission_waits_from_its_acceptance_on() -> None:
    shard = OneShard()
    assert shard.submit(delay=MINUTE) == Submitted(b"task", created=True)
    assert shard.progress().state is TaskState.PENDING
    assert shard.progress().due_time == START + MINUTE
    assert not shard.is_ready()
    shard.pass_time(MINUTE)
    assert shard.is_ready()


@pytest.mark.parametrize("make", any_state())
def test_the_same_submission_again_changes_nothing(make: Any) -> None:
    shard = make()
    before = shard.progress()
    assert shard.submit() == Submitted(b"task", created=False)
    assert shard.progress() == before


@pytest.mark.parametrize("make", any_state())
def test_another_submission_under_the_id_is_refused(make: Any) -> None:
    shard = make()
    before = shard.progress()
    assert shard.submit(fingerprint=b"other") == errors.TaskExists("task")
    assert shard.progress() == before


# Granting.


@pytest.mark.parametrize("make", [waiting, retrying])
def test_a_grant_counts_the_attempt_and_assigns_it(make: Any) -> None:
    shard = make()
    shard.pass_time(MINUTE)
    last = shard.progress()
    token = shard.grant()
    progress = shard.progress()
    assert progress.state is TaskState.LEASED
    assert progress.attempt_count == last.attempt_count + 1
    assert progress.attempts_used == last.attempts_used + 1
    assert shard.attempt().lease_token == token
    assert [assignment.lease.token for assignment in shard.out.assignments][-1] == token


def test_a_task_that_is_not_due_is_not_granted() -> None:
    shard = OneShard()
    shard.submit(delay=MINUTE)
    shard.grant()
    assert shard.progress().state is TaskState.PENDING
    assert not shard.out.assignments
    assert shard.out.unmatched, "the credit comes back"


def test_fencing_tokens_grow_even_if_the_clock_does_not() -> None:
    shard = waiting(Policy(max_attempts=9, initial_backoff=bounds.MIN_BACKOFF, jitter=0.0))
    tokens = []
    for _ in range(5):
        lease_token = shard.grant()
        tokens.append(shard.attempt().fencing_token)
        shard.end(lease_token, OutcomeKind.RETRYABLE, retry_after=0)
    assert tokens == sorted(set(tokens))


# Deadlines of what waits.


def test_a_task_that_was_not_started_by_its_start_deadline_fails() -> None:
    shard = waiting(Policy(start_deadline=START + MINUTE))
    shard.pass_time(MINUTE - 1)
    assert shard.progress().state is TaskState.PENDING
    shard.pass_time(bounds.SECOND)
    assert shard.progress().state is TaskState.FAILED
    assert shard.progress().failure_reason is FailureReason.START_DEADLINE


def test_the_start_deadline_does_not_bound_a_second_attempt() -> None:
    shard = retrying(Policy(start_deadline=START + MINUTE, initial_backoff=bounds.HOUR, max_backoff=bounds.HOUR))
    shard.pass_time(2 * MINUTE)
    assert shard.progress().state is TaskState.RETRY_WAIT


def test_the_start_deadline_bounds_the_start_of_what_was_returned() -> None:
    shard, token = held(TaskState.LEASED, Policy(start_deadline=START + MINUTE))
    shard.end(token, OutcomeKind.RETURNED)
    shard.pass_time(MINUTE + bounds.SECOND)
    assert shard.progress().failure_reason is FailureReason.START_DEADLINE


def test_the_first_assignment_says_within_what_time_it_starts_and_later_ones_do_not() -> None:
    policy = Policy(start_deadline=START + MINUTE, initial_backoff=bounds.MIN_BACKOFF, jitter=0.0)
    shard = OneShard()
    shard.submit(policy=policy)
    shard.pass_time(20 * bounds.SECOND)
    token = shard.grant()
    assert shard.out.assignments[-1].start_within == 40 * bounds.SECOND
    shard.end(token, OutcomeKind.RETRYABLE)
    shard.pass_time(bounds.SECOND)
    shard.grant()
    assert shard.out.assignments[-1].start_within is None


@pytest.mark.parametrize("make", [waiting, retrying])
def test_a_task_that_waits_beyond_its_completion_deadline_fails(make: Any) -> None:
    policy = Policy(completion_deadline=START + MINUTE, initial_backoff=30 * bounds.SECOND, jitter=0.0)
    shard = make(policy)
    shard.pass_time(MINUTE + bounds.SECOND)
    assert shard.progress().state is TaskState.FAILED
    assert shard.progress().failure_reason is FailureReason.COMPLETION_DEADLINE


def test_a_grant_that_comes_after_the_deadline_ends_the_task_instead() -> None:
    shard = waiting(Policy(start_deadline=START + MINUTE))
    shard.elapsed += 2 * MINUTE
    shard.grant()
    assert shard.progress().failure_reason is FailureReason.START_DEADLINE
    assert shard.out.unmatched
    assert not shard.out.assignments


# Ends that the worker tells of.


def test_started_is_recorded_once() -> None:
    shard, token = held(TaskState.LEASED)
    shard.elapsed += bounds.SECOND
    shard.start(token)
    assert shard.progress().state is TaskState.RUNNING
    assert shard.attempt().start_time == START + bounds.SECOND
    revision = shard.progress().revision
    shard.start(token)
    assert shard.progress().revision == revision


@pytest.mark.parametrize("state", HELD)
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_success_ends_the_task_even_if_its_cancellation_was_requested(state: TaskState, is_cancelled: bool) -> None:
    shard, token = held(state)
    if is_cancelled:
        shard.cancel()
    assert shard.end(token, OutcomeKind.SUCCEEDED) is Verdict.RECORDED
    assert shard.progress().state is TaskState.SUCCEEDED
    assert shard.attempt().outcome is AttemptOutcome.SUCCEEDED


@pytest.mark.parametrize("state", HELD)
@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        (OutcomeKind.RETRYABLE, AttemptOutcome.FAILED),
        (OutcomeKind.TIMED_OUT, AttemptOutcome.TIMED_OUT),
        (OutcomeKind.CANCELLED, AttemptOutcome.CANCELLED),
    ],
)
def test_a_failure_is_tried_again_after_the_back_off(
    state: TaskState, kind: OutcomeKind, outcome: AttemptOutcome
) -> None:
    shard, token = held(state)
    assert shard.end(token, kind) is Verdict.RECORDED
    assert shard.progress().state is TaskState.RETRY_WAIT
    assert shard.progress().due_time == START + bounds.SECOND
    assert shard.attempt().outcome is outcome
    assert not shard.progress().earlier_attempt_may_run
    assert not shard.is_ready()
    shard.pass_time(bounds.SECOND)
    assert shard.is_ready()


@pytest.mark.parametrize("state", HELD)
def test_what_is_not_retryable_ends_the_task(state: TaskState) -> None:
    shard, token = held(state)
    shard.end(token, OutcomeKind.NON_RETRYABLE)
    assert shard.progress().state is TaskState.FAILED
    assert shard.progress().failure_reason is FailureReason.NON_RETRYABLE


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_the_last_attempt_ends_the_task(attempts: int) -> None:
    shard = waiting(Policy(max_attempts=attempts, initial_backoff=bounds.MIN_BACKOFF, jitter=0.0))
    for _ in range(attempts):
        assert shard.progress().failure_reason is None
        shard.pass_time(bounds.SECOND)
        shard.end(shard.grant(), OutcomeKind.RETRYABLE)
    assert shard.progress().failure_reason is FailureReason.ATTEMPTS_EXHAUSTED
    assert shard.progress().attempt_count == attempts


@pytest.mark.parametrize("retry_after", [0, 1, 3 * bounds.HOUR])
def test_a_worker_may_say_when_to_try_again(retry_after: Micros) -> None:
    shard, token = held(TaskState.RUNNING)
    shard.end(token, OutcomeKind.RETRYABLE, retry_after=retry_after)
    assert shard.progress().due_time == START + retry_after


def test_a_retry_that_would_come_after_the_completion_deadline_is_not_waited_for() -> None:
    shard, token = held(TaskState.RUNNING, Policy(completion_deadline=START + MINUTE))
    shard.end(token, OutcomeKind.RETRYABLE, retry_after=MINUTE)
    assert shard.progress().state is TaskState.FAILED
    assert shard.progress().failure_reason is FailureReason.COMPLETION_DEADLINE


# Ends without a word of the handler.


def test_a_returned_attempt_costs_nothing() -> None:
    shard, token = held(TaskState.LEASED)
    assert shard.end(token, OutcomeKind.RETURNED) is Verdict.RECORDED
    assert shard.progress().state is TaskState.PENDING
    assert shard.progress().attempts_used == 0
    assert shard.progress().due_time == START
    assert shard.is_ready()


def test_a_returned_retry_waits_as_a_retry() -> None:
    shard = retrying()
    shard.pass_time(MINUTE)
    shard.end(shard.grant(), OutcomeKind.RETURNED)
    assert shard.progress().state is TaskState.RETRY_WAIT
    assert shard.progress().attempts_used == 1
    assert shard.is_ready()


def test_returns_in_a_row_wait_and_anything_else_ends_the_row() -> None:
    shard = waiting()
    waits = []
    for _ in range(12):
        shard.end(shard.grant(), OutcomeKind.RETURNED)
        due_time = shard.progress().due_time
        assert due_time is not None
        waits.append(max(0, due_time - START - shard.elapsed))
        shard.pass_time(MINUTE)
    doubled = [bounds.FIRST_RETURN_BACKOFF * 2**power for power in range(9)]
    assert waits == [0, 0, *doubled, bounds.MAX_RETURN_BACKOFF]
    shard.end(shard.grant(), OutcomeKind.RETRYABLE, retry_after=0)
    shard.end(shard.grant(), OutcomeKind.RETURNED)
    assert shard.progress().returns_in_row == 1
    assert shard.progress().attempts_used == 1


def test_what_its_worker_does_not_list_is_returned() -> None:
    shard, _ = held(TaskState.LEASED)
    shard.hold()
    assert shard.attempt().outcome is AttemptOutcome.RETURNED
    assert shard.progress().state is TaskState.PENDING


def test_what_may_still_be_on_its_way_is_not_absent() -> None:
    shard, _ = held(TaskState.LEASED)
    shard.hold(last=0)
    shard.hold(is_complete=False)
    assert shard.progress().state is TaskState.LEASED


def test_a_running_attempt_that_its_worker_does_not_list_is_lost() -> None:
    shard, _ = held(TaskState.RUNNING)
    shard.hold()
    assert shard.attempt().outcome is AttemptOutcome.LEASE_LOST
    assert shard.progress().state is TaskState.RETRY_WAIT
    assert shard.progress().earlier_attempt_may_run


def test_a_running_attempt_that_is_said_to_be_unstarted_is_lost_and_the_word_can_be_repeated() -> None:
    shard, token = held(TaskState.RUNNING)
    assert shard.end(token, OutcomeKind.RETURNED) is Verdict.RECORDED
    assert shard.attempt().outcome is AttemptOutcome.LEASE_LOST
    assert shard.end(token, OutcomeKind.RETURNED) is Verdict.RECORDED


@pytest.mark.parametrize("state", HELD)
def test_a_lease_that_is_not_renewed_is_lost(state: TaskState) -> None:
    shard, token = held(state)
    shard.pass_time(LEASE - bounds.SECOND, is_renewed=False)
    assert shard.progress().state is state
    shard.pass_time(2 * bounds.SECOND, is_renewed=False)
    assert shard.attempt().outcome is AttemptOutcome.LEASE_LOST
    assert shard.progress().earlier_attempt_may_run
    assert shard.out.lost == [(shard.holder, token)]


@pytest.mark.parametrize("state", HELD)
def test_an_attempt_that_is_out_of_time_is_asked_to_stop_and_ended_after_the_grace(state: TaskState) -> None:
    shard, token = held(state, Policy(attempt_timeout=MINUTE))
    shard.pass_time(MINUTE + bounds.SECOND)
    assert shard.out.stops == [(shard.holder, token, StopReason.TIMED_OUT)]
    assert shard.progress().state is state
    shard.pass_time(bounds.STOP_GRACE)
    assert shard.attempt().outcome is AttemptOutcome.TIMED_OUT
    assert shard.progress().state is TaskState.RETRY_WAIT
    assert shard.progress().earlier_attempt_may_run
    assert shard.out.lost == [(shard.holder, token)]


def test_an_attempt_that_stops_within_the_grace_leaves_no_doubt() -> None:
    shard, token = held(TaskState.RUNNING, Policy(attempt_timeout=MINUTE))
    shard.pass_time(MINUTE + bounds.SECOND)
    shard.end(token, OutcomeKind.TIMED_OUT)
    assert shard.attempt().outcome is AttemptOutcome.TIMED_OUT
    assert not shard.progress().earlier_attempt_may_run


def test_the_completion_deadline_ends_a_running_attempt_and_its_task() -> None:
    shard, token = held(TaskState.RUNNING, Policy(completion_deadline=START + MINUTE))
    assert shard.out.assignments[-1].time_left == MINUTE
    shard.pass_time(MINUTE + bounds.SECOND)
    assert shard.out.stops == [(shard.holder, token, StopReason.TIMED_OUT)]
    shard.pass_time(bounds.STOP_GRACE)
    assert shard.progress().failure_reason is FailureReason.COMPLETION_DEADLINE


@pytest.mark.parametrize("how", ["expires", "times out", "is absent"])
def test_a_lost_attempt_ends_a_task_whose_effect_must_not_repeat(how: str) -> None:
    shard, _ = held(TaskState.RUNNING, Policy(fail_when_lost=True, attempt_timeout=MINUTE))
    match how:
        case "expires":
            shard.pass_time(LEASE + bounds.SECOND, is_renewed=False)
        case "times out":
            shard.pass_time(MINUTE + bounds.STOP_GRACE + 2 * bounds.SECOND)
        case _:
            shard.hold()
    assert shard.progress().state is TaskState.FAILED
    assert shard.progress().failure_reason is FailureReason.OUTCOME_UNKNOWN


@pytest.mark.parametrize("kind", [OutcomeKind.RETRYABLE, OutcomeKind.TIMED_OUT, OutcomeKind.RETURNED])
def test_what_a_worker_vouches_for_is_not_lost(kind: OutcomeKind) -> None:
    shard, token = held(TaskState.LEASED, Policy(fail_when_lost=True))
    shard.end(token, kind)
    assert shard.progress().state in (TaskState.PENDING, TaskState.RETRY_WAIT)


def test_the_order_of_reasons_is_that_of_the_document() -> None:
    policy = Policy(max_attempts=1, fail_when_lost=True, completion_deadline=START + bounds.SECOND)
    shard, _ = held(TaskState.RUNNING, policy)
    shard.pass_time(MINUTE)
    assert shard.progress().failure_reason is FailureReason.OUTCOME_UNKNOWN
    policy = Policy(max_attempts=1, completion_deadline=START + bounds.SECOND)
    shard, token = held(TaskState.RUNNING, policy)
    shard.end(token, OutcomeKind.RETRYABLE, retry_after=MINUTE)
    assert shard.progress().failure_reason is FailureReason.ATTEMPTS_EXHAUSTED
    shard, token = held(TaskState.RUNNING, policy)
    shard.end(token, OutcomeKind.NON_RETRYABLE)
    assert shard.progress().failure_reason is FailureReason.NON_RETRYABLE


# Outcomes that come again or too late.


@pytest.mark.parametrize("kind", list(OutcomeKind))
def test_the_same_outcome_again_is_recorded_and_another_one_is_not(kind: OutcomeKind) -> None:
    shard, token = held(TaskState.LEASED)
    assert shard.end(token, kind) is Verdict.RECORDED
    before = shard.progress()
    assert shard.end(token, kind) is Verdict.RECORDED
    other = OutcomeKind.SUCCEEDED if kind is not OutcomeKind.SUCCEEDED else OutcomeKind.RETRYABLE
    assert shard.end(token, other) is Verdict.LEASE_LOST
    assert shard.progress() == before


def test_an_outcome_under_a_token_that_was_replaced_is_refused() -> None:
    shard, token = held(TaskState.RUNNING)
    shard.pass_time(LEASE + bounds.SECOND, is_renewed=False)
    shard.pass_time(MINUTE)
    shard.grant()
    before = shard.progress()
    assert shard.end(token, OutcomeKind.SUCCEEDED) is Verdict.LEASE_LOST
    shard.start(token)
    assert shard.progress() == before


def test_an_outcome_that_comes_after_the_time_but_before_the_sweep_counts() -> None:
    shard, token = held(TaskState.RUNNING)
    shard.elapsed += LEASE + bounds.SECOND
    assert shard.end(token, OutcomeKind.SUCCEEDED) is Verdict.RECORDED


def test_an_outcome_of_a_token_that_nobody_knows_is_told_so() -> None:
    shard = waiting()
    assert shard.end(b"nobody's", OutcomeKind.SUCCEEDED) is Verdict.UNKNOWN_TOKEN
    assert shard.end(b"nobody's", OutcomeKind.SUCCEEDED, task_id="nothing") is Verdict.UNKNOWN_TOKEN


def test_a_token_counts_only_for_its_own_task() -> None:
    shard, token = held(TaskState.LEASED)
    shard.submit("other")
    shard.start(token, task_id="other")
    assert shard.end(token, OutcomeKind.SUCCEEDED, task_id="other") is Verdict.UNKNOWN_TOKEN
    assert shard.progress().state is TaskState.LEASED
    assert shard.progress("other").state is TaskState.PENDING


def test_events_without_a_row_change_nothing() -> None:
    shard, token = ended(TaskState.SUCCEEDED)
    before = shard.progress()
    shard.start(token)
    shard.hold(token)
    shard.hold()
    shard.pass_time(bounds.HOUR)
    shard.handle(events.Audited([]))
    assert shard.progress() == before
