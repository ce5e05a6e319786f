"""More than a node can take at once: herds, clients without patience, poison, churn, no file descriptors left."""

import asyncio
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Final

import grpc
import pytest
from faults.cluster import Cluster, NodeProcess, children_of, until_streams
from faults.raw_worker import RawWorker
from faults.recording_client import Ask, RecordingClient
from faults.test_postgres import OURS, postmaster_of
from services.freezing import frozen
from services.waiting import eventually, until

from duecourse import client as sdk
from duecourse.cli.launcher.ports import HOST
from duecourse.model import bounds
from duecourse.worker import TaskContext, Worker

_MOST_GROWTH: Final = 200 << 20
"""By how many bytes a node's memory may grow."""
_NO_DESCRIPTOR: Final = "Too many open files"


async def test_a_herd_of_one_queue_does_not_hold_up_another(cluster: Cluster, is_long: bool) -> None:
    count = 100_000 if is_long else 4_000
    cluster.start_worker(slots=100, queues=("default", "herd"))
    async with cluster.client() as client:
        await cluster.recovers("the start")
        before = cluster.node.rss()
        due = cluster.clock.now().latest + (90 if is_long else 10) * bounds.SECOND
        herd = [f"herd-{number}" for number in range(count)]
        for start in range(0, count, bounds.MAX_BATCH):
            asks = [Ask(task_id, due, queue="herd") for task_id in herd[start : start + bounds.MAX_BATCH]]
            await client.submit(*asks)
        # It comes last of all, and is due with all.
        await client.submit(Ask("single", due))
        assert cluster.clock.now().latest < due, "the herd was not there in time"
        await cluster.until_started("single", limit=2 * bounds.MINUTE)
        started = cluster.starts("single")[0].wall
        await cluster.until_started(*herd, limit=10 * bounds.MINUTE)
        overtaken = sum(cluster.starts(task_id)[0].wall > started for task_id in herd)
        late = started - due
        print(f"beside a herd of {count}: {late // bounds.MILLISECOND} ms late, before {overtaken} of them")
        # Whatever the machine gives: it went by most of those that came before it.
        assert overtaken > count * 3 // 4
        assert late < 5 * bounds.SECOND
        assert cluster.node.rss() - before < _MOST_GROWTH
    await cluster.settle()


# The least that can be set.
@pytest.mark.parametrize("cluster_on_own_postgres", [{"max_pending_submissions": "1000"}], indirect=True)
async def test_clients_without_patience_are_refused_while_the_store_stands_still(
    cluster_on_own_postgres: Cluster, is_long: bool
) -> None:
    cluster = cluster_on_own_postgres
    cluster.start_worker()
    await cluster.recovers("the start")
    before = cluster.node.rss()
    postmaster = await postmaster_of(cluster)
    is_over = asyncio.Event()
    codes: Counter[grpc.StatusCode] = Counter()
    refusals = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}

    async def storm(client: RecordingClient, channel: grpc.aio.Channel, name: str) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            code = await client.submit_once(Ask(f"{name}-{number}"), timedelta(milliseconds=100), channel)
            codes[code] += 1

    async with (
        cluster.client() as client,
        grpc.aio.insecure_channel(cluster.node.address) as channel,
        asyncio.TaskGroup() as group,
    ):
        for number in range(200 if is_long else 100):
            group.create_task(storm(client, channel, f"storm-{number}"), name="storm")
        with frozen(postmaster, *children_of(postmaster)):
            await cluster.clock.sleep((30 if is_long else 8) * bounds.SECOND)
            # How soon there are too many is the machine's affair.
            await until(lambda: codes.keys() >= refusals, 30 * bounds.SECOND)
        is_over.set()
    print({code.name: count for code, count in codes.items()}, f"{(cluster.node.rss() - before) >> 20} MiB")
    assert codes.keys() <= {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED, *refusals}, codes
    assert cluster.node.rss() - before < _MOST_GROWTH
    await cluster.recovers("a storm of clients", 15 * bounds.SECOND)
    await cluster.settle()


