"""Faults of workers: killed, restarted, frozen, poisoned, told to end; and a task that outlasts many leases."""

from collections import Counter

from faults.cluster import LEASE, Cluster, until_streams
from faults.histories import Histories
from faults.recording_client import Ask
from services.freezing import frozen

from duecourse.model import bounds
from duecourse.model.instants import Micros

TASKS = [f"task-{number}" for number in range(5)]


def _held(recorded: Histories, task_id: str) -> Micros:
    """Return how long a task was held under its first lease, which was lost, by the store."""
    changes = [one for one in recorded.transitions if one.task_id == task_id]
    granted = next(one.wall for one in changes if one.is_grant)
    return next(one.wall for one in changes if one.new and one.new.outcome == "lease_lost") - granted


async def test_what_a_killed_worker_ran_runs_again_after_its_lease(cluster: Cluster) -> None:
    async with cluster.client() as client:
        # Whatever it runs has not ended when it is killed.
        one = cluster.start_worker("one", slowness=20)
        await client.submit(*[Ask(task_id, seconds=1) for task_id in TASKS])
        await cluster.until_started(*TASKS)
        one.kill()
        cluster.start_worker("two")
        took = await cluster.until_started(*TASKS, attempt=2)
        print(f"kill -9 of a worker to the next start: {took // bounds.MILLISECOND} ms")
    recorded = await cluster.settle()
    lost = [one for one in recorded.transitions if one.new and one.new.outcome == "lease_lost" and one.old]
    assert len({transition.task_id for transition in lost}) == len(TASKS)
    for task_id in TASKS:
        first, second = cluster.starts(task_id)
        assert (first.attempt, second.attempt) == (1, 2)
        assert _held(recorded, task_id) >= LEASE


async def test_a_new_incarnation_neither_ends_nor_keeps_what_the_old_one_ran(cluster: Cluster) -> None:
    async with cluster.client() as client:
        one = cluster.start_worker("same", slowness=20)
        await client.submit(*[Ask(task_id, seconds=1) for task_id in TASKS])
        await cluster.until_started(*TASKS)
        one.kill()
        cluster.start_worker("same")
        await cluster.recovers("a restart within the lease")
    recorded = await cluster.settle()
    # By the store: on a slow machine the lease may be over before it is there.
    assert all(_held(recorded, task_id) >= LEASE for task_id in TASKS), "it ended its predecessor's leases"
    assert all([start.attempt for start in cluster.starts(task_id)] == [1, 2] for task_id in TASKS)
    outcomes = {one.new.outcome for one in recorded.transitions if one.new and one.new.attempt == 1} - {None}
    assert outcomes == {"lease_lost", "succeeded"}  # Of the tasks, and of the probe.


async def test_what_a_frozen_worker_says_too_late_changes_nothing(cluster: Cluster, is_long: bool) -> None:
    slowness = 5
    async with cluster.client() as client:
        for number in range(10 if is_long else 1):
            one = cluster.start_worker(f"one-{number}", slowness=slowness)
            tasks = [f"{task_id}-{number}" for task_id in TASKS]
            await client.submit(*[Ask(task_id, seconds=1) for task_id in tasks])
            await cluster.until_started(*tasks)
            with frozen(one.pid):
                two = cluster.start_worker(f"two-{number}")
                await cluster.until_started(*tasks, attempt=2)
                # What it says then is that they have ended.
                begun = max(cluster.starts(task_id)[0].wall for task_id in tasks)
                await cluster.clock.sleep(max(0, begun + slowness * bounds.SECOND - cluster.clock.now().latest))
            while not all(any(end.attempt == 1 for end in cluster.finishes(task_id)) for task_id in tasks):
                await cluster.clock.sleep(10 * bounds.MILLISECOND)
            await two.stop(20 * bounds.SECOND)
            await cluster.recovers("a frozen worker, on that worker")
            await one.stop(20 * bounds.SECOND)
            assert one.returncode == two.returncode == 0
    recorded = await cluster.settle()
    ends = [one.new for one in recorded.transitions if one.new and one.new.outcome == "lease_lost"]
    assert {end.attempt for end in ends} == {1}


async def test_a_poisonous_task_is_started_exactly_as_often_as_allowed(cluster: Cluster) -> None:
    async with cluster.client() as client:
        await client.submit(Ask("poison", dies=True, max_attempts=2), Ask("sound", seconds=0.5))
        worker = cluster.start_worker()
        while not (task := await client.get("poison")).end_time:
            if not worker.is_running:
                assert worker.returncode == 137
                worker = cluster.start_worker()
            await cluster.clock.sleep(50 * bounds.MILLISECOND)
        assert str(task.failure_reason) == "attempts_exhausted"
        await cluster.recovers("the end of a poisonous task")
    await cluster.settle()
    assert [start.attempt for start in cluster.starts("poison")] == [1, 2]


async def test_a_slow_worker_takes_few_tasks_and_holds_nobody_up(cluster: Cluster, is_long: bool) -> None:
    slots, work = 5, bounds.SECOND // 4
    for name in ("fast-one", "fast-two"):
        cluster.start_worker(name, slots=slots)
    cluster.start_worker("slow", slots=slots, slowness=10)
    await until_streams(cluster.node, 3)
    tasks = [f"task-{number}" for number in range(1_600 if is_long else 320)]
    async with cluster.client() as client:
        began = cluster.clock.elapsed()
        await client.submit(*[Ask(task_id, seconds=work / bounds.SECOND) for task_id in tasks])
        await cluster.until_started(*tasks)
        took = cluster.clock.elapsed() - began
    recorded = await cluster.settle()
    started = Counter(event.worker.partition("-")[0] for event in recorded.events if event.kind == "start")
    print(f"{dict(started)} in {took // bounds.MILLISECOND} ms")
    # Each of its slots was busy all the time, and it was never sent what it had no slot for.
    assert slots <= started["slow"] <= slots * (took // (10 * work) + 1)
    alone = len(tasks) * work // (2 * slots)
    assert took < 2 * alone


async def test_a_healthy_task_outlasts_many_leases(cluster: Cluster) -> None:
    cluster.start_worker()
    async with cluster.client() as client:
        await client.submit(Ask("long", seconds=3 * LEASE / bounds.SECOND))
    await cluster.settle()
    assert [start.attempt for start in cluster.starts("long")] == [1]


async def test_a_worker_that_is_told_to_end_finishes_what_runs_and_returns_the_rest(
    cluster: Cluster, is_long: bool
) -> None:
    cluster.start_worker("stays", slots=5)
    async with cluster.load(), cluster.client() as client:
        for number in range(10 if is_long else 2):
            goes = cluster.start_worker(f"goes-{number}", slots=5)
            tasks = [f"task-{number}-{index}" for index in range(10)]
            await until_streams(cluster.node, 2)
            await cluster.recovers("the start")
            await client.submit(*[Ask(task_id, seconds=1) for task_id in tasks])
            while not any(start.worker.startswith(goes.name) for task_id in tasks for start in cluster.starts(task_id)):
                await cluster.clock.sleep(5 * bounds.MILLISECOND)
            await goes.stop(20 * bounds.SECOND)
            assert goes.returncode == 0
    recorded = await cluster.settle()
    outcomes = {one.new.outcome for one in recorded.transitions if one.new} - {None}
    assert outcomes <= {"succeeded", "returned"}, "an attempt was lost or stopped"
