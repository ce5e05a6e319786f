"""Faults of etcd, by which nodes agree who leads: away, without a member, its keys and leases and history gone."""

import statistics
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from faults.cluster import NodeProcess
from faults.cluster_of_nodes import SESSION, STEADY, Link
from faults.conftest import StartCluster
from services.etcd import EtcdCluster
from services.postgres import SHARDS
from services.waiting import eventually, until

from duecourse.model import bounds
from duecourse.server.core.task import ShardId
from duecourse.server.etcd.keys import Keys

_SAID = 15 * bounds.SECOND
_PROMPT = 5 * bounds.SECOND
"""On a machine that is busy: etcd is away for longer."""
_QUOTA = str(16 * 1024 * 1024)


@pytest_asyncio.fixture
async def small_etcd(tmp_path: Path) -> AsyncIterator[EtcdCluster]:
    """Run one member with a quota that a test can use up."""
    async with EtcdCluster(tmp_path / "etcd", options=("--quota-backend-bytes", _QUOTA)) as cluster:
        yield cluster


async def test_a_member_that_dies_or_freezes_moves_no_shard(
    start_cluster: StartCluster, etcd_of_three: EtcdCluster, is_long: bool
) -> None:
    # An etcd of three elects a leader within 2.2 s.
    cluster = await start_cluster(own_etcd=etcd_of_three, session="10s")
    cluster.start_worker()
    before = await cluster.epochs()
    async with cluster.load():
        await cluster.recovers("the start")
        for _ in range(5 if is_long else 1):
            leader = await etcd_of_three.leader()
            leader.kill()
            await cluster.recovers("the death of etcd's leader")
            await cluster.clock.sleep(11 * bounds.SECOND)
            await etcd_of_three.start()
            # A leader that wakes up has leases revoked which it takes for expired: of that no node is to blame.
            await etcd_of_three.wait_healthy()
            successor = await etcd_of_three.leader()
            follower = next(member for member in etcd_of_three.members if member is not successor)
            follower.freeze()
            await cluster.clock.sleep(11 * bounds.SECOND)
            await cluster.recovers("a frozen member")
            follower.thaw()
            await etcd_of_three.wait_healthy()
    assert await cluster.epochs() == before
    await cluster.settle()


async def test_without_etcd_firing_goes_on_and_with_it_everything_does(
    start_cluster: StartCluster, own_etcd: EtcdCluster, is_long: bool
) -> None:
    cluster = await start_cluster(own_etcd=own_etcd)
    cluster.start_worker("one")
    cluster.start_worker("two")
    away = (30 if is_long else 8) * bounds.SECOND
    async with cluster.load(), cluster.client() as client:
        await cluster.recovers("the start")
        asks = cluster.ask_many("meanwhile", 100, away - 2 * bounds.SECOND, after=bounds.SECOND)
        await client.submit(*asks)
        before = await cluster.epochs()
        own_etcd.kill()
        began = cluster.clock.elapsed()
        assert await cluster.recovers("the loss of etcd, still away") < _PROMPT
        await cluster.until_started(*(ask.task_id for ask in asks))
        await cluster.clock.sleep(max(0, began + away - cluster.clock.elapsed()))
        assert await cluster.epochs() == before, "shards moved without etcd"
        await own_etcd.start()
        await cluster.until_led(*cluster.nodes)
        # And it counts again, for those that were there all the time.
        cluster.nodes[2].kill()
        await cluster.recovers("kill -9 after the return of etcd")
        await cluster.nodes[2].start()
        await cluster.until_led(*cluster.nodes)
    due = {ask.task_id: ask.run_at or 0 for ask in asks}
    late = [cluster.starts(task_id)[0].wall - run_at for task_id, run_at in due.items()]
    print(f"latest without etcd: {max(late) // bounds.MILLISECOND} ms")
    # Of a stall of firing, which one of the machine is seldom as long as, more would be late.
    assert statistics.quantiles(late, n=4)[-1] < bounds.SECOND
    assert max(late) < _PROMPT
    await cluster.settle()


async def test_without_a_majority_of_etcd_nobody_takes_what_a_dead_node_led(
    start_cluster: StartCluster, etcd_of_three: EtcdCluster, is_long: bool
) -> None:
    cluster = await start_cluster(own_etcd=etcd_of_three)
    cluster.start_worker()
    victim = cluster.nodes[2]
    async with cluster.load():
        await cluster.recovers("the start")
        before = await cluster.epochs()
        for member in etcd_of_three.members[:2]:
            member.kill()
        victim.kill()
        await cluster.clock.sleep((30 if is_long else 6) * bounds.SECOND)
        assert await cluster.epochs() == before, "shards moved without a majority"
        await etcd_of_three.start()
        await cluster.recovers("the return of a majority")
        await victim.start()
        await cluster.until_led(*cluster.nodes)
    await cluster.settle()


