"""What a cancellation is answered: the truth, whatever became of the attempt; and what a repeat of it is answered."""

from typing import Any

import pytest
from core.one_shard import ENDED, HELD, LEASE, OneShard, ended, held, retrying, waiting

from duecourse.model import bounds
from duecourse.server.core import errors
from duecourse.server.core.effects import Cancelled, CancelResult, StopReason
from duecourse.server.core.events import OutcomeKind
from duecourse.server.core.task import Policy, TaskState

MINUTE = bounds.MINUTE


@pytest.mark.parametrize("make", [waiting, retrying])
def test_cancelling_what_waits_prevents_it(make: Any) -> None:
    shard = make()
    origin = shard.cancel()
    assert shard.answer(origin) == Cancelled(CancelResult.PREVENTED, TaskState.CANCELLED, earlier_attempt_may_run=False)
    assert shard.progress().state is TaskState.CANCELLED
    assert not shard.shard.near.tasks


def test_cancelling_says_that_a_lost_attempt_may_still_run() -> None:
    shard, _ = held(TaskState.RUNNING)
    shard.pass_time(LEASE + bounds.SECOND, is_renewed=False)
    answer = shard.answer(shard.cancel())
    assert answer == Cancelled(CancelResult.PREVENTED, TaskState.CANCELLED, earlier_attempt_may_run=True)


def test_cancelling_what_is_only_in_the_store_reads_it_first() -> None:
    shard = OneShard()
    shard.submit(delay=bounds.HOUR * 2)
    assert not shard.shard.near.tasks
    answer = shard.answer(shard.cancel())
    assert answer == Cancelled(CancelResult.PREVENTED, TaskState.CANCELLED, earlier_attempt_may_run=False)


def test_cancelling_what_does_not_exist_is_not_found() -> None:
    shard = OneShard()
    assert shard.answer(shard.cancel("nothing")) == errors.TaskNotFound("nothing")


@pytest.mark.parametrize("state", HELD)
def test_a_cancellation_is_stored_before_the_worker_is_asked(state: TaskState) -> None:
    shard, token = held(state)
    shard.holds_commits = True
    shard.cancel()
    assert not shard.out.stops
    shard.commit()
    assert shard.progress().cancel_requested
    assert shard.progress().state is state
    assert shard.out.stops == [(shard.holder, token, StopReason.CANCELLED)]


def test_a_returned_attempt_proves_that_it_was_prevented() -> None:
    shard, token = held(TaskState.LEASED)
    origin = shard.cancel(wait=bounds.SECOND)
    assert shard.answer(origin) is None
    shard.end(token, OutcomeKind.RETURNED)
    assert shard.answer(origin) == Cancelled(CancelResult.PREVENTED, TaskState.CANCELLED, earlier_attempt_may_run=False)


@pytest.mark.parametrize("how", ["it started", "it ended", "nobody answered", "it ran already", "not waited for"])
def test_anything_else_is_only_requested(how: str) -> None:
    shard, token = held(TaskState.RUNNING if how == "it ran already" else TaskState.LEASED)
    origin = shard.cancel(wait=0 if how == "not waited for" else bounds.SECOND)
    match how:
        case "it started":
            shard.start(token)
        case "it ended":
            shard.end(token, OutcomeKind.CANCELLED)
        case "nobody answered":
            shard.pass_time(bounds.SECOND)
    answer = shard.answer(origin)
    assert isinstance(answer, Cancelled)
    assert answer.result is CancelResult.REQUESTED


@pytest.mark.parametrize("how", ["fails", "fails for good", "times out", "expires", "is absent", "is returned"])
@pytest.mark.parametrize("state", HELD)
def test_with_a_cancellation_requested_every_end_but_success_is_cancelled(how: str, state: TaskState) -> None:
    shard, token = held(state, Policy(attempt_timeout=MINUTE, fail_when_lost=True))
    shard.cancel()
    match how:
        case "fails":
            shard.end(token, OutcomeKind.RETRYABLE)
        case "fails for good":
            shard.end(token, OutcomeKind.NON_RETRYABLE)
        case "times out":
            shard.pass_time(MINUTE + bounds.STOP_GRACE + 2 * bounds.SECOND)
        case "expires":
            shard.pass_time(LEASE + bounds.SECOND, is_renewed=False)
        case "is absent":
            shard.hold()
        case _:
            shard.end(token, OutcomeKind.RETURNED)
    assert shard.progress().state is TaskState.CANCELLED
    assert shard.progress().due_time is None


@pytest.mark.parametrize("state", ENDED)
def test_cancelling_what_has_ended_says_how_it_ended(state: TaskState) -> None:
    shard, _ = ended(state)
    before = shard.progress()
    answer = shard.answer(shard.cancel())
    assert answer == Cancelled(CancelResult.ALREADY_FINISHED, state, earlier_attempt_may_run=False)
    assert shard.progress() == before


def test_a_cancellation_that_expects_another_revision_is_refused() -> None:
    shard = waiting()
    assert shard.answer(shard.cancel(revision=7)) == errors.RevisionMismatch(7, 1)
    assert shard.progress().state is TaskState.PENDING
    answer = shard.answer(shard.cancel(revision=1))
    assert isinstance(answer, Cancelled)


def test_a_repeated_cancellation_gets_the_first_answer() -> None:
    shard = waiting()
    first = shard.answer(shard.cancel(request_id="one"))
    again = shard.answer(shard.cancel(request_id="one"))
    assert first == again
    assert shard.answer(shard.cancel(request_id="one", fingerprint=b"other")) == errors.RequestIdReused("one")


@pytest.mark.parametrize(
    ("end", "result"),
    [(OutcomeKind.RETURNED, CancelResult.PREVENTED), (OutcomeKind.CANCELLED, CancelResult.REQUESTED)],
)
def test_a_repeat_is_answered_from_the_record_of_the_attempt(end: OutcomeKind, result: CancelResult) -> None:
    shard, token = held(TaskState.LEASED)
    shard.cancel(request_id="one")
    shard.end(token, end)
    answer = shard.answer(shard.cancel(request_id="one"))
    assert answer == Cancelled(result, TaskState.CANCELLED, earlier_attempt_may_run=False)


def test_a_repeat_waits_again_while_the_attempt_is_open() -> None:
    shard, token = held(TaskState.LEASED)
    shard.cancel(request_id="one")
    again = shard.cancel(request_id="one", wait=bounds.SECOND)
    assert shard.answer(again) is None
    shard.end(token, OutcomeKind.RETURNED)
    answer = shard.answer(again)
    assert isinstance(answer, Cancelled)
    assert answer.result is CancelResult.PREVENTED


def test_the_last_answers_are_kept_and_no_more() -> None:
    shard, _ = held(TaskState.RUNNING)
    for number in range(bounds.MAX_REQUEST_ANSWERS + 3):
        shard.cancel(request_id=f"request {number}")
    kept = [answer.request_id for answer in shard.progress().answers]
    assert kept == [f"request {number}" for number in range(3, bounds.MAX_REQUEST_ANSWERS + 3)]
