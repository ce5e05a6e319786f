"""Leaders that get no time to run: others take over, and what the paused one still does counts for nothing."""

from faults.cluster_of_nodes import SESSION, STEADY, TAKEN_OVER, Link
from faults.conftest import StartCluster
from faults.recording_client import Ask
from services.freezing import frozen
from services.waiting import until

from duecourse.model import bounds

RUNNING = [f"running-{number}" for number in range(20)]


async def test_a_leader_that_was_replaced_while_it_was_paused_does_nothing_and_joins_again(
    start_cluster: StartCluster, is_long: bool
) -> None:
    cluster = await start_cluster()
    cluster.start_worker("one")
    cluster.start_worker("two")
    async with cluster.load():
        await cluster.recovers("the start")
        for _ in range(10 if is_long else 1):
            await cluster.clock.sleep(cluster.source.randrange(2 * bounds.SECOND))
            old = await cluster.leader_of(cluster.source.randrange(cluster.shards))
            lost = len(old.logged("session_lost"))
            with frozen(old.child.pid):
                began = cluster.clock.elapsed()
                await cluster.recovers(f"the pause of {old.name}", TAKEN_OVER)
                await cluster.clock.sleep(max(0, began + 3 * SESSION - cluster.clock.elapsed()))
            # Others fire meanwhile, and until it has looked it tells what it saw before.
            await until(lambda old=old, lost=lost: len(old.logged("session_lost")) > lost)  # type: ignore[misc]
            await cluster.recovers("the end of the pause")
            await cluster.until_led(*cluster.nodes)
    recorded = await cluster.settle()
    assert all(node.child.is_running for node in cluster.nodes)
    assert len(recorded.terms) > cluster.shards, "no term was taken over"


async def test_writes_of_a_leader_that_reach_the_store_after_it_was_replaced_are_refused(
    start_cluster: StartCluster, is_long: bool
) -> None:
    cluster = await start_cluster(links={"node-1": (Link.STORE,)})
    old, store = cluster.nodes[0], cluster.links["node-1"][Link.STORE]
    cluster.start_worker("one")
    cluster.start_worker("two")
    async with cluster.load(batch=50, pause=bounds.MILLISECOND):
        for _ in range(10 if is_long else 1):
            await cluster.recovers("the start")
            # Whatever it writes lies on the way, for longer than it takes to replace it.
            for proxy in store.each:
                proxy.stop_reading()
            await cluster.clock.sleep(300 * bounds.MILLISECOND)
            await until(lambda: store.faults["not read"])
            with frozen(old.child.pid):
                await cluster.recovers("a pause in the middle of commits", TAKEN_OVER)
                store.heal()
                await cluster.clock.sleep(SESSION)
            await cluster.until_led(*cluster.nodes)
    await cluster.settle()
    assert old.child.is_running
    reasons = {line["reason"] for line in old.logged("term_ended")}
    assert reasons & {"stale", "unknown", "election_lost"}, "none of its terms ended"


async def test_pauses_shorter_than_a_session_move_nothing_and_cost_no_attempt(
    start_cluster: StartCluster, is_long: bool
) -> None:
    # On either side of a pause a renewal may lag, see `test_node_paused`; a session is renewed thrice in its time.
    pause = 4 * bounds.SECOND
    cluster = await start_cluster(session=STEADY, lease="12s")
    cluster.start_worker()
    before = await cluster.epochs()
    rounds = 20 if is_long else 2
    async with cluster.client() as client:
        await client.submit(*[Ask(task_id, seconds=6 * rounds) for task_id in RUNNING])
        await cluster.until_started(*RUNNING)
        for number in range(rounds):
            node = cluster.nodes[number % 3]
            with frozen(node.child.pid):
                await cluster.clock.sleep(pause)
            await cluster.recovers(f"a pause of {node.name}")
            await cluster.clock.sleep(pause)
    await cluster.settle()
    for task_id in RUNNING:
        assert [start.attempt for start in cluster.starts(task_id)] == [1]
    assert await cluster.epochs() == before, "shards moved"
