"""How long a task waits: bounded whatever the policy says, and the same each time it is asked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duecourse.model import bounds
from duecourse.server.core import retry
from duecourse.server.core.task import Policy

UID = b"0123456789abcdef"


def test_the_wait_grows_by_the_multiplier_up_to_the_longest() -> None:
    policy = Policy(jitter=0.0)
    waits = [retry.backoff(policy, failures, UID, failures) for failures in range(1, 12)]
    doubled = [bounds.SECOND * 2**power for power in range(9)]
    assert waits == pytest.approx([*doubled, 5 * bounds.MINUTE, 5 * bounds.MINUTE])


@pytest.mark.parametrize("failures", [1, 2, 1_000, 2_000, 10**9])
@pytest.mark.parametrize("multiplier", [1.0, 1.0000001, 2.0, bounds.MAX_BACKOFF_MULTIPLIER])
@pytest.mark.parametrize("jitter", [0.0, 0.2, 1.0])
def test_no_policy_makes_it_overflow(failures: int, multiplier: float, jitter: float) -> None:
    policy = Policy(multiplier=multiplier, max_backoff=bounds.MAX_BACKOFF, jitter=jitter)
    wait = retry.backoff(policy, failures, UID, failures)
    assert bounds.MIN_BACKOFF <= wait <= bounds.MAX_BACKOFF * (1 + jitter)


@given(
    initial=st.integers(bounds.MIN_BACKOFF, bounds.MAX_BACKOFF),
    longest=st.integers(bounds.MIN_BACKOFF, bounds.MAX_BACKOFF),
    multiplier=st.floats(1.0, bounds.MAX_BACKOFF_MULTIPLIER),
    jitter=st.floats(0.0, 1.0),
    failures=st.integers(1, 5_000),
    uid=st.binary(min_size=16, max_size=16),
)
def test_the_wait_stays_within_the_jitter_of_what_the_policy_says(
    initial: int, longest: int, multiplier: float, jitter: float, failures: int, uid: bytes
) -> None:
    exact = Policy(initial_backoff=initial, max_backoff=longest, multiplier=multiplier, jitter=0.0)
    policy = Policy(initial_backoff=initial, max_backoff=longest, multiplier=multiplier, jitter=jitter)
    middle = retry.backoff(exact, failures, uid, failures)
    wait = retry.backoff(policy, failures, uid, failures)
    assert bounds.MIN_BACKOFF <= middle <= longest
    assert max(bounds.MIN_BACKOFF, middle * (1 - jitter) - 2) <= wait <= middle * (1 + jitter) + 2
    assert wait == retry.backoff(policy, failures, uid, failures), "a replay draws the same"


def test_tasks_and_attempts_draw_differently_and_evenly() -> None:
    policy = Policy()
    waits = [retry.backoff(policy, 1, number.to_bytes(16, "big"), 1) for number in range(2_000)]
    assert len(set(waits)) > 1_900
    low, high = 0.8 * bounds.SECOND, 1.2 * bounds.SECOND
    assert low <= min(waits) < low + 2 * bounds.MILLISECOND
    assert high - 2 * bounds.MILLISECOND < max(waits) <= high
    assert abs(sum(waits) / len(waits) - bounds.SECOND) < 10 * bounds.MILLISECOND
    assert len({retry.backoff(policy, 1, UID, attempt) for attempt in range(100)}) == 100


def test_returns_wait_from_the_third_in_a_row_on() -> None:
    waits = [retry.return_backoff(returns) for returns in range(1, 14)]
    doubled = [bounds.FIRST_RETURN_BACKOFF * 2**power for power in range(9)]
    assert waits == [0, 0, *doubled, bounds.MAX_RETURN_BACKOFF, bounds.MAX_RETURN_BACKOFF]
    assert retry.return_backoff(10**9) == bounds.MAX_RETURN_BACKOFF
