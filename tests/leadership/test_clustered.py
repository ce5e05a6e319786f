"""Nodes that share out shards: joining, leaving, dying, and what etcd and the store say about it."""

import asyncio

from services.clustering import SESSION, SETTLES, SHARDS, ClusterNode, InProcessCluster
from services.etcd import EtcdCluster
from services.waiting import until

from duecourse.model import bounds
from duecourse.server.core.effects import Submitted
from duecourse.server.core.errors import DomainError, NoLeader, NotShardLeader, OutcomeUncertain
from duecourse.server.core.task import ShardId
from duecourse.server.etcd.keys import Keys
from duecourse.server.leadership import RAISES_PER_CLAIM, DuplicateNode
from duecourse.timing.clock import SystemClock

LONG = 20 * bounds.SECOND
"""A session that ends when it is revoked, and not by itself while a test waits."""

clock = SystemClock()


async def test_a_node_alone_leads_every_shard_and_is_ready(cluster: InProcessCluster) -> None:
    node = await cluster.start("a")
    await until(lambda: cluster.leads_all(node))
    assert node.is_ready
    assert [member.node_id for member in node.leadership.members()] == ["a"]
    leader = node.leadership.leader(ShardId(0))
    assert leader is not None
    assert leader.address == "a.test:7400"


