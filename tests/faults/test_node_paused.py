"""A node that gets no time to run: for a while, and for so long that another one has taken its place."""

import pytest
from faults.cluster import HEARTBEAT, Cluster
from faults.recording_client import Ask
from services.freezing import frozen

from duecourse.model import bounds
from duecourse.server.node import EXIT_SUPERSEDED

TASKS = [f"running-{number}" for number in range(10)]


# On either side of a pause a renewal may lag by a heartbeat of the worker, a check of the terms, and one of the node.
@pytest.mark.parametrize("cluster", [{"lease": "12s"}], indirect=True)
async def test_pauses_shorter_than_a_lease_cost_no_attempt(cluster: Cluster, is_long: bool) -> None:
    cluster.start_worker()
    rounds = 20 if is_long else 2
    async with cluster.client() as client:
        await client.submit(*[Ask(task_id, seconds=9 * rounds - 3) for task_id in TASKS])
        await cluster.until_started(*TASKS)
        for _ in range(rounds):
            with frozen(cluster.node.child.pid):
                await cluster.clock.sleep(5 * HEARTBEAT)
            await cluster.recovers("a pause")
            await cluster.clock.sleep(4 * HEARTBEAT)
    await cluster.settle()
    for task_id in TASKS:
        assert [start.attempt for start in cluster.starts(task_id)] == [1]


async def test_a_node_that_was_replaced_while_it_was_paused_does_nothing_and_gives_up(
    cluster: Cluster, is_long: bool
) -> None:
    for _ in range(10 if is_long else 1):
        old, new = cluster.node, cluster.add_node()
        worker = cluster.start_worker()
        async with cluster.load():
            await cluster.recovers("the start")
            with frozen(old.child.pid):
                await new.start()
                cluster.node = new
                await cluster.recovers("another node's start")
            assert await old.ended() == EXIT_SUPERSEDED
            await cluster.recovers("the old node's end")
        await worker.stop(bounds.DRAIN)
    cluster.start_worker()
    recorded = await cluster.settle()
    assert len({term.epoch for term in recorded.terms}) > 1
