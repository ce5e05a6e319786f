"""What runs on the simulated machines beside nodes: workers and clients, each the real code in a process of its own.

Of a worker everything runs but its channels and signals, of a client all but its channels.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import blake2b
from typing import Final

from simulation.checker import Checker
from simulation.clock import START, MachineClock
from simulation.loop import Process, SimulationLoop
from simulation.plan import QUEUES, RETRY_AFTER, TASK_TYPES, Ending, Setup, TaskPlan

from duecourse.client import Client, errors, tasks
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import TaskKey
from duecourse.worker import NonRetryable, RetryAfter, TaskContext
from duecourse.worker.attempt import Attempt
from duecourse.worker.capacity import Capacity, Introduction
from duecourse.worker.incarnation import Incarnation
from duecourse.worker.registry import Registry

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DRIFT: Final = 20 * bounds.MILLISECOND
"""More than the elapsed times of two machines differ after a lease."""
_PROPER_REFUSALS: Final = (errors.TaskExists, errors.TaskNotFound)


@dataclass(frozen=True, slots=True)
class Brief:
    """What a handler is told by the payload that it gets."""

    plan: TaskPlan

    @property
    def payload(self) -> bytes:
        """Return what is submitted: different bytes for each task."""
        size = self.plan.payload_bytes
        pattern = blake2b(self.plan.task_id.encode(), digest_size=32).digest()
        return (pattern * (size // 32 + 1))[:size]

    @property
    def other_payload(self) -> bytes:
        """Return what is submitted where the same id is used for something else."""
        return self.payload + b"!"

    def ending(self, attempt: int) -> tuple[Ending, Micros]:
        """Tell how an attempt is to end, and after how long."""
        endings = self.plan.endings
        return endings[attempt - 1] if attempt <= len(endings) else (Ending.SUCCESS, 0)


class Worker:
    """A worker process."""

    def __init__(
        self,
        setup: Setup,
        name: str,
        addresses: Sequence[str],
        process: Process,
        clock: MachineClock,
        briefs: dict[str, Brief],
        checker: Checker,
    ) -> None:
        self.process = process
        self.has_ended = False
        self.incarnation: Incarnation | None = None
        self._setup = setup
        self._name = name
        self._addresses = addresses
        self._clock = clock
        self._briefs = briefs
        self._checker = checker
        self._counted_from: dict[bytes, Micros] = {}
        """By lease token: when the time of each lease that it held began, as it knew when it was last asked."""

    @property
    def is_up(self) -> bool:
        """Whether it runs now."""
        return not (self.has_ended or self.process.is_dead or self.process.is_paused)

    def credit_at(self, address: str) -> int | None:
        """Return how much a node may still send by the worker's word; None if there is no stream to it."""
        stream = None if self.incarnation is None else self.incarnation.protocol._streams.get(address)
        return None if stream is None else stream.account.out

    @property
    def credit(self) -> int:
        """Return how much is out at all nodes together."""
        return 0 if self.incarnation is None else self.incarnation.protocol.out

    def check_leases(self) -> None:
        """Check that what a leader has renewed is not forgotten as long as the lease is held."""
        if self.incarnation is None:
            return
        counts_from = {}
        for token, attempt in self.incarnation.protocol.holdings.held.items():
            at = counts_from[token] = self._counts_from(self.incarnation, attempt)
            before = self._counted_from.get(token, at)
            if at < before:
                text = f"{self._name} knows of {(before - at) // bounds.MILLISECOND} ms less of the lease"
                self._checker.fail("S14", f"{attempt.task_id}: {text} than before", TaskKey("default", attempt.task_id))
        self._counted_from = counts_from

    def counts_on(self, token: bytes) -> bool:
        """Tell whether it takes a lease for its own for some time yet."""
        if self.incarnation is None or self.process.is_dead:
            return False
        attempt = self.incarnation.protocol.holdings.held.get(token)
        if attempt is None:
            return False
        return self._counts_from(self.incarnation, attempt) + attempt.lease > self._clock.elapsed() + _DRIFT

    def _counts_from(self, incarnation: Incarnation, attempt: Attempt) -> Micros:
        """Return when the time of a lease began, as far as the worker knows."""
        return incarnation.protocol._terms.counts_from(attempt)

    def served_by(self) -> set[str]:
        """Return the addresses of the nodes that may grant to it."""
        if self.incarnation is None:
            return set()
        return {address for address, pump in self.incarnation.pumps.items() if pump.is_serving}

    async def run(self) -> None:
        """Work until it is told to stop."""
        registry = Registry()
        for task_type in TASK_TYPES:
            registry.add(task_type, self._handle)
        introduction = Introduction(
            namespace="default",
            worker=self._name,
            incarnation=incarnation_of(self.process),
            queues=QUEUES,
            task_types=TASK_TYPES,
            library="simulated",
        )
        capacity = Capacity(slots=self._setup.slots, prefetch=self._setup.prefetch)
        incarnation = Incarnation(self._addresses, introduction, capacity, registry, self._clock)
        self.incarnation = incarnation
        try:
            await incarnation.run(2.0)
        finally:
            self.has_ended = True

    def stop(self) -> None:
        """Tell it to drain and to end."""
        if self.incarnation is not None:
            self.incarnation.stop()

    async def _handle(self, context: TaskContext) -> object:
        brief = self._briefs[context.task_id]
        token = context._attempt.token
        checker = self._checker
        checker.started(self.process, token, context.task_id, context.attempt, context.payload)
        ending, duration = brief.ending(context.attempt)
        unhurried = self._setup.hurries_from - (self._clock.wall() - START)
        until = self._clock.elapsed() + min(duration, max(unhurried, bounds.SECOND))
        while True:
            try:
                await self._clock.sleep(until - self._clock.elapsed())
                break
            except asyncio.CancelledError:
                if ending is not Ending.STUBBORN:
                    raise
        match ending:
            case Ending.FAILURE:
                raise ValueError(f"attempt {context.attempt} fails")
            case Ending.FATAL:
                raise NonRetryable("no use")
            case Ending.LATER:
                raise RetryAfter(timedelta(microseconds=RETRY_AFTER))
            case _:
                return {"attempt": context.attempt} if context.attempt % 2 else None


