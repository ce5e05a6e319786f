"""`kill -9` of nodes that lead shards, others being there: their shards fire again at once, and nothing is lost."""

import statistics

from faults.cluster_of_nodes import TAKEN_OVER
from faults.conftest import StartCluster

from duecourse.model import bounds


async def test_leaders_that_die_at_any_moment_under_load_are_replaced_and_lose_nothing(
    start_cluster: StartCluster, is_long: bool
) -> None:
    cluster = await start_cluster()
    cluster.start_worker("one")
    cluster.start_worker("two")
    took = []
    async with cluster.load():
        await cluster.recovers("the start")
        for _ in range(20 if is_long else 2):
            await cluster.clock.sleep(cluster.source.randrange(2 * bounds.SECOND))
            victim = await cluster.leader_of(cluster.source.randrange(cluster.shards))
            victim.kill()
            took.append(await cluster.recovers(f"kill -9 of {victim.name}", TAKEN_OVER))
            await victim.start()
            await cluster.until_led(*cluster.nodes)
    print(f"median of kill -9 to firing: {statistics.median(took) // bounds.MILLISECOND} ms")
    recorded = await cluster.settle()
    assert len(recorded.terms) > cluster.shards, "no term was taken over"
