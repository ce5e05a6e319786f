"""The store's clock, and what is recorded about it."""

import asyncio

from conformance.harness import Harness

from duecourse.model import bounds
from duecourse.timing.clock import SystemClock


async def test_the_clock_of_a_new_store_was_never_accepted_and_goes_on(harness: Harness) -> None:
    first = await harness.store.read_clock()
    second = await harness.store.read_clock()
    assert (first.record.accepted, first.record.confirmed, first.record.accepted_by) == (0, 0, "")
    assert first.time <= second.time
    assert abs(SystemClock().wall() - second.time) < bounds.MINUTE, "it is in microseconds since 1970"


async def test_an_acceptance_says_when_by_whom_and_confirms(harness: Harness) -> None:
    before = (await harness.store.read_clock()).time
    accepted = await harness.store.accept_clock(before, "a", 7)
    assert accepted is not None
    after = await harness.store.read_clock()
    record = after.record
    assert before <= accepted <= after.time
    assert (record.accepted, record.accepted_by) == (accepted, "a")
    assert (record.confirmed, record.confirmed_by, record.wall_clock_offset) == (accepted, "a", 7)


async def test_a_clock_that_is_elsewhere_than_it_was_seen_is_not_accepted(harness: Harness) -> None:
    seen = await harness.store.read_clock()
    for off in (-bounds.HOUR, bounds.HOUR):
        assert await harness.store.accept_clock(seen.time + off, "a", 0) is None
        assert not await harness.store.confirm_clock(seen.time + off, "a", 0)
    assert (await harness.store.read_clock()).record == seen.record


async def test_an_operator_accepts_the_clock_wherever_it_is(harness: Harness) -> None:
    assert await harness.store.accept_clock(None, "operator", 0) is not None
    assert (await harness.store.read_clock()).record.accepted_by == "operator"


async def test_a_confirmation_leaves_the_acceptance_and_is_written_once_in_a_while(harness: Harness) -> None:
    clock = SystemClock()
    assert await harness.store.confirm_clock((await harness.store.read_clock()).time, "a", -3)
    first = await harness.store.read_clock()
    assert (first.record.accepted, first.record.accepted_by) == (0, "")
    assert (first.record.confirmed_by, first.record.wall_clock_offset) == ("a", -3)
    async with asyncio.timeout(10):
        while not await harness.store.confirm_clock((await harness.store.read_clock()).time, "b", 0):
            await clock.sleep(10 * bounds.MILLISECOND)
    second = await harness.store.read_clock()
    assert second.record.confirmed_by == "b"
    assert second.record.confirmed - first.record.confirmed >= bounds.SECOND