class Submitter:
    """A client process: submits its tasks, cancels some, submits some again."""

    def __init__(
        self,
        name: str,
        addresses: Sequence[str],
        process: Process,
        clock: MachineClock,
        briefs: Sequence[Brief],
        checker: Checker,
        loop: SimulationLoop,
    ) -> None:
        self.process = process
        self.has_ended = False
        self._name = name
        self._addresses = addresses
        self._clock = clock
        self._briefs = briefs
        self._checker = checker
        self._loop = loop

    async def run(self) -> None:
        """Do all that is planned."""
        client = Client(self._addresses, clock=self._clock, source=random.Random())
        batches: dict[int, list[Brief]] = {}
        async with asyncio.TaskGroup() as group:
            for brief in self._briefs:
                plan = brief.plan
                if plan.batch:
                    batches.setdefault(plan.batch, []).append(brief)
                else:
                    group.create_task(self._at(plan.submit_at, partial(self._submit, client, brief)))
                if plan.cancel_at is not None:
                    group.create_task(self._at(plan.cancel_at, partial(self._cancel, client, plan)))
                if plan.repeat_at is not None:
                    group.create_task(self._at(plan.repeat_at, partial(self._repeat, client, brief)))
            for together in batches.values():
                first = min(brief.plan.submit_at for brief in together)
                group.create_task(self._at(first, partial(self._submit_many, client, together)))
        self.has_ended = True

    async def _at(self, at: Micros, act: Callable[[], object]) -> None:
        come: asyncio.Future[None] = self._loop.create_future()
        self._loop.call_later(max(0, at - self._loop.now) / bounds.SECOND, come.set_result, None)
        await come
        while True:
            try:
                await act()  # type: ignore[misc]
                return
            except errors.Refused as refused:
                self._count(refused)
                if not isinstance(refused, _PROPER_REFUSALS):
                    raise
                return
            except errors.ServerFault as fault:
                self._count(fault)
                # The checker fails if the record decodes.
                if fault.reason != "RECORD_CORRUPT":
                    raise
                return
            except (errors.Unavailable, errors.OutcomeUncertain) as failed:
                self._count(failed)
            await self._clock.sleep(bounds.SECOND)

    async def _submit(self, client: Client, brief: Brief) -> None:
        await client.submit(_new_task(brief))

    async def _submit_many(self, client: Client, briefs: Sequence[Brief]) -> None:
        results = await client.submit_many([_new_task(brief) for brief in briefs], batch_size=20, in_flight=2)
        for brief, result in zip(briefs, results, strict=True):
            if isinstance(result, errors.DuecourseError):
                self._count(result)
                if result.is_worth_retrying:
                    await self._at(0, partial(self._submit, client, brief))

    async def _repeat(self, client: Client, brief: Brief) -> None:
        task = _new_task(brief)
        if not brief.plan.is_repeated_differently:
            await client.submit(task)
            return
        task.payload = brief.other_payload
        await client.submit(task)

    async def _cancel(self, client: Client, plan: TaskPlan) -> None:
        cancellation = await client.cancel(
            plan.task_id, wait=timedelta(microseconds=plan.cancel_wait), request_id=f"cancel-{plan.task_id}"
        )
        self._checker.coverage[f"client {cancellation.result}"] += 1

    def _count(self, error: errors.DuecourseError) -> None:
        self._checker.coverage[f"client {type(error).__name__}"] += 1


def incarnation_of(process: Process) -> str:
    """Name a worker's start."""
    return f"incarnation-{process.name.replace('#', '.')}"


def _new_task(brief: Brief) -> tasks.NewTask:
    plan = brief.plan
    return tasks.NewTask(
        plan.task_type,
        brief.payload,
        run_at=None if plan.run_at is None else _utc(plan.run_at),
        delay=None if plan.delay is None else timedelta(microseconds=plan.delay),
        queue=plan.queue,
        task_id=plan.task_id,
        priority=plan.priority,
        fairness_key=plan.fairness_key,
        retry_policy=tasks.RetryPolicy(
            max_attempts=plan.max_attempts,
            initial_backoff=timedelta(microseconds=plan.backoff),
            max_backoff=timedelta(microseconds=4 * plan.backoff),
        ),
        attempt_timeout=timedelta(microseconds=plan.attempt_timeout),
        start_deadline=None if plan.start_deadline is None else _utc(plan.start_deadline),
        completion_deadline=None if plan.completion_deadline is None else _utc(plan.completion_deadline),
        on_lost_attempt=tasks.OnLostAttempt.FAIL if plan.fails_when_lost else None,
    )


def _utc(since_start: Micros) -> datetime:
    return _EPOCH + timedelta(microseconds=START + since_start)
