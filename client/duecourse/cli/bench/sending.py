"""Submits a bench's tasks through the SDK, as users do, and keeps account of which were acknowledged.

A task's index is the end of its id: it ties what the worker recorded to when the task was due. Both loops are here: the
closed one keeps a number of calls in flight, the open one follows its schedule whatever the answers do.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from duecourse import client as sdk
from duecourse.cli.bench.arrivals import Call
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import Clock

MAX_OUTSTANDING_CALLS: Final = 1_000
"""Of the open loop: beyond it the schedule waits, which counts as lateness of what it could not send."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Sender:
    """Submits tasks with running indexes to one queue."""

    def __init__(
        self, client: sdk.Client, clock: Clock, *, task_type: str, payload_bytes: int, name: str, first: int = 0
    ) -> None:
        """Take the indexes from `first`, so that several senders can share a worker."""
        self.queue = f"bench-{name}-{secrets.token_hex(4)}"
        self.first = first
        self.refusals: Counter[str] = Counter()
        self._client = client
        self._clock = clock
        self._task_type = task_type
        self._payload = secrets.token_bytes(payload_bytes)
        self._acknowledged = bytearray()

    @property
    def count(self) -> int:
        """How many tasks were given an index."""
        return len(self._acknowledged)

    @property
    def acknowledged(self) -> int:
        """How many were acknowledged."""
        return self._acknowledged.count(1)

    def indexes_acknowledged(self) -> Iterator[int]:
        """Yield the indexes of those that were acknowledged."""
        return (self.first + place for place, is_set in enumerate(self._acknowledged) if is_set)

    def reserve(self, count: int) -> range:
        """Give out the next indexes."""
        begin = self.first + len(self._acknowledged)
        self._acknowledged.extend(bytes(count))
        return range(begin, begin + count)

    async def send(self, indexes: range, run_at: Callable[[int], Micros] | None = None) -> None:
        """Submit tasks in one call; without `run_at` they are due at once."""
        results = await self._client.submit_many(
            (self._task(index, run_at) for index in indexes), batch_size=max(1, len(indexes)), in_flight=1
        )
        acknowledged, first = self._acknowledged, self.first
        for index, result in zip(indexes, results, strict=True):
            if type(result) is sdk.SubmittedTask:
                acknowledged[index - first] = 1
            else:
                self.refusals[type(result).__name__] += 1

    async def send_single(self, index: int, run_at: Callable[[int], Micros] | None = None) -> None:
        """Submit one task by the call for single ones."""
        try:
            await self._client.submit(self._task(index, run_at))
        except sdk.DuecourseError as error:
            self.refusals[type(error).__name__] += 1
        else:
            self._acknowledged[index - self.first] = 1

    def task_id(self, index: int) -> str:
        """Return the id of the task with an index."""
        return f"{self.queue}-{index}"

    def _task(self, index: int, run_at: Callable[[int], Micros] | None) -> sdk.NewTask:
        return sdk.NewTask(
            self._task_type,
            self._payload,
            task_id=self.task_id(index),
            queue=self.queue,
            run_at=None if run_at is None else _EPOCH + timedelta(microseconds=run_at(index)),
        )


async def closed_loop(in_flight: int, sendings: Iterable[Awaitable[None]]) -> None:
    """Keep so many sendings in flight until there are no more."""
    remaining = iter(sendings)

    async def lane() -> None:
        for sending in remaining:
            await sending

    async with asyncio.TaskGroup() as group:
        for number in range(in_flight):
            group.create_task(lane(), name=f"lane-{number}")


async def open_loop(
    clock: Clock, calls: Iterable[Call], send: Callable[[Call], Awaitable[None]], *, begin: Micros
) -> None:
    """Make each call at its time after `begin`, of the clock's elapsed time, and return when all were answered."""
    outstanding = asyncio.Semaphore(MAX_OUTSTANDING_CALLS)

    async def make(call: Call) -> None:
        try:
            await send(call)
        finally:
            outstanding.release()

    async with asyncio.TaskGroup() as group:
        for call in calls:
            wait = begin + call.at - clock.elapsed()
            if wait > 0:
                await clock.sleep(wait)
            await outstanding.acquire()
            group.create_task(make(call), name="call")


def until(clock: Clock, duration: Micros) -> Iterator[None]:
    """Yield again and again until so much time has elapsed."""
    end = clock.elapsed() + duration
    while clock.elapsed() < end:
        yield


def seconds(duration: Micros) -> float:
    """Return a duration in seconds."""
    return duration / bounds.SECOND
