"""Quantiles and histograms of durations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duecourse.cli.distribution import Distribution, histogram, median, short
from duecourse.model import bounds


@given(st.lists(st.integers(-1_000, 10**8), min_size=1), st.floats(0, 1))
def test_a_quantile_is_a_measured_one_that_enough_do_not_exceed(durations: list[int], share: float) -> None:
    quantile = Distribution(durations).quantile(share)
    assert quantile in durations
    assert sum(duration <= quantile for duration in durations) >= share * len(durations)
    assert sum(duration < quantile for duration in durations) <= share * len(durations)


@given(st.lists(st.integers(-1_000, 10**8)))
def test_every_duration_is_in_one_bin(durations: list[int]) -> None:
    bins = Distribution(durations).bins()
    assert sum(one.count for one in bins) == len(durations)
    for one in bins:
        within = [d for d in durations if (d >= one.low or one.low == 0) and (one.high is None or d < one.high)]
        assert one.count == len(within)


def test_a_histogram_has_a_line_for_each_bin_and_a_sliver_for_the_rarest() -> None:
    lines = histogram(Distribution([500] * 1_000 + [4_000]), width=10)
    assert lines == [
        "          < 1 ms     1,000 ██████████",
        "     1 ms - 2 ms         0",
        "     2 ms - 3 ms         0",
        "     3 ms - 5 ms         1 █",
    ]


def test_nothing_measured_has_no_quantile_and_no_bins() -> None:
    assert histogram(Distribution([])) == []
    with pytest.raises(ValueError, match="nothing"):
        Distribution([]).quantile(0.5)
    with pytest.raises(ValueError, match="nothing"):
        median([])


def test_the_median_is_the_middle_one_or_the_mean_of_two() -> None:
    assert (median([3, 1, 2]), median([4, 1])) == (2, 2.5)


def test_durations_are_written_short() -> None:
    assert (short(1_500), short(20 * bounds.MILLISECOND), short(2 * bounds.SECOND)) == ("1.5 ms", "20 ms", "2 s")
