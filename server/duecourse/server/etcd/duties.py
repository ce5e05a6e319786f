"""Duties that go on beside each other until one of them learns that they are over.

A `TaskGroup` alone does not do for that. One whose child fails while its own task is being cancelled raises the child's
failure and forgets the cancellation, so that whoever catches the failure and begins anew goes on for ever.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Duty = Callable[[], Awaitable[Any]]


async def run_until(over: type[Exception], duties: Mapping[str, Duty]) -> None:
    """Run duties, by their names, until one raises what says that they are over; then end the others, and return."""
    tasks: list[asyncio.Task[None]] = []

    async def run(duty: Duty) -> None:
        try:
            await duty()
        except over:
            for task in tasks:
                task.cancel()

    async with asyncio.TaskGroup() as group:
        for name, duty in duties.items():
            tasks.append(group.create_task(run(duty), name=name))
