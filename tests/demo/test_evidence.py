"""The demonstration's judge, on files that tell of kept and of broken promises."""

from collections.abc import Mapping

import pytest

from duecourse.cli.demo import evidence
from duecourse.client import AttemptOutcome

RUN_AT = {"a": 1_000, "b": 2_000, "c": 3_000}
KEPT = ["a 1 1500", "b 1 2000", "c 1 3999"]


def judge(
    lines: list[str],
    outcomes: Mapping[str, Mapping[int, AttemptOutcome | None]] | None = None,
    outage: tuple[int, int] | None = None,
) -> evidence.Verdict:
    return evidence.judge(RUN_AT, evidence.read(lines), outcomes or {}, outage)


def test_all_promises_kept() -> None:
    verdict = judge(KEPT)
    assert verdict.is_kept
    assert (verdict.submitted, verdict.run, verdict.lost, verdict.early, verdict.repeats) == (3, 3, (), (), ())
    assert [verdict.lateness.quantile(share) for share in (0.01, 0.5, 1)] == [0, 500, 999]


def test_a_task_without_a_line_is_lost() -> None:
    verdict = judge(KEPT[:2])
    assert not verdict.is_kept
    assert verdict.lost == ("c",)


def test_a_microsecond_too_soon_is_early() -> None:
    verdict = judge(["a 1 999", *KEPT[1:]])
    assert not verdict.is_kept
    assert verdict.early == (evidence.Start("a", 1, 999),)


def test_a_task_that_nobody_submitted_is_a_broken_promise() -> None:
    verdict = judge([*KEPT, "d 1 5000"])
    assert not verdict.is_kept
    assert verdict.unknown == (evidence.Start("d", 1, 5_000),)


@pytest.mark.parametrize("outcome", sorted(evidence.ALLOW_ANOTHER))
def test_a_repeat_after_a_failed_or_lost_attempt_is_allowed(outcome: AttemptOutcome) -> None:
    verdict = judge([*KEPT, "a 2 9000"], {"a": {1: outcome, 2: AttemptOutcome.SUCCEEDED}})
    assert verdict.is_kept
    assert [(repeat.task_id, repeat.outcomes) for repeat in verdict.repeats] == [("a", (outcome.value, "succeeded"))]


@pytest.mark.parametrize("outcome", sorted(set(AttemptOutcome) - evidence.ALLOW_ANOTHER))
def test_a_repeat_after_any_other_outcome_is_not(outcome: AttemptOutcome) -> None:
    verdict = judge([*KEPT, "a 2 9000"], {"a": {1: outcome, 2: AttemptOutcome.SUCCEEDED}})
    assert not verdict.is_kept


def test_one_attempt_that_was_started_twice_is_not_allowed() -> None:
    verdict = judge([*KEPT, "a 1 9000"], {"a": {1: AttemptOutcome.LEASE_LOST}})
    assert not verdict.is_kept


def test_an_attempt_that_the_scheduler_does_not_know_is_not_allowed() -> None:
    verdict = judge([*KEPT, "a 2 9000"], {"a": {1: AttemptOutcome.LEASE_LOST}})
    assert not verdict.is_kept
    assert verdict.repeats[0].outcomes == ("lease_lost", "unknown")


@pytest.mark.parametrize("outage", [(2_000, 3_000), (1_900, 2_500)])
def test_lateness_in_service_leaves_out_what_became_due_in_the_outage(outage: tuple[int, int]) -> None:
    verdict = judge(KEPT, outage=outage)
    assert len(verdict.lateness) == 3
    assert [verdict.lateness_in_service.quantile(share) for share in (0.5, 1)] == [500, 999]


def test_lateness_in_service_leaves_out_what_was_due_before_the_outage_and_had_not_started() -> None:
    verdict = judge(KEPT, outage=(1_400, 1_900))
    assert [verdict.lateness_in_service.quantile(share) for share in (0.5, 1)] == [0, 999]


def test_lateness_is_that_of_the_first_start() -> None:
    verdict = judge(["a 2 9000", *KEPT], {"a": {1: AttemptOutcome.FAILED, 2: None}})
    assert verdict.lateness.longest == 999
