"""How handlers run, end, and are asked to stop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from services.scripted_node import assignment

from duecourse.model import bounds
from duecourse.timing.clock import ManualClock, SystemClock
from duecourse.v1 import worker_service_pb2 as pb
from duecourse.worker import PayloadNotJson, Stopped, TaskContext, results
from duecourse.worker.attempt import Attempt, Failed, FailureKind, Outcome, StopReason, Success
from duecourse.worker.holdings import Start, Stop
from duecourse.worker.registry import Registry
from duecourse.worker.runner import Ending, Runner


@dataclass
class Bench:
    """A runner, and what it delivered."""

    registry: Registry = field(default_factory=Registry)
    batches: list[list[Ending]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    clock: SystemClock = field(default_factory=SystemClock)
    threads: int = 4

    def __post_init__(self) -> None:
        self.runner = Runner(self.registry, self.clock, self.threads, self.delivered)

    def delivered(self, endings: Sequence[Ending]) -> None:
        self.batches.append(list(endings))
        self.changed.set()

    def start(self, *task_ids: str, call: Callable[[TaskContext], Any] | None = None) -> list[Attempt]:
        if call is not None:
            self.registry.add("note", call)
        attempts = [an_attempt(assignment(task_id)) for task_id in task_ids]
        self.runner.perform([Start(attempts)])
        return attempts

    def stop(self, attempt: Attempt, reason: StopReason) -> None:
        attempt.stop_reason = attempt.stop_reason or reason
        self.runner.perform([Stop([attempt], reason)])

    async def ended(self, count: int) -> dict[str, Outcome]:
        async with asyncio.timeout(20):
            while sum(map(len, self.batches)) < count:
                self.changed.clear()
                await self.changed.wait()
        return {attempt.task_id: outcome for batch in self.batches for attempt, outcome in batch}

    async def outcome(self) -> Outcome:
        (outcome,) = (await self.ended(1)).values()
        return outcome


def an_attempt(item: pb.Assignment, deadline: int | None = None) -> Attempt:
    return Attempt(
        item.lease_token,
        item.task.task_id,
        item.task.task_type,
        1,
        1,
        "a",
        item,
        30 * bounds.SECOND,
        0,
        0,
        0,
        False,
        deadline,
        None,
        1,
    )


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.runner.close()


class TestCoroutines:
    async def test_what_is_returned_is_the_result(self, bench: Bench) -> None:
        async def handle(context: TaskContext) -> dict[str, str]:
            return {"id": context.task_id}

        bench.start("t", call=handle)
        assert await bench.outcome() == Success(b'{"id":"t"}', "application/json")

    async def test_outcomes_of_one_turn_are_delivered_together(self, bench: Bench) -> None:
        async def handle(context: TaskContext) -> None:
            pass

        bench.start("t1", "t2", "t3", call=handle)
        await bench.ended(3)
        assert len(bench.batches) == 1

    @pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
    async def test_whatever_is_raised_is_an_outcome(self, bench: Bench, error: BaseException) -> None:
        async def handle(context: TaskContext) -> None:
            raise error

        bench.start("t", call=handle)
        outcome = await bench.outcome()
        assert isinstance(outcome, Failed)
        assert (outcome.kind, outcome.type) == (FailureKind.RETRYABLE, type(error).__name__)

    async def test_one_that_is_asked_to_stop_is_cancelled(self, bench: Bench) -> None:
        begun = asyncio.Event()

        async def handle(context: TaskContext) -> None:
            begun.set()
            await asyncio.Event().wait()

        (attempt,) = bench.start("t", call=handle)
        await begun.wait()
        bench.stop(attempt, StopReason.TIMED_OUT)
        outcome = await bench.outcome()
        assert isinstance(outcome, Failed)
        assert (outcome.kind, outcome.type) == (FailureKind.TIMED_OUT, "Stopped")

    async def test_one_that_is_asked_to_stop_before_its_first_step_does_not_run(self, bench: Bench) -> None:
        ran = []

        async def handle(context: TaskContext) -> None:
            ran.append(context.task_id)

        (attempt,) = bench.start("t", call=handle)
        bench.stop(attempt, StopReason.CANCELLED)
        outcome = await bench.outcome()
        assert isinstance(outcome, Failed)
        assert outcome.kind is FailureKind.CANCELLED
        assert ran == []

    async def test_one_that_finishes_all_the_same_has_succeeded(self, bench: Bench) -> None:
        begun = asyncio.Event()

        async def handle(context: TaskContext) -> str:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "done"
            return "never"

        (attempt,) = bench.start("t", call=handle)
        await begun.wait()
        bench.stop(attempt, StopReason.CANCELLED)
        assert await bench.outcome() == Success(b"done", "text/plain; charset=utf-8")

    async def test_it_is_cancelled_once_however_often_it_is_asked(self, bench: Bench) -> None:
        cancelled = []
        begun = asyncio.Event()
        go_on = asyncio.Event()

        async def handle(context: TaskContext) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(bool(context.lease_lost))
                await go_on.wait()
                assert context.lease_lost
                raise

        (attempt,) = bench.start("t", call=handle)
        await begun.wait()
        bench.stop(attempt, StopReason.CANCELLED)
        while not cancelled:
            await yield_once()
        bench.stop(attempt, StopReason.LEASE_LOST)
        go_on.set()
        outcome = await bench.outcome()
        assert isinstance(outcome, Failed)
        assert outcome.kind is FailureKind.CANCELLED
        assert cancelled == [False]

    async def test_a_cancellation_of_its_own_making_is_a_failure(self, bench: Bench) -> None:
        async def handle(context: TaskContext) -> None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

        bench.start("t", call=handle)
        outcome = await bench.outcome()
        assert isinstance(outcome, Failed)
        assert (outcome.kind, outcome.type) == (FailureKind.RETRYABLE, "asyncio.exceptions.CancelledError")

    async def test_it_may_wait_for_the_wish_to_stop(self, bench: Bench) -> None:
        begun = asyncio.Event()

        async def handle(context: TaskContext) -> str:
            begun.set()
            with pytest.raises(asyncio.CancelledError):
                await context.lease_lost.raised()
            await context.lease_lost.raised()
            return "told"

        (attempt,) = bench.start("t", call=handle)
        await begun.wait()
        bench.stop(attempt, StopReason.LEASE_LOST)
        assert isinstance(await bench.outcome(), Success)


class TestThreads:
    async def test_plain_functions_run_beside_the_loop(self, bench: Bench) -> None:
        both = threading.Barrier(2)

        def handle(context: TaskContext) -> str:
            both.wait(20)
            return threading.current_thread().name

        bench.start("t1", "t2", call=handle)
        outcomes = await bench.ended(2)
        names = {outcome.result for outcome in outcomes.values() if isinstance(outcome, Success)}
        assert len(names) == 2
        assert threading.current_thread().name.encode() not in names

    async def test_no_more_threads_than_allowed_are_started(self) -> None:
        bench = Bench(threads=2)
        names = set()
        both = threading.Barrier(2)

        def handle(context: TaskContext) -> None:
            names.add(threading.current_thread().name)
            both.wait(20)

        bench.start(*[f"t{i}" for i in range(6)], call=handle)
        await bench.ended(6)
        assert len(names) == 2
        bench.runner.close()

    @pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1)])
    async def test_whatever_is_raised_is_an_outcome(self, bench: Bench, error: BaseException) -> None:
        def handle(context: TaskContext) -> None:
            raise error

        bench.start("t", call=handle)
        outcome = await bench.outcome()
        assert isinstance(outcome, Failed)
        assert outcome.type == type(error).__name__

    async def test_it_learns_that_it_is_asked_to_stop(self, bench: Bench) -> None:
        begun = threading.Event()

        def handle(context: TaskContext) -> None:
            begun.set()
            assert context.cancelled.wait(20)
            with pytest.raises(Stopped):
                context.raise_if_cancelled()
            context.raise_if_cancelled()

        (attempt,) = bench.start("t", call=handle)
        await asyncio.to_thread(begun.wait, 20)
        bench.stop(attempt, StopReason.TIMED_OUT)
        outcome = await bench.outcome()
        assert isinstance(outcome, Failed)
        assert outcome.kind is FailureKind.TIMED_OUT

    async def test_a_thread_that_hangs_does_not_keep_the_runner(self, bench: Bench) -> None:
        release = threading.Event()
        bench.start("t", call=lambda context: release.wait(20))
        bench.runner.close()
        release.set()
        assert await bench.outcome() == Success(b"true", "application/json")


class TestContext:
    def test_it_shows_the_task_and_the_attempt(self) -> None:
        item = assignment("t", attempt=3, payload=b'{"a": 1}')
        item.task.headers["traceparent"] = "00-1"
        context = TaskContext(an_attempt(item), ManualClock())
        assert (context.namespace, context.queue, context.task_id, context.task_type) == (
            "default",
            "default",
            "t",
            "note",
        )
        assert (context.payload, context.content_type, context.json()) == (b'{"a": 1}', "application/json", {"a": 1})
        assert context.headers == {"traceparent": "00-1"}
        assert (context.attempt, context.fencing_token) == (3, 1_003)
        assert context.uid == UUID(bytes=item.task.uid)
        assert context.idempotency_key == str(context.uid)
        assert context.run_at == datetime.fromtimestamp(1_800_000_000, UTC) + timedelta(milliseconds=123)
        assert not context.cancelled.is_set()
        assert not context.lease_lost.is_set()

    async def test_the_deadline_counts_down_to_zero(self) -> None:
        clock = ManualClock()
        context = TaskContext(an_attempt(assignment("t"), 10 * bounds.SECOND), clock)
        assert context.deadline == 10
        await clock.advance(4 * bounds.SECOND)
        assert context.deadline == 6
        await clock.advance(40 * bounds.SECOND)
        assert context.deadline == 0
        assert TaskContext(an_attempt(assignment("t")), clock).deadline is None

    @pytest.mark.parametrize(
        ("payload", "message"),
        [
            (b"", "the payload is empty"),
            (b"{", "1 bytes of type application/json, is not JSON"),
            (b"\xff", "is not JSON"),
            (b"[" * 100_000, "is not JSON"),
        ],
    )
    def test_a_payload_that_is_no_json_says_so_and_fails_for_good(self, payload: bytes, message: str) -> None:
        context = TaskContext(an_attempt(assignment("t", payload=payload)), ManualClock())
        with pytest.raises(PayloadNotJson, match=message) as raised:
            context.json()
        assert isinstance(raised.value, ValueError)
        assert results.of_error(raised.value, None).kind is FailureKind.NON_RETRYABLE

    def test_progress_is_cut_to_its_bound(self) -> None:
        attempt = an_attempt(assignment("t"))
        TaskContext(attempt, ManualClock()).heartbeat("x" * 1_000)
        assert len(attempt.progress.encode()) == bounds.MAX_PROGRESS_BYTES


class TestRegistry:
    def test_it_tells_coroutines_from_plain_functions(self) -> None:
        class Callable:
            async def __call__(self, context: TaskContext) -> None: ...

        async def coroutine(context: TaskContext) -> None: ...

        registry = Registry()
        registry.add("async", coroutine)
        registry.add("object", Callable())
        registry.add("plain", lambda context: None)
        assert registry.threaded() == {"plain"}

    def test_a_type_has_one_handler_and_a_proper_name(self) -> None:
        registry = Registry()
        registry.add("note", lambda context: None)
        with pytest.raises(ValueError, match="already"):
            registry.add("note", lambda context: None)
        with pytest.raises(ValueError, match="characters"):
            registry.add("no spaces", lambda context: None)


async def yield_once() -> None:
    """Let the loop make one turn."""
    turned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turned.set_result, None)
    await turned
