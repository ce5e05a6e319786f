"""The write path over a store that can be made to fail: what callers are told, and what is there afterwards."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from services.garbage import none_left
from services.waiting import eventually, until

from duecourse.model import bounds, slots
from duecourse.server.core import errors
from duecourse.server.core.effects import Submitted
from duecourse.server.core.events import Tick
from duecourse.server.core.task import DEFAULT_POLICY, Lane, ShardId, Submission
from duecourse.server.failpoints import Failpoints
from duecourse.server.leadership import Superseded
from duecourse.server.leadership.solo import COORDINATION, Solo
from duecourse.server.scheduler import Options, Scheduler
from duecourse.server.storage import CommitAnswer, RaiseRequest, Refused, ShardBatch, ShardRow, Unknown
from duecourse.server.storage.memory import MemoryStore
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing.clock import SystemClock

SHARDS = 4
LANE = Lane("default", "default", "send", 0, "")

Verdict = Callable[[Sequence[ShardBatch]], CommitAnswer | None]


class TroubledStore(MemoryStore):
    """A memory store whose commits a test may refuse, lose before they are applied, or lose afterwards."""

    def __init__(self) -> None:
        super().__init__(SHARDS)
        self.before: Verdict = lambda _: None
        self.after: Verdict = lambda _: None
        self.sizes: list[int] = []
        self.is_open = asyncio.Event()
        """Commits and checks of terms wait for it."""
        self.is_open.set()

    async def commit(self, batches: Sequence[ShardBatch]) -> Mapping[ShardId, CommitAnswer]:
        self.sizes.append(sum(len(batch.inserts) + len(batch.updates) for batch in batches))
        await self.is_open.wait()
        answer = self.before(batches)
        if answer is not None:
            return {batch.fence.shard: answer for batch in batches}
        applied = await super().commit(batches)
        answer = self.after(batches)
        return applied if answer is None else {batch.fence.shard: answer for batch in batches}

    async def shards(self) -> Sequence[ShardRow]:
        await self.is_open.wait()
        return await super().shards()


class Checks(list[str]):
    """What was told of checks of terms."""

    def check_began(self) -> None:
        self.append("began")

    def check_succeeded(self) -> None:
        self.append("succeeded")


@asynccontextmanager
async def running(
    store: TroubledStore, max_pending_submissions: int = bounds.MAX_PENDING_SUBMISSIONS
) -> AsyncIterator[Scheduler]:
    """Run a scheduler that leads all shards; it ends with the scope."""
    await store.open()
    options = Options(node_id="node", commit_lanes=1, max_pending_submissions=max_pending_submissions)
    scheduler = Scheduler(options, store, await store.shards(), Solo(), SystemClock(), Metrics(), Failpoints())
    async with asyncio.TaskGroup() as group:
        running_in = group.create_task(_run(scheduler), name="scheduler")
        await until(lambda: len(scheduler.loop.shards) == SHARDS)
        yield scheduler
        running_in.cancel()


async def _run(scheduler: Scheduler) -> None:
    async with asyncio.TaskGroup() as group:
        scheduler.start(group)


def submission(task_id: str, payload: bytes = b"payload") -> Submission:
    slot = slots.slot_of("default", task_id)
    uid = task_id.encode().ljust(16, b"\0")
    return Submission(
        "default",
        task_id,
        slot,
        ShardId(slots.shard_of_slot(slot, SHARDS)),
        LANE,
        uid,
        None,
        bounds.HOUR,
        DEFAULT_POLICY,
        payload,
        "text/plain",
        {},
        {},
        b"\1" + payload,
    )


def once(answer: CommitAnswer) -> Verdict:
    """Answer the next commit that writes so, and no other."""
    left = [answer]
    return lambda batches: left.pop() if left and any(batch.inserts for batch in batches) else None


async def test_a_submission_that_the_store_refuses_for_its_data_fails_alone() -> None:
    store = TroubledStore()

    def refuse_poison(batches: Sequence[ShardBatch]) -> CommitAnswer | None:
        payloads = [insert.submission.payload for batch in batches for insert in batch.inserts]
        return Refused("22000", is_data=True) if b"poison" in payloads else None

    store.before = refuse_poison
    async with running(store) as scheduler:
        tasks = [submission(f"t{n}", b"poison" if n == 17 else b"fine") for n in range(40)]
        answers = await scheduler.commands.submit(tasks)
    assert [n for n, answer in enumerate(answers) if not isinstance(answer, Submitted)] == [17]
    assert isinstance(answers[17], errors.StoreFailed)


async def test_a_short_refusal_is_waited_out_in_smaller_transactions() -> None:
    store = TroubledStore()
    refusals = [Refused("57014", is_data=False)] * 3

    def refuse(batches: Sequence[ShardBatch]) -> CommitAnswer | None:
        return refusals.pop() if refusals and any(batch.inserts for batch in batches) else None

    store.before = refuse
    async with running(store) as scheduler:
        store.sizes.clear()
        answers = await scheduler.commands.submit([submission(f"t{n}") for n in range(bounds.MAX_COMMIT_WRITES)])
    assert all(answer == Submitted(submission(f"t{n}").uid, True) for n, answer in enumerate(answers))
    assert store.sizes[:4] == [bounds.MAX_COMMIT_WRITES >> halvings for halvings in range(4)]


async def test_a_long_refusal_is_told_to_clients_and_ends_by_itself() -> None:
    store = TroubledStore()
    async with running(store) as scheduler:
        store.before = lambda _: Refused("read only", is_data=False)
        (answer,) = await scheduler.commands.submit([submission("a")])
        assert isinstance(answer, errors.StoreFailed)
        with pytest.raises(errors.StoreFailed):
            await scheduler.commands.submit([submission("b")])
        assert scheduler.why_not_ready() is not None

        store.before = lambda _: None
        await until(lambda: scheduler.why_not_ready() is None)
        assert await scheduler.commands.submit([submission("a")]) == [Submitted(submission("a").uid, True)]


async def test_what_a_client_has_given_up_counts_until_the_store_has_answered() -> None:
    store = TroubledStore()
    async with running(store, 10) as scheduler:
        store.is_open.clear()
        for n in range(10):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await scheduler.commands.submit([submission(f"t{n}")])
        with pytest.raises(errors.Overloaded):
            await scheduler.commands.submit([submission("one more")])

        async def takes_all_again() -> bool:
            with suppress(errors.Overloaded):
                tasks = [submission(f"t{n}") for n in range(10)]
                return await scheduler.commands.submit(tasks) == [Submitted(task.uid, False) for task in tasks]
            return False

        store.is_open.set()
        await eventually(takes_all_again)


@pytest.mark.parametrize("is_applied", [True, False])
async def test_an_answer_that_is_lost_is_uncertain_and_a_repeat_tells(is_applied: bool) -> None:
    store = TroubledStore()
    async with running(store) as scheduler:
        epochs = {shard.fence.shard: shard.fence.epoch for shard in scheduler.loop.shards.values()}
        if is_applied:
            store.after = once(Unknown("lost"))
        else:
            store.before = once(Unknown("lost"))
        task = submission("a")
        assert await scheduler.commands.submit([task]) == [errors.OutcomeUncertain()]

        await until(lambda: scheduler.loop.leads(task.shard))
        assert scheduler.loop.shards[task.shard].fence.epoch > epochs[task.shard]
        assert await scheduler.commands.submit([task]) == [Submitted(task.uid, not is_applied)]


@pytest.mark.parametrize("is_applied", [True, False])
async def test_who_waits_for_a_commit_is_told_though_the_term_ends_before_its_answer(is_applied: bool) -> None:
    store = TroubledStore()
    async with running(store) as scheduler:
        store.is_open.clear()
        if not is_applied:
            store.before = once(Refused("no", is_data=False))
        task = submission("a")
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(scheduler.commands.submit([task]))
            await until(lambda: store.sizes[-1:] == [1])
            scheduler.loop.end(scheduler.loop.shards[task.shard])
            store.is_open.set()
        told = errors.OutcomeUncertain() if is_applied else errors.NoLeader(task.shard)
        assert asking.result() == [told]


async def test_a_node_whose_shard_was_taken_refuses_and_gives_up() -> None:
    store = TroubledStore()
    with pytest.raises(ExceptionGroup) as ended:
        await _be_replaced(store, submission("a"))
    assert ended.group_contains(Superseded)


async def _be_replaced(store: TroubledStore, task: Submission) -> None:
    async with running(store) as scheduler:
        await store.raise_epochs(COORDINATION, [RaiseRequest(task.shard, b"another".ljust(16))], 0)
        assert await scheduler.commands.submit([task]) == [errors.NoLeader(task.shard)]
        await until(lambda: False)


@pytest.mark.parametrize("begins_anew", [True, False])
async def test_a_check_of_terms_succeeds_though_one_has_ended_while_it_ran(begins_anew: bool) -> None:
    store, checks = TroubledStore(), Checks()
    async with running(store) as scheduler, asyncio.TaskGroup() as group:
        store.is_open.clear()
        watching = group.create_task(scheduler.terms.watch(bounds.MILLISECOND, checks), name="watch")
        await until(lambda: checks == ["began"])
        if begins_anew:
            scheduler.terms.uncertain(scheduler.loop.shards[ShardId(0)], "the answer was lost", [])
            await until(lambda: scheduler.loop.leads(ShardId(0)))
        else:
            await scheduler.terms.hand_over(ShardId(0))
            await store.raise_epochs(COORDINATION, [RaiseRequest(ShardId(0), b"another".ljust(16))], 0)
        store.is_open.set()
        await until(lambda: len(checks) > 1)
        assert scheduler.loop.leads(ShardId(0)) is begins_anew
        watching.cancel()
    assert checks[1] == "succeeded"


async def test_a_check_of_terms_that_finds_another_term_does_not_succeed() -> None:
    checks = Checks()
    with pytest.raises(ExceptionGroup) as ended:
        await _find_another_term(TroubledStore(), checks)
    assert ended.group_contains(Superseded)
    assert checks[0] == "began"
    assert checks[1:2] != ["succeeded"]


async def _find_another_term(store: TroubledStore, checks: Checks) -> None:
    async with running(store) as scheduler:
        await store.raise_epochs(COORDINATION, [RaiseRequest(ShardId(0), b"another".ljust(16))], 0)
        await scheduler.terms.watch(bounds.MILLISECOND, checks)


async def test_what_is_due_and_waits_for_a_worker_is_counted() -> None:
    async with running(TroubledStore()) as scheduler:
        due = [replace(submission(f"t{n}"), delay=0) for n in range(3)]
        await scheduler.commands.submit([*due, submission("later")])
        await until(lambda: scheduler.loop.ready()[0] == len(due))
        await until(lambda: scheduler.loop.ready()[1] > 0)


async def test_a_drain_ends_only_once_all_that_has_come_is_handled() -> None:
    async with running(TroubledStore()) as scheduler:
        scheduler.loop.post(ShardId(0), Tick())
        assert scheduler.lanes.is_idle
        assert scheduler.loop.inbox_size
        await scheduler.finish_drain(SystemClock().elapsed() + bounds.MINUTE)
        assert not scheduler.loop.inbox_size


async def test_nothing_of_a_refused_cancellation_is_left_to_the_garbage_collector() -> None:
    async with running(TroubledStore()) as scheduler:
        with none_left(errors.TaskNotFound), pytest.raises(errors.TaskNotFound):
            await scheduler.commands.cancel("default", "nobody", "", b"", None, 0)