async def test_a_node_whose_lease_is_revoked_gives_way_at_once_and_comes_back(
    start_cluster: StartCluster, etcd: EtcdCluster, is_long: bool
) -> None:
    cluster = await start_cluster()
    cluster.start_worker()
    async with cluster.load():
        for number in range(10 if is_long else 1):
            await cluster.recovers("the start")
            node = cluster.nodes[number % 3]
            led, lost = await cluster.leads(node), len(node.logged("session_lost"))
            before = await cluster.epochs()
            _, lease = await etcd.first(Keys(cluster.etcd_prefix).member(node.name))
            await etcd.revoke(lease)
            await until(lambda node=node, lost=lost: len(node.logged("session_lost")) > lost)  # type: ignore[misc]
            await cluster.until_raised(led, before)
            await cluster.recovers(f"the revocation of {node.name}'s lease")
            await cluster.until_led(*cluster.nodes)
    await cluster.settle()
    assert all(node.child.is_running for node in cluster.nodes)


async def test_a_leader_whose_election_key_is_deleted_gives_way_at_once(
    start_cluster: StartCluster, etcd: EtcdCluster, is_long: bool
) -> None:
    cluster = await start_cluster(session=STEADY)
    cluster.start_worker()
    keys = Keys(cluster.etcd_prefix)
    async with cluster.load():
        for _ in range(10 if is_long else 1):
            await cluster.recovers("the start")
            before = await cluster.epochs()
            for shard in range(SHARDS):
                key, _ = await etcd.first(keys.election(ShardId(shard)))
                assert await etcd.delete(key) == 1
            await cluster.until_raised(range(SHARDS), before)
            await cluster.recovers("the loss of all election keys")
            await cluster.until_led(*cluster.nodes)
    ended = [line for node in cluster.nodes for line in node.logged("term_ended")]
    assert sum(line["reason"] == "election_lost" for line in ended) >= SHARDS
    await cluster.settle()


async def test_while_etcd_is_full_firing_goes_on_and_with_room_everything_does(
    start_cluster: StartCluster, small_etcd: EtcdCluster, is_long: bool
) -> None:
    cluster = await start_cluster(own_etcd=small_etcd)
    cluster.start_worker("one")
    cluster.start_worker("two")
    victim, *others = cluster.nodes
    async with cluster.load():
        for _ in range(5 if is_long else 1):
            await cluster.recovers("the start")
            before = await cluster.epochs()
            await small_etcd.fill()
            await cluster.clock.sleep(2 * SESSION)
            await cluster.recovers("a full etcd", _PROMPT)
            assert await cluster.epochs() == before, "shards moved"
            # Nobody can say that it stands for what a dead node led, nor can that one come back.
            victim.kill()
            victim.spawn()
            await _until_logged([victim], "session_not_opened", "space exceeded")
            await _until_logged(others, "campaign_interrupted", "space exceeded")
            assert await cluster.epochs() == before, "the fault did not fire"
            await small_etcd.make_room()
            await cluster.recovers("an etcd that was full")
            await cluster.until_led(*cluster.nodes)
    await cluster.settle()


async def _until_logged(nodes: Sequence[NodeProcess], event: str, reason: str) -> None:
    await until(lambda: any(reason in line["reason"] for node in nodes for line in node.logged(event)), _SAID)


@pytest.mark.parametrize("meanwhile", ["a node leaves", "a node comes"])
async def test_a_watch_that_finds_its_history_compacted_misses_nothing(
    start_cluster: StartCluster, own_etcd: EtcdCluster, meanwhile: str
) -> None:
    cluster = await start_cluster(own_etcd=own_etcd, session="10s", links={"node-1": (Link.ETCD,)})
    first, second, third = cluster.nodes

    async def is_changed() -> bool:
        is_there = await own_etcd.value(Keys(cluster.etcd_prefix).member(third.name)) is not None
        return is_there if meanwhile == "a node comes" else not is_there

    cluster.start_worker()
    if meanwhile == "a node comes":
        third.kill()
        await cluster.until_led(first, second)
    async with cluster.load():
        await cluster.recovers("the start")
        cluster.links[first.name][Link.ETCD].cut()
        await cluster.clock.sleep(bounds.SECOND)
        if meanwhile == "a node comes":
            await third.start()
        else:
            third.kill()
        # It is this that the first one misses.
        await eventually(is_changed)
        await own_etcd.compact(await own_etcd.put(b"/something/else", b""))
        assert cluster.links[first.name][Link.ETCD].faults["cut"]
        cluster.links[first.name][Link.ETCD].heal()
        there = cluster.nodes if meanwhile == "a node comes" else [first, second]
        await cluster.until_led(*there)
        await cluster.recovers("a compaction")
    assert first.logged("etcd_watch_compacted"), "nothing that it missed was compacted"
    await cluster.settle()
