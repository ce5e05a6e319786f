"""`kill -9` of the node: at the moments around a commit that matter, at any moment under load, and for a while."""

import signal
import statistics

import pytest
from faults.cluster import SETTLED, Cluster
from faults.recording_client import Ask

from duecourse.model import bounds
from duecourse.server import failpoints


@pytest.mark.parametrize(
    "cluster", [{"failpoints": point} for point in failpoints.NAMES], indirect=True, ids=failpoints.NAMES
)
async def test_a_node_that_dies_at_a_failpoint_loses_nothing(
    cluster: Cluster, request: pytest.FixtureRequest, is_long: bool
) -> None:
    point = request.node.callspec.id
    cluster.start_worker()
    async with cluster.load():
        for _ in range(20 if is_long else 2):
            assert await cluster.node.ended(SETTLED) == -signal.SIGKILL, "the failpoint did not fire"
            # Not waited for: it may come by there before it was seen to be ready.
            cluster.node.spawn(f"{point}:{cluster.source.randrange(2, 80)}")
        assert await cluster.node.ended(SETTLED) == -signal.SIGKILL, "the failpoint did not fire"
        await cluster.node.start()
        await cluster.recovers(point)
    await cluster.settle()


async def test_nodes_that_die_at_any_moment_under_load_lose_nothing(cluster: Cluster, is_long: bool) -> None:
    cluster.start_worker("one")
    cluster.start_worker("two")
    took = []
    async with cluster.load():
        for _ in range(20 if is_long else 3):
            await cluster.clock.sleep(cluster.source.randrange(2 * bounds.SECOND))
            cluster.node.kill()
            took.append(await cluster.node.start() + await cluster.recovers("kill -9"))
    print(f"median of kill -9 to firing: {statistics.median(took) // bounds.MILLISECOND} ms")
    recorded = await cluster.settle()
    assert len({term.epoch for term in recorded.terms}) > len(took), "no term was taken over"


@pytest.mark.parametrize("cluster", [{"lease": "20s"}], indirect=True)
async def test_a_worker_goes_on_by_itself_when_the_scheduler_was_away(cluster: Cluster, is_long: bool) -> None:
    worker = cluster.start_worker()
    away = (60 if is_long else 4) * bounds.SECOND
    running = [f"running-{number}" for number in range(10)]
    async with cluster.client() as client:
        now = cluster.clock.now().latest
        seconds = 5 if is_long else away / bounds.SECOND + 3
        await client.submit(*[Ask(task_id, seconds=seconds) for task_id in running])
        await client.submit(*[Ask(f"due-{number}", now + number * away // 50) for number in range(50)])
        await cluster.until_started(*running)
    cluster.node.kill()
    await cluster.clock.sleep(away)
    await cluster.node.start()
    await cluster.recovers("an absence")
    recorded = await cluster.settle()
    assert worker.is_running
    # A worker that hears nothing for a lease time stops its handlers; one that hears in time lets them end.
    if not is_long:
        starts = [event for event in recorded.events if event.kind == "start" and event.task_id in running]
        assert [event.attempt for event in starts] == [1] * len(running), "a running attempt was started again"