async def test_one_poisonous_task_in_a_hundred_harms_itself_alone(cluster: Cluster, is_long: bool) -> None:
    count = 3_000 if is_long else 300
    asks = [Ask(f"sound-{number}", seconds=0.05) for number in range(count - count // 100)]
    asks += [Ask(f"poison-{number}", dies=True, max_attempts=2) for number in range(count // 100)]
    cluster.source.shuffle(asks)
    poisons = [ask.task_id for ask in asks if ask.dies]
    async with cluster.client() as client:
        workers = [cluster.start_worker(name, slots=10) for name in ("one", "two")]
        await client.submit(*asks)
        died = 0
        while not all([(await client.get(task_id)).end_time for task_id in poisons]):
            for place, worker in enumerate(workers):
                if not worker.is_running:
                    assert worker.returncode == 137
                    died += 1
                    workers[place] = cluster.start_worker(worker.name, slots=10)
            await cluster.clock.sleep(20 * bounds.MILLISECOND)
        print(f"workers died {died} times")
    recorded = await cluster.settle(2 * bounds.MINUTE)
    # An attempt that was granted to a worker at its death is used up, begun or not; the last death was a second one's.
    assert all(len(cluster.starts(task_id)) <= 2 for task_id in poisons)
    assert any(start.attempt == 2 for task_id in poisons for start in cluster.starts(task_id))
    ends = {one.task_id: one.new.state for one in recorded.transitions if one.new}
    assert {task_id for task_id, state in ends.items() if state != "succeeded"} == set(poisons)


async def test_calls_and_streams_that_are_given_up_leave_nothing_behind(cluster: Cluster, is_long: bool) -> None:
    cluster.start_worker(slots=50)
    await until_streams(cluster.node, 1)
    rounds = 400 if is_long else 40

    async def give_up_calls(client: RecordingClient, name: str) -> None:
        for number in range(rounds):
            with suppress(TimeoutError):
                async with asyncio.timeout(cluster.source.randrange(1, 10) / 1_000):
                    await client.submit(Ask(f"{name}-{number}"))

    async def give_up_streams() -> None:
        for _ in range(rounds // 2):
            async with RawWorker.connected(cluster.node.address, credit=100, queue="nothing"):
                pass

    async def churn() -> None:
        async with cluster.client() as client, asyncio.TaskGroup() as group:
            for number in range(20):
                name = f"churn-{cluster.source.getrandbits(32):08x}-{number}"
                group.create_task(give_up_calls(client, name), name="calls")
            for _ in range(5):
                group.create_task(give_up_streams(), name="streams")

    # The first one fills whatever is kept for the next.
    await churn()
    before = cluster.node.rss()
    for _ in range(20 if is_long else 2):
        await churn()
    print(f"memory grew by {(cluster.node.rss() - before) >> 10} KiB")
    assert cluster.node.rss() - before < 20 << 20
    assert await cluster.node.metric("duecourse_rpc_requests_total", code="CANCELLED") > rounds, "nothing was given up"
    await until_streams(cluster.node, 1)
    await cluster.settle()
    await _until_credits(cluster.node, 50)


async def test_without_a_file_descriptor_left_what_is_connected_is_served(cluster: Cluster, is_long: bool) -> None:
    node = cluster.node.child.pid
    cluster.start_worker()
    async with cluster.load(), cluster.client() as client:
        await cluster.recovers("the start")
        await client.submit(Ask("before"))
        for number in range(10 if is_long else 1):
            with _no_descriptors_left(cluster.node):
                writers = [(await asyncio.open_connection(HOST, cluster.node.port))[1] for _ in range(50)]
                await until(lambda: _free_descriptors(cluster.node) == 0)
                (answer,) = await client.submit(Ask(f"meanwhile-{number}"), timeout=timedelta(seconds=10))
                assert isinstance(answer, sdk.SubmittedTask), answer
                await cluster.until_started(f"meanwhile-{number}")
                # Those who wait take the place of what it loses, so that it cannot reach its store any more.
                said = cluster.node.log.read_text().count(_NO_DESCRIPTOR)
                async with asyncio.timeout(20):
                    while cluster.node.log.read_text().count(_NO_DESCRIPTOR) == said:
                        await cluster.store.fetch(f"SELECT pg_terminate_backend(pid) FROM ({OURS}) ours")
                        await cluster.clock.sleep(100 * bounds.MILLISECOND)
                for writer in writers:
                    writer.close()
            await cluster.recovers("no file descriptors left")
    await cluster.settle()
    assert cluster.node.child.pid == node


async def test_workers_that_all_come_back_at_once_are_all_served(cluster: Cluster, is_long: bool) -> None:
    count = 500 if is_long else 100
    workers = [Worker([cluster.node.address], name=f"worker-{number}", slots=1) for number in range(count)]
    ran: set[str] = set()
    async with cluster.client() as client, asyncio.TaskGroup() as group:
        for worker in workers:

            async def note(_: TaskContext, name: str = worker.name) -> None:
                ran.add(name)
                await cluster.clock.sleep(bounds.SECOND)

            worker.register("work", note)
            group.create_task(worker.run(handle_signals=False), name=worker.name)
        await until_streams(cluster.node, count)
        cluster.node.kill()
        await cluster.node.start()
        took = await until_streams(cluster.node, count)
        print(f"{count} workers are back {took // bounds.MILLISECOND} ms after the node")
        # Else what one has no slot for yet goes to another as its second task.
        await _until_credits(cluster.node, count)
        await client.submit(*[Ask(f"task-{number}") for number in range(count)])
        await cluster.comes_to_rest()
        for worker in workers:
            worker.stop()
    assert len(ran) > count * 0.9
    assert took < 10 * bounds.SECOND


async def _until_credits(node: NodeProcess, count: int) -> None:
    """Wait until a node has so many slots of workers to fill: they tell of them after what was in them is stored."""

    async def are_given() -> bool:
        return await node.metric("duecourse_credits") == count

    await eventually(are_given)


@contextmanager
def _no_descriptors_left(node: NodeProcess) -> Iterator[None]:
    """Let a node have few file descriptors more than it has."""
    limits = resource.prlimit(node.child.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(node.child.pid, resource.RLIMIT_NOFILE, (_highest_descriptor(node) + 10, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(node.child.pid, resource.RLIMIT_NOFILE, limits)


def _highest_descriptor(node: NodeProcess) -> int:
    return max(int(one.name) for one in Path(f"/proc/{node.child.pid}/fd").iterdir())


def _free_descriptors(node: NodeProcess) -> int:
    limit, _ = resource.prlimit(node.child.pid, resource.RLIMIT_NOFILE)
    return limit - len(list(Path(f"/proc/{node.child.pid}/fd").iterdir()))
