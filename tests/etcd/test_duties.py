"""Duties beside each other: how they end, and that a cancellation is never lost over it."""

import asyncio

import pytest

from duecourse.server.etcd.duties import run_until

TURNS = 8
"""Of the event loop, more than it takes until all is over."""


class Over(Exception):
    pass


async def goes_on() -> None:
    await asyncio.get_running_loop().create_future()


async def turn() -> None:
    """Let everything run that is ready."""
    has_come = asyncio.Event()
    asyncio.get_running_loop().call_soon(has_come.set)
    await has_come.wait()


async def test_all_end_when_one_says_that_it_is_over() -> None:
    has_ended = asyncio.Event()

    async def ends() -> None:
        raise Over

    async def is_ended() -> None:
        try:
            await goes_on()
        finally:
            has_ended.set()

    await run_until(Over, {"goes on": is_ended, "ends": ends})
    assert has_ended.is_set()


async def test_another_failure_is_raised() -> None:
    async def fails() -> None:
        raise ValueError("something else")

    with pytest.raises(ExceptionGroup) as caught:
        await run_until(Over, {"goes on": goes_on, "fails": fails})
    assert [str(error) for error in caught.value.exceptions] == ["something else"]


@pytest.mark.parametrize("turns", range(TURNS))
async def test_who_is_cancelled_while_it_ends_is_cancelled(turns: int) -> None:
    is_over = asyncio.Event()
    rounds = 0

    async def ends() -> None:
        await is_over.wait()
        is_over.clear()
        raise Over

    async def again_and_again() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await run_until(Over, {"ends": ends, "goes on": goes_on})

    async with asyncio.TaskGroup() as group:
        task = group.create_task(again_and_again(), name="again and again")
        for _ in range(TURNS):
            await turn()
        is_over.set()
        for _ in range(turns):
            await turn()
        task.cancel()
        await asyncio.wait((task,), timeout=1)
        was_cancelled = task.cancelled()
        task.cancel()
    assert was_cancelled, f"it went on, for the {rounds}th time"
