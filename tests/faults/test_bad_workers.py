"""Workers that take assignments and then do not do their part: silent, deaf, never at an end, or far too late."""

import asyncio
from contextlib import suppress
from datetime import timedelta

import grpc
from faults.cluster import HEARTBEAT, Cluster
from faults.raw_worker import RawWorker
from faults.recording_client import Ask

from duecourse.model import bounds
from duecourse.v1 import worker_service_pb2 as pb

TASKS = [f"task-{number}" for number in range(5)]


async def test_what_a_silent_worker_took_is_run_by_another(cluster: Cluster) -> None:
    # They wait for it: it is given up once it has been silent for 2 s.
    async with cluster.client() as client:
        await client.submit(*[Ask(task_id) for task_id in TASKS])
    async with RawWorker.connected(cluster.node.address, credit=5) as silent:
        await silent.assigned(len(TASKS))
        cluster.start_worker()
        assert await silent.status() is grpc.StatusCode.UNAVAILABLE
        took = await cluster.until_started(*TASKS, attempt=2)
        print(f"silence to the next start: {took // bounds.MILLISECOND} ms")
    await cluster.settle()
    assert all([start.attempt for start in cluster.starts(task_id)] == [2] for task_id in TASKS)


async def test_an_attempt_that_never_ends_is_timed_out_while_its_worker_lives(cluster: Cluster) -> None:
    async with cluster.client() as client:
        await client.submit(Ask("task", attempt_timeout=timedelta(seconds=1)))
    async with RawWorker.connected(cluster.node.address, credit=1) as endless:
        assigned = await endless.assigned(1)
        cluster.start_worker()
        async with asyncio.TaskGroup() as group:

            async def beat() -> None:
                while True:
                    await endless.beat(assigned, 1)
                    await cluster.clock.sleep(HEARTBEAT // 2)

            beating = group.create_task(beat(), name="heartbeats")
            stop = await endless.hear("cancel_requested")
            assert stop.reason == pb.STOP_REASON_TIMED_OUT
            assert list((await endless.hear("lease_lost")).lease_tokens) == [assigned[0].lease_token]
            beating.cancel()
        await cluster.until_started("task", attempt=2)
    recorded = await cluster.settle()
    assert "timed_out" in {one.new.outcome for one in recorded.transitions if one.new}


async def test_an_outcome_that_comes_after_its_lease_was_lost_is_refused(cluster: Cluster) -> None:
    async with cluster.client() as client:
        await client.submit(Ask("task"))
        async with RawWorker.connected(cluster.node.address, credit=1) as late:
            (assignment,) = await late.assigned(1)
            cluster.start_worker()
            await cluster.until_started("task", attempt=2)
        async with RawWorker.connected(cluster.node.address, credit=0) as again:
            await again.hear("welcome")
            attempt = pb.AttemptRef(lease_token=assignment.lease_token, task_id="task")
            await again.say(succeeded=pb.Succeeded(attempts=[pb.Success(attempt=attempt, result=b"too late")]))
            (record,) = (await again.hear("outcomes_recorded")).others
            assert record.verdict == pb.OUTCOME_VERDICT_LEASE_LOST
        assert (await client.get("task")).result == b""
    await cluster.settle()


async def test_a_worker_that_does_not_read_costs_the_node_little_and_the_others_nothing(cluster: Cluster) -> None:
    tasks = [Ask(f"big-{number}", payload_bytes=100_000) for number in range(600)]
    async with cluster.client() as client:
        before = cluster.node.rss()
        async with RawWorker.connected(cluster.node.address, credit=10_000) as deaf:
            await client.submit(*tasks)
            peak = before
            async with asyncio.TaskGroup() as group:

                async def beat() -> None:
                    # Until the node has had enough of it.
                    with suppress(grpc.RpcError, asyncio.InvalidStateError):
                        while True:
                            await deaf.beat([], 0)
                            await cluster.clock.sleep(HEARTBEAT // 2)

                beating = group.create_task(beat(), name="heartbeats")
                cluster.start_worker()
                while not all(cluster.starts(ask.task_id) for ask in tasks):
                    peak = max(peak, cluster.node.rss())
                    await cluster.clock.sleep(20 * bounds.MILLISECOND)
                beating.cancel()
        print(f"memory: {before >> 20} MiB before, {peak >> 20} MiB at most")
        assert peak - before < 200 << 20
    await cluster.settle()
