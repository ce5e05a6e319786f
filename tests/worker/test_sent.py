"""The times at which messages were sent."""

from hypothesis import given
from hypothesis import strategies as st

from duecourse.worker.sent import GRAIN, MAX_ENTRIES, RECENT, SentTimes


@given(st.lists(st.integers(0, 3 * GRAIN), min_size=1, max_size=200), st.integers(1, 200))
def test_a_message_never_seems_to_be_sent_later_than_it_was(gaps: list[int], asked: int) -> None:
    sent = SentTimes()
    at, times = 0, []
    for number, gap in enumerate(gaps, 1):
        at += gap
        times.append(at)
        sent.record(number, at)
    entry = sent.floor(asked)
    assert entry is not None
    number, seen = entry
    assert number <= asked
    assert seen <= times[min(asked, len(times)) - 1] < seen + GRAIN


def test_memory_is_bounded_and_what_is_recent_stays_exact() -> None:
    sent = SentTimes()
    for number in range(1, 5_001):
        sent.record(number, number * GRAIN)
        assert len(sent) <= MAX_ENTRIES
        for recent in range(max(1, number - RECENT + 1), number + 1):
            assert sent.floor(recent) == (recent, recent * GRAIN)
    assert sent.floor(1) == (1, GRAIN)


def test_what_was_never_sent_has_no_time() -> None:
    sent = SentTimes()
    assert sent.floor(5) is None
    sent.record(3, 7)
    assert sent.floor(2) is None
