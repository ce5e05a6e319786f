"""The event loop of the simulation: virtual time, seeded order, processes that pause and die."""

import asyncio
from collections.abc import Coroutine

import pytest
from simulation.clock import MachineClock
from simulation.loop import Deadlock, SimulationLoop

from duecourse.model import bounds


def _loop(seed: int = 1) -> SimulationLoop:
    return SimulationLoop(seed)  # type: ignore[abstract]


def _run(loop: SimulationLoop, main: Coroutine[None, None, None]) -> None:
    loop.run(main)


def test_an_hour_passes_at_once() -> None:
    loop = _loop()
    clock = MachineClock(loop)

    async def main() -> None:
        await clock.sleep(bounds.HOUR)

    _run(loop, main())
    assert bounds.HOUR <= loop.now < bounds.HOUR + bounds.SECOND


def _order(seed: int) -> tuple[list[int], int]:
    loop = _loop(seed)
    order: list[int] = []

    async def note(number: int) -> None:
        await MachineClock(loop).sleep(bounds.SECOND)
        order.append(number)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(note(number))

    _run(loop, main())
    return order, loop.digest


def test_a_seed_always_gives_the_same_order_and_another_seed_another_one() -> None:
    assert _order(1) == _order(1)
    assert _order(1) != _order(2)


def test_a_paused_process_does_nothing_until_it_goes_on() -> None:
    loop = _loop()
    process = loop.process("p")
    clock = MachineClock(loop)
    ticks: list[int] = []

    async def tick() -> None:
        while True:
            await clock.sleep(bounds.SECOND)
            ticks.append(loop.now // bounds.SECOND)

    async def main() -> None:
        process.spawn(tick())
        await clock.sleep(2 * bounds.SECOND + bounds.MILLISECOND)
        process.pause()
        await clock.sleep(10 * bounds.SECOND)
        assert ticks == [1, 2]
        process.resume()
        await clock.sleep(2 * bounds.SECOND)

    _run(loop, main())
    assert ticks[:4] == [1, 2, 12, 13]


def test_a_process_that_is_killed_runs_no_finally_block_until_the_run_is_over() -> None:
    loop = _loop()
    process = loop.process("p")
    clock = MachineClock(loop)
    words: list[str] = []

    async def work() -> None:
        try:
            await clock.sleep(bounds.HOUR)
        finally:
            words.append("last words")

    async def main() -> None:
        process.spawn(work())
        await clock.sleep(bounds.SECOND)
        process.kill()
        await clock.sleep(2 * bounds.HOUR)
        words.append("the end")

    _run(loop, main())
    assert words == ["the end", "last words"]


def test_what_one_process_makes_another_one_wait_for_is_run_by_the_one_that_waits() -> None:
    loop = _loop()
    process = loop.process("p")
    clock = MachineClock(loop)
    answered_by: list[str] = []

    async def wait(answer: asyncio.Future[None]) -> None:
        await answer
        answered_by.append(loop.current.name)

    async def main() -> None:
        answer: asyncio.Future[None] = loop.create_future()
        process.spawn(wait(answer))
        await clock.sleep(bounds.SECOND)
        answer.set_result(None)
        await clock.sleep(bounds.SECOND)

    _run(loop, main())
    assert answered_by == ["p"]


def test_waiting_for_ever_is_noticed() -> None:
    loop = _loop()

    async def main() -> None:
        await loop.create_future()

    with pytest.raises(Deadlock):
        _run(loop, main())


def test_an_exception_that_nobody_handles_is_noted() -> None:
    loop = _loop()

    def break_down() -> None:
        raise ValueError("broken")

    async def main() -> None:
        loop.after(bounds.SECOND, break_down)
        await MachineClock(loop).sleep(2 * bounds.SECOND)

    _run(loop, main())
    assert ["broken" in failure for failure in loop.failures] == [True]
