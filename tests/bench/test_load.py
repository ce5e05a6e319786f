"""Arrivals, the loops that follow them, and what they account for."""

import asyncio
from collections.abc import Awaitable, Iterator

from hypothesis import given
from hypothesis import strategies as st

from duecourse.cli.bench import account, arrivals, sending
from duecourse.cli.bench.arrivals import Call
from duecourse.model import bounds
from duecourse.timing.clock import ManualClock


def test_poisson_arrivals_come_at_the_rate_and_are_the_same_every_time() -> None:
    offsets = arrivals.poisson(1_000, 20 * bounds.SECOND, seed=7)
    assert offsets == arrivals.poisson(1_000, 20 * bounds.SECOND, seed=7)
    assert list(offsets) == sorted(offsets)
    assert abs(len(offsets) - 20_000) < 600
    assert offsets[0] >= 0
    assert offsets[-1] < 20 * bounds.SECOND


@given(st.lists(st.integers(0, 10_000)).map(sorted), st.integers(1, 50), st.integers(1, 1_000))
def test_calls_carry_every_arrival_once_none_before_its_call(offsets: list[int], most: int, within: int) -> None:
    calls = list(arrivals.gathered(offsets, most, within))
    assert [index for call in calls for index in range(call.begin, call.end)] == list(range(len(offsets)))
    for call in calls:
        assert call.at == offsets[call.begin]
        assert call.end - call.begin <= most
        assert offsets[call.end - 1] - call.at < within


def test_even_calls_are_spaced_to_give_the_rate() -> None:
    calls = list(arrivals.even(1_000, 2 * bounds.SECOND, size=100))
    assert [call.at for call in calls] == [number * 100_000 for number in range(20)]
    assert (calls[0].begin, calls[-1].end) == (0, 2_000)


async def test_an_open_loop_keeps_to_its_schedule_whatever_the_answers_do() -> None:
    clock, sent, answer = ManualClock(), [], asyncio.Event()

    async def send(call: Call) -> None:
        sent.append((call.begin, clock.elapsed()))
        await answer.wait()

    calls = [Call(50, 0, 1), Call(100, 1, 2), Call(250, 2, 3)]
    async with asyncio.TaskGroup() as group:
        loop = group.create_task(sending.open_loop(clock, calls, send, begin=0))
        for _ in range(30):
            await clock.advance(10)
        assert sent == [(0, 50), (1, 100), (2, 250)]
        assert not loop.done()
        answer.set()


async def test_a_closed_loop_keeps_so_many_in_flight_until_there_are_no_more() -> None:
    under_way, most, done = 0, 0, 0

    async def send() -> None:
        nonlocal under_way, most, done
        under_way += 1
        most = max(most, under_way)
        for _ in range(3):
            await ManualClock().sleep(0)
        under_way -= 1
        done += 1

    def sendings() -> Iterator[Awaitable[None]]:
        for _ in range(50):
            yield send()

    await sending.closed_loop(4, sendings())
    assert (most, done) == (4, 50)


def test_the_account_counts_what_is_early_lost_and_repeated() -> None:
    due = {0: 100, 1: 200, 2: 300, 3: 400}
    starts = [(0, 1, 150), (1, 1, 199), (2, 1, 310), (2, 2, 900), (77, 1, 5)]
    settled = account.settle([0, 1, 2, 3], starts, due.__getitem__, is_measured=lambda index: index > 0)
    assert (settled.early, settled.lost, settled.repeats) == (1, 1, 1)
    assert [settled.lateness.quantile(share) for share in (0.1, 1)] == [-1, 10]