async def test_nodes_that_join_get_their_share_once_the_placement_has_settled(cluster: InProcessCluster) -> None:
    a = await cluster.start("a")
    await until(lambda: cluster.leads_all(a))
    started = clock.elapsed()
    b, c = await cluster.start("b"), await cluster.start("c")
    await until(lambda: cluster.leads_all(a, b, c) and {len(node.led) for node in (a, b, c)} == {SHARDS // 3})
    assert clock.elapsed() - started >= SETTLES
    await until(lambda: a.is_ready and b.is_ready and c.is_ready)
    for shard in range(SHARDS):
        leader = next(node for node in (a, b, c) if shard in node.led)
        for node in (a, b, c):
            await until(
                lambda node=node, shard=shard, leader=leader: (  # type: ignore[misc]
                    (seen := node.leadership.leader(ShardId(shard))) is not None
                    and seen.node_id == leader.scheduler._options.node_id
                )
            )


async def test_a_node_that_stops_is_followed_at_once_under_higher_epochs(cluster: InProcessCluster) -> None:
    a, b = await cluster.start("a", session=LONG), await cluster.start("b", session=LONG)
    await until(lambda: cluster.leads_all(a, b) and a.led and b.led)
    before = cluster.epochs()
    lost = a.led
    await a.stop()
    await until(lambda: cluster.leads_all(b), LONG // 2)
    after = cluster.epochs()
    assert all(after[shard] > before[shard] for shard in lost)


async def test_a_node_that_vanishes_is_followed_when_its_session_is_over(cluster: InProcessCluster) -> None:
    a, b = await cluster.start("a"), await cluster.start("b")
    await until(lambda: cluster.leads_all(a, b) and a.led and b.led)
    await a.crash()
    await until(lambda: cluster.leads_all(b), SESSION + 8 * bounds.SECOND)
    assert [member.node_id for member in b.leadership.members()] == ["b"]


async def test_a_draining_node_hands_its_shards_over_and_keeps_its_promises(cluster: InProcessCluster) -> None:
    a, b = await cluster.start("a", session=LONG), await cluster.start("b", session=LONG)
    await until(lambda: cluster.leads_all(a, b) and a.led and b.led)
    a.store.commit_time = 10 * bounds.MILLISECOND
    answers: list[object] = []

    async def submit() -> None:
        number = 0
        while a.led:
            number += 1
            answers.extend(await a.submit(*(f"t{number}-{index}" for index in range(20))))
            await clock.sleep(bounds.MILLISECOND)

    async with asyncio.TaskGroup() as group:
        group.create_task(submit())
        await until(lambda: len(answers) > 100)
        await a.scheduler.hand_over(clock.elapsed() + 10 * bounds.SECOND)
    assert not a.led
    await until(lambda: cluster.leads_all(b), LONG // 2)
    # Whatever was answered otherwise was surely not applied; nobody is left in doubt.
    assert {type(answer) for answer in answers} <= {Submitted, NotShardLeader, NoLeader}
    stored = {key.task_id for key in cluster.store._records}
    assert len(stored) == sum(isinstance(answer, Submitted) for answer in answers)
    assert set(a.scheduler._metrics.terms_ended) == {"handed_over"}
    assert a.scheduler.why_not_ready() == "draining"


async def test_who_asks_a_node_that_has_handed_over_is_told_the_leader(cluster: InProcessCluster) -> None:
    a, b = await cluster.start("a"), await cluster.start("b")
    await until(lambda: cluster.leads_all(a, b) and a.led and b.led)
    await a.scheduler.hand_over(clock.elapsed() + 10 * bounds.SECOND)
    await until(lambda: cluster.leads_all(b))
    await until(lambda: all((seen := a.leadership.leader(shard)) and seen.node_id == "b" for shard in b.led))
    (answer,) = await a.submit("t")
    assert isinstance(answer, NotShardLeader)
    assert answer.leader == "b.test:7400"


async def test_a_drain_without_another_node_ends_at_once(cluster: InProcessCluster) -> None:
    a = await cluster.start("a")
    await until(lambda: cluster.leads_all(a))
    before = clock.elapsed()
    await a.scheduler.hand_over(before + 20 * bounds.SECOND)
    assert clock.elapsed() - before < 10 * bounds.SECOND
    assert cluster.leads_all(a)


async def test_a_hand_over_of_one_shard_takes_little_time(cluster: InProcessCluster) -> None:
    # The least of several: the machine may have been busy with something else.
    old, took = await cluster.start("a", session=LONG), []
    for name in "bcdef":
        new = await cluster.start(name, session=LONG)
        took.append(await _longest_hand_over(cluster, old, new))
        if took[-1] < 300 * bounds.MILLISECOND:
            break
        await old.stop()
        old = new
    print(f"longest hand-overs: {[longest // bounds.MILLISECOND for longest in took]} ms")
    assert min(took) < 300 * bounds.MILLISECOND


async def _longest_hand_over(cluster: InProcessCluster, a: ClusterNode, b: ClusterNode) -> int:
    """Return how long the shard was led by neither that was so for longest while one node hands over to the other."""
    await until(lambda: cluster.leads_all(a, b) and a.led and b.led)
    lost = a.led
    gaps: dict[ShardId, list[int]] = {shard: [] for shard in lost}

    async def watch() -> None:
        while not cluster.leads_all(b):
            for shard in lost - a.led - b.led:
                gaps[shard].append(clock.elapsed())
            await clock.sleep(bounds.MILLISECOND)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        await a.scheduler.hand_over(clock.elapsed() + 10 * bounds.SECOND)
    return max((seen[-1] - seen[0] for seen in gaps.values() if seen), default=0)


async def test_a_revoked_session_ends_all_terms_and_a_new_one_takes_shards_again(
    cluster: InProcessCluster, etcd: EtcdCluster
) -> None:
    a = await cluster.start("a")
    await until(lambda: cluster.leads_all(a))
    before = cluster.epochs()
    await etcd.revoke(a.leadership._session.lease)
    await until(lambda: a.scheduler._metrics.terms_ended["election_lost"] == SHARDS)
    await until(lambda: cluster.leads_all(a))
    after = cluster.epochs()
    assert all(after[shard] > before[shard] for shard in before)


async def test_a_deleted_key_ends_the_term_of_its_shard_alone(
    cluster: InProcessCluster, etcd: EtcdCluster, keys: Keys
) -> None:
    a = await cluster.start("a", session=LONG)
    await until(lambda: cluster.leads_all(a))
    before = cluster.epochs()
    await etcd.delete(keys.candidate(ShardId(5), a.leadership._session.lease))
    await until(lambda: cluster.epochs()[ShardId(5)] > before[ShardId(5)])
    await until(lambda: cluster.leads_all(a))
    assert {shard for shard, epoch in cluster.epochs().items() if epoch != before[shard]} == {ShardId(5)}


async def test_while_etcd_is_silent_terms_go_on_and_broken_ones_begin_anew(cluster: InProcessCluster) -> None:
    a = await cluster.start("a")
    await until(lambda: cluster.leads_all(a))
    before = cluster.epochs()
    a.etcd.cut()
    await clock.sleep(bounds.SECOND)
    shard = a.scheduler.loop.shards[ShardId(3)]
    a.scheduler.terms.uncertain(shard, "the answer was lost", [])
    await until(lambda: cluster.leads_all(a))
    assert cluster.epochs()[ShardId(3)] == before[ShardId(3)] + 1
    assert isinstance((await a.submit("t"))[0], Submitted)
    a.etcd.heal()
    b = await cluster.start("b")
    await until(lambda: cluster.leads_all(a, b) and b.led, 20 * bounds.SECOND)


async def test_a_node_without_its_store_loses_its_shards_to_one_that_has_it(cluster: InProcessCluster) -> None:
    a, b = await cluster.start("a"), await cluster.start("b")
    await until(lambda: cluster.leads_all(a, b) and a.led and b.led)
    a.store.is_away = True
    await until(lambda: cluster.leads_all(b), 15 * bounds.SECOND)
    assert a.scheduler.why_not_ready() is not None
    a.store.is_away = False
    await until(lambda: cluster.leads_all(a, b) and a.led, 15 * bounds.SECOND)


async def test_a_shard_that_a_node_cannot_load_goes_to_another_and_keeps_no_other_waiting(
    cluster: InProcessCluster,
) -> None:
    a = await cluster.start("a")
    bad = ShardId(2)
    a.store.unloadable.add(bad)
    await until(lambda: len(a.led) == SHARDS - 1)
    await until(lambda: bad in a.scheduler.terms.failing())
    b = await cluster.start("b")
    await until(lambda: bad in b.led, 15 * bounds.SECOND)
    await until(lambda: cluster.leads_all(a, b))


async def test_a_shard_that_breaks_begins_anew_without_etcd_and_does_not_spin(cluster: InProcessCluster) -> None:
    a = await cluster.start("a")
    await until(lambda: cluster.leads_all(a))
    before = cluster.epochs()
    a.etcd.cut()
    for _ in range(4):
        a.scheduler.terms.failed(a.scheduler.loop.shards[ShardId(1)], [])
        await until(lambda: cluster.leads_all(a))
    assert cluster.epochs()[ShardId(1)] == before[ShardId(1)] + 4
    assert a.scheduler.terms.failing() == {ShardId(1)}
    a.etcd.heal()


async def test_a_claim_that_has_no_epoch_left_is_given_up_for_a_new_one(cluster: InProcessCluster) -> None:
    a = await cluster.start("a")
    await until(lambda: cluster.leads_all(a))
    shard = ShardId(6)
    first = cluster.epochs()[shard]
    claim = a.scheduler.terms._beginnings.claims[shard]
    claim._raises = RAISES_PER_CLAIM
    assert claim.is_spent
    a.scheduler.terms.uncertain(a.scheduler.loop.shards[shard], "the answer was lost", [])
    await until(lambda: cluster.leads_all(a))
    assert cluster.epochs()[shard] >= first + RAISES_PER_CLAIM


async def test_a_hand_over_does_not_wait_for_a_store_that_refuses(cluster: InProcessCluster) -> None:
    a = await cluster.start("a")
    await until(lambda: cluster.leads_all(a))
    await cluster.start("b")
    await until(lambda: len(a.led) == SHARDS // 2)
    shard = next(iter(a.led))
    a.store.commit_time = 5 * bounds.SECOND
    async with asyncio.TaskGroup() as group:
        names = (f"t{number}" for number in range(10_000))
        task_id = next(name for name in names if a.scheduler.loop.shard_of("default", name) == shard)
        submitting = group.create_task(a.submit(task_id))
        await until(lambda: a.scheduler.loop.shards[shard].lines.busy)
        before = clock.elapsed()
        await a.scheduler.terms.hand_over(shard)
        assert clock.elapsed() - before < a.store.commit_time // 2
        assert not submitting.done()
    # It was on its way: whether it was applied is told by its answer, and by nothing else.
    (answer,) = submitting.result()
    assert isinstance(answer, OutcomeUncertain)


async def test_a_node_that_was_replaced_behind_its_back_looks_at_the_election_again(cluster: InProcessCluster) -> None:
    a = await cluster.start("a")
    await until(lambda: cluster.leads_all(a))
    (row,) = [row for row in await cluster.store.shards() if row.shard == 4]
    fenced = cluster.store._shards[ShardId(4)]
    fenced.row = type(row)(row.shard, row.slot_from, row.slot_until, row.coordination, row.epoch, b"somebody else's")
    await until(lambda: a.scheduler._metrics.terms_ended["stale"] == 1)
    await until(lambda: cluster.leads_all(a))
    assert cluster.epochs()[ShardId(4)] >= row.epoch + 65_536 - 2


async def test_a_node_whose_name_another_has_taken_meanwhile_leaves_it_to_that_one(cluster: InProcessCluster) -> None:
    a = await cluster.start("a")
    await until(lambda: a.is_ready)
    a.etcd.cut()
    other = await cluster.start("a", address="elsewhere:7400")
    await until(lambda: other.leadership.membership.has_joined)
    a.etcd.heal()
    await until(lambda: a.has_ended)
    assert isinstance(a.failure, DuplicateNode)
    await until(lambda: cluster.leads_all(other))
    assert [member.address for member in other.leadership.members()] == ["elsewhere:7400"]
    assert not other.has_ended


async def test_a_second_node_of_the_same_name_is_refused(cluster: InProcessCluster) -> None:
    a = await cluster.start("a")
    await until(lambda: cluster.leads_all(a))
    second = await cluster.start("a", address="elsewhere.test:7400")
    await until(lambda: second.has_ended, 15 * bounds.SECOND)
    assert isinstance(second.failure, DuplicateNode)
    assert "a.test:7400" in str(second.failure)
    assert cluster.leads_all(a)


async def test_a_node_that_comes_back_after_a_crash_waits_for_its_own_session(cluster: InProcessCluster) -> None:
    a = await cluster.start("a")
    await until(lambda: cluster.leads_all(a))
    await a.crash()
    again = await cluster.start("a")
    await until(lambda: cluster.leads_all(again), 15 * bounds.SECOND)


async def test_others_learn_how_far_a_nodes_wall_clock_is_off(cluster: InProcessCluster) -> None:
    offset = 70 * bounds.MILLISECOND
    a, b = await cluster.start("a", offset=lambda: offset), await cluster.start("b")
    await until(lambda: [member.wall_clock_offset for member in b.leadership.members()] == [offset, 0])
    changes = a.leadership._mirror.revision
    offset += 20 * bounds.MILLISECOND
    await clock.sleep(1_200 * bounds.MILLISECOND)
    assert [member.wall_clock_offset for member in b.leadership.members()] == [70 * bounds.MILLISECOND, 0]
    offset += 100 * bounds.MILLISECOND
    await until(lambda: [member.wall_clock_offset for member in b.leadership.members()] == [offset, 0])
    assert changes > 0


async def test_errors_of_a_batch_are_of_the_domain(cluster: InProcessCluster) -> None:
    a, b = await cluster.start("a"), await cluster.start("b")
    await until(lambda: cluster.leads_all(a, b) and a.led and b.led)
    answers = await a.submit(*(f"t{number}" for number in range(50)))
    assert {type(answer) for answer in answers} == {Submitted, NotShardLeader}
    assert all(isinstance(answer, Submitted | DomainError) for answer in answers)
