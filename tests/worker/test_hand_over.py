"""A worker whose nodes hand shards over to each other, or vanish: every task runs once, and no outcome is lost."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta

from services.waiting import until
from worker.cluster_side import Cluster, a_cluster
from worker.test_worker import running

from duecourse.server.core.task import AttemptOutcome
from duecourse.timing.clock import SystemClock
from duecourse.worker import TaskContext, Worker


class Recorder:
    """A worker, and what its handlers did."""

    def __init__(self, *addresses: str, slots: int = 4) -> None:
        self.starts: Counter[str] = Counter()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.worker = Worker(addresses, slots=slots, name="recorder", grace=timedelta(seconds=5))

        @self.worker.task("note")
        async def note(context: TaskContext) -> None:
            self.starts[context.task_id] += 1
            await self.may_end.wait()

    async def is_connected_to(self, cluster: Cluster) -> None:
        """Wait for a stream to every node."""

        def is_connected() -> bool:
            health = self.worker.health()
            return not health.missing and sum(one.is_connected for one in health.nodes) == len(cluster.nodes)

        await until(is_connected)

    async def has_started(self, count: int) -> None:
        """Wait until so many tasks have been started."""
        await until(lambda: len(self.starts) == count)


async def outcomes(cluster: Cluster, task_id: str) -> list[AttemptOutcome | None]:
    """Return how the attempts of a task ended."""
    return [attempt.outcome for attempt in (await cluster.read(task_id)).attempts]


async def test_one_slot_drains_a_backlog_wherever_it_lies_without_a_wait() -> None:
    async with a_cluster("n1", "n2", "n3") as cluster:
        await cluster.lead("n1", 0)
        await cluster.lead("n3", 1)
        recorder = Recorder(cluster.nodes["n2"].member.address, slots=1)
        async with running(recorder.worker):
            await recorder.is_connected_to(cluster)
            clock = SystemClock()
            before = clock.elapsed()
            tasks = await cluster.submit(1, 100)
            await cluster.succeeded(tasks)
            # A slot that had to be waited for a second would take a hundred.
            assert clock.elapsed() - before < 10_000_000
            both = await cluster.submit(0, 50, "u") + await cluster.submit(1, 50, "u")
            await cluster.succeeded(both)
    assert recorder.starts == Counter([*tasks, *both])


async def test_running_attempts_are_adopted_by_the_next_leader_and_their_outcomes_reach_it() -> None:
    async with a_cluster("n1", "n2") as cluster:
        await cluster.lead("n1", 0, 1)
        recorder = Recorder(cluster.nodes["n1"].member.address)
        recorder.may_end.clear()
        async with running(recorder.worker):
            await recorder.is_connected_to(cluster)
            tasks = await cluster.submit(0, 3)
            await recorder.has_started(3)
            await cluster.lead("n2", 0)
            recorder.may_end.set()
            await cluster.succeeded(tasks)
            for task_id in tasks:
                assert await outcomes(cluster, task_id) == [AttemptOutcome.SUCCEEDED]
    assert recorder.starts == Counter(tasks)


async def test_an_outcome_that_comes_to_the_leader_before_is_sent_to_the_one_after() -> None:
    async with a_cluster("n1", "n2") as cluster:
        await cluster.lead("n1", 0, 1)
        recorder = Recorder(cluster.nodes["n1"].member.address)
        async with running(recorder.worker):
            await recorder.is_connected_to(cluster)
            for turn in range(6):
                recorder.may_end.clear()
                tasks = await cluster.submit(0, 4, f"turn{turn}-")
                await recorder.has_started(4 * (turn + 1))
                # They end while the shard is between two leaders.
                async with asyncio.TaskGroup() as group:
                    group.create_task(cluster.lead("n1" if turn % 2 else "n2", 0))
                    recorder.may_end.set()
                await cluster.succeeded(tasks)
    assert set(recorder.starts.values()) == {1}


async def test_a_worker_that_does_not_reach_the_next_leader_learns_that_the_last_one_renews_nothing() -> None:
    async with a_cluster("n1", "n2") as cluster:
        await cluster.lead("n1", 0, 1)
        cluster.nodes["n2"].member = replace(cluster.nodes["n2"].member, address="127.0.0.1:1")
        recorder = Recorder(cluster.nodes["n1"].member.address)
        recorder.may_end.clear()
        async with running(recorder.worker):
            await until(lambda: recorder.worker.health().missing == ("n2",))
            (task_id,) = await cluster.submit(0, 1)
            await recorder.has_started(1)
            incarnation = recorder.worker._incarnation
            assert incarnation is not None
            terms = incarnation.protocol._terms
            assert terms.leader(0) is not None
            await cluster.lead("n2", 0)
            await until(lambda: terms.leader(0) is None)
            recorder.may_end.set()
            await until(lambda: recorder.worker.health().unrecorded == 1)
            await cluster.lead("n1", 0)
            await cluster.succeeded([task_id])


async def test_a_leader_that_vanishes_takes_no_running_attempt_with_it() -> None:
    async with a_cluster("n1", "n2") as cluster:
        await cluster.lead("n1", 0)
        await cluster.lead("n2", 1)
        recorder = Recorder(cluster.nodes["n1"].member.address)
        recorder.may_end.clear()
        async with running(recorder.worker):
            await recorder.is_connected_to(cluster)
            tasks = await cluster.submit(0, 2)
            await recorder.has_started(2)
            await cluster.kill("n1")
            recorder.may_end.set()
            await until(lambda: recorder.worker.health().unrecorded == 2)
            await cluster.lead("n2", 0)
            await cluster.succeeded(tasks)
            for task_id in tasks:
                assert await outcomes(cluster, task_id) == [AttemptOutcome.SUCCEEDED]
    assert recorder.starts == Counter(tasks)


async def test_what_waits_for_the_worker_goes_on_where_the_next_leader_is() -> None:
    async with a_cluster("n1", "n2") as cluster:
        await cluster.lead("n1", 0, 1)
        recorder = Recorder(cluster.nodes["n1"].member.address, slots=2)
        async with running(recorder.worker):
            await recorder.is_connected_to(cluster)
            tasks = await cluster.submit(0, 200)
            for node_id in ("n2", "n1", "n2"):
                await cluster.lead(node_id, 0)
            await cluster.succeeded(tasks)
            for task_id in tasks:
                assert (await outcomes(cluster, task_id))[-1] is AttemptOutcome.SUCCEEDED
    assert recorder.starts == Counter(tasks)


async def test_every_worker_with_a_free_slot_comes_to_where_work_waits() -> None:
    async with a_cluster("n1", "n2", "n3") as cluster, AsyncExitStack() as stack:
        await cluster.lead("n1", 0)
        await cluster.lead("n3", 1)
        # More than are told at first.
        recorders = [Recorder(cluster.nodes["n2"].member.address, slots=1) for _ in range(12)]
        for recorder in recorders:
            recorder.may_end.clear()
            await stack.enter_async_context(running(recorder.worker))
        for recorder in recorders:
            await recorder.is_connected_to(cluster)
        tasks = await cluster.submit(1, 12)
        await until(lambda: sum(len(recorder.starts) for recorder in recorders) == 12)
        for recorder in recorders:
            recorder.may_end.set()
        await cluster.succeeded(tasks)
        assert [recorder.starts.total() for recorder in recorders] == [1] * 12


async def test_a_worker_that_stops_reports_what_ran_to_whoever_leads_by_then() -> None:
    async with a_cluster("n1", "n2") as cluster:
        await cluster.lead("n1", 0, 1)
        recorder = Recorder(cluster.nodes["n1"].member.address)
        recorder.may_end.clear()
        async with running(recorder.worker, stops=False):
            await recorder.is_connected_to(cluster)
            tasks = await cluster.submit(0, 2)
            await recorder.has_started(2)
            recorder.worker.stop()
            await until(lambda: not recorder.worker.health().is_ready)
            later = await cluster.submit(1, 1, "later")
            await cluster.lead("n2", 0)
            recorder.may_end.set()
            await cluster.succeeded(tasks)
        assert (await cluster.read(later[0])).attempts == []
    assert recorder.starts == Counter(tasks)


async def test_a_node_that_drains_gives_its_work_to_the_others_and_what_runs_goes_on() -> None:
    async with a_cluster("n1", "n2") as cluster:
        await cluster.lead("n1", 0, 1)
        recorder = Recorder(cluster.nodes["n1"].member.address, slots=3)
        recorder.may_end.clear()
        async with running(recorder.worker):
            await recorder.is_connected_to(cluster)
            tasks = await cluster.submit(0, 1)
            await recorder.has_started(1)
            await cluster.lead("n2", 0, 1)
            draining = cluster.nodes["n1"].scheduler
            draining.begin_drain()
            tasks += await cluster.submit(1, 2, "more")
            # All that is free, wherever its credit was.
            await recorder.has_started(3)
            await draining.finish_drain(cluster.clock.elapsed() + 20_000_000)
            await cluster.kill("n1")
            recorder.may_end.set()
            await cluster.succeeded(tasks)
    assert recorder.starts == Counter(tasks)
