"""Elections in a real etcd: who is elected, who is next, and how a leader learns that it is over."""

import asyncio
from pathlib import Path

from services.coordinating import CoordinatingNode, a_node, lost
from services.etcd import EtcdCluster
from services.tcp_proxy import Http2, TcpProxy
from services.waiting import running, until

from duecourse.model import bounds
from duecourse.server.core.task import ShardId
from duecourse.server.etcd import keys as key_space
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Keys
from duecourse.server.leadership.election import Elected

SHARD = ShardId(3)
SHORT = 3 * bounds.SECOND
AT_ONCE = 5 * bounds.SECOND
"""On a machine that is busy. That news come by the watch, not by reading at intervals, is a test of the mirror."""


class Campaign:
    """A node that campaigns in the background."""

    def __init__(self, node: CoordinatingNode) -> None:
        self.node = node
        self.election = node.election(SHARD)
        self.elected: Elected | None = None

    async def run(self) -> None:
        self.elected = await self.election.campaign()

    @property
    def is_waiting(self) -> bool:
        return self.elected is None and self.node.standings.own(SHARD) is not None


class Lost:
    """Notes when and why an election is over."""

    def __init__(self, node: CoordinatingNode, elected: Elected) -> None:
        self.elected = elected
        self.reason: str | None = None
        self._node = node

    async def run(self) -> None:
        self.reason = await lost(self._node.standings, self._node.election(SHARD), self.elected)


async def candidates(client: EtcdClient, keys: Keys) -> list[bytes]:
    start = keys.election(SHARD)
    return [kv.key for kv in (await client.read(start, key_space.end_of(start))).found]


async def test_the_first_candidate_is_elected_and_seen_by_all(etcd: EtcdCluster, keys: Keys) -> None:
    async with a_node("a", etcd.endpoints, keys) as a, a_node("b", etcd.endpoints, keys) as b:
        waiting = Campaign(b)
        elected = await a.election(SHARD).campaign()
        async with running(waiting.run()):
            await until(lambda: waiting.is_waiting)
            for node in (a, b):
                leader = node.standings.leader(SHARD)
                assert leader is not None
                assert (leader.candidate, leader.revision) == (a.candidate, elected.revision)
            assert [standing.candidate for standing in b.standings.of(SHARD)] == [a.candidate, b.candidate]
            assert b.standings.leader(ShardId(4)) is None


async def test_the_next_is_elected_at_once_when_the_leader_resigns(etcd: EtcdCluster, keys: Keys) -> None:
    async with a_node("a", etcd.endpoints, keys) as a, a_node("b", etcd.endpoints, keys) as b:
        waiting = Campaign(b)
        elected = await a.election(SHARD).campaign()
        async with running(waiting.run()):
            await until(lambda: waiting.is_waiting)
            await a.election(SHARD).resign(elected)
            assert await until(lambda: waiting.elected) < AT_ONCE
        assert waiting.elected is not None
        assert waiting.elected.revision > elected.revision
        assert await lost(a.standings, a.election(SHARD), elected) == "its key is gone"


async def test_leaders_follow_each_other_under_ever_greater_revisions(etcd: EtcdCluster, keys: Keys) -> None:
    revisions: list[int] = []
    leading = 0

    async def lead_by_turns(node: CoordinatingNode) -> None:
        nonlocal leading
        election = node.election(SHARD)
        for _ in range(5):
            elected = await election.campaign()
            leading += 1
            assert leading == 1
            revisions.append(elected.revision)
            await node.clock.sleep(bounds.MILLISECOND)
            leading -= 1
            await election.resign(elected)

    async with (
        a_node("a", etcd.endpoints, keys) as a,
        a_node("b", etcd.endpoints, keys) as b,
        a_node("c", etcd.endpoints, keys) as c,
        asyncio.TaskGroup() as group,
    ):
        for node in (a, b, c):
            group.create_task(lead_by_turns(node))
    assert len(revisions) == 15
    assert revisions == sorted(set(revisions))


async def test_a_leader_whose_lease_was_revoked_is_told_and_followed(etcd: EtcdCluster, keys: Keys) -> None:
    async with a_node("a", etcd.endpoints, keys) as a, a_node("b", etcd.endpoints, keys) as b:
        waiting = Campaign(b)
        elected = await a.election(SHARD).campaign()
        async with running(waiting.run()):
            await until(lambda: waiting.is_waiting)
            await etcd.revoke(elected.lease)
            assert await until(lambda: waiting.elected) < AT_ONCE
        async with asyncio.timeout(AT_ONCE / bounds.SECOND):
            assert await lost(a.standings, a.election(SHARD), elected) in ("its key is gone", "the session was lost")


async def test_a_leader_whose_key_was_deleted_is_told_and_may_stand_again(etcd: EtcdCluster, keys: Keys) -> None:
    async with a_node("a", etcd.endpoints, keys) as a:
        election = a.election(SHARD)
        elected = await election.campaign()
        await etcd.delete(elected.key)
        async with asyncio.timeout(AT_ONCE / bounds.SECOND):
            assert await lost(a.standings, election, elected) == "its key is gone"
        again = await election.campaign()
        assert (again.lease, again.revision > elected.revision) == (elected.lease, True)


async def test_a_key_that_was_made_anew_is_another_candidacy(etcd: EtcdCluster, keys: Keys) -> None:
    async with a_node("a", etcd.endpoints, keys) as a:
        election = a.election(SHARD)
        elected = await election.campaign()
        await etcd.delete(elected.key)
        await etcd.put(elected.key, b"", elected.lease)
        async with asyncio.timeout(AT_ONCE / bounds.SECOND):
            assert await lost(a.standings, election, elected) in ("its key was made anew", "its key is gone")


async def test_a_queued_candidate_whose_lease_was_revoked_stands_again(etcd: EtcdCluster, keys: Keys) -> None:
    async with a_node("a", etcd.endpoints, keys) as a, a_node("b", etcd.endpoints, keys) as b:
        waiting = Campaign(b)
        elected = await a.election(SHARD).campaign()
        async with running(waiting.run()):
            await until(lambda: waiting.is_waiting)
            first = b.session.lease
            await etcd.revoke(first)
            took = await until(lambda: b.session.lease not in (0, first) and waiting.is_waiting)
            assert took < b.session.remaining()
            await etcd.revoke(elected.lease)
            assert await until(lambda: waiting.elected) < AT_ONCE
        assert waiting.elected is not None
        assert waiting.elected.lease == b.session.lease != first


async def test_a_queued_candidate_whose_key_was_deleted_stands_again(etcd: EtcdCluster, keys: Keys) -> None:
    async with a_node("a", etcd.endpoints, keys) as a, a_node("b", etcd.endpoints, keys) as b:
        waiting = Campaign(b)
        elected = await a.election(SHARD).campaign()
        async with running(waiting.run()):
            await until(lambda: waiting.is_waiting)
            key = keys.candidate(SHARD, b.session.lease)
            before = b.standings.own(SHARD)
            assert before is not None
            await etcd.delete(key)
            await until(lambda: waiting.is_waiting and b.standings.own(SHARD) != before)
            await a.election(SHARD).resign(elected)
            assert await until(lambda: waiting.elected) < AT_ONCE


async def test_a_cancelled_campaign_leaves_no_key(etcd: EtcdCluster, client: EtcdClient, keys: Keys) -> None:
    async with a_node("a", etcd.endpoints, keys) as a, a_node("b", etcd.endpoints, keys) as b:
        elected = await a.election(SHARD).campaign()
        waiting = Campaign(b)
        async with running(waiting.run()):
            await until(lambda: waiting.is_waiting)
        await until(lambda: not waiting.is_waiting)
        assert await candidates(client, keys) == [elected.key]


async def test_a_campaign_whose_answer_was_lost_stands_once(etcd: EtcdCluster, client: EtcdClient, keys: Keys) -> None:
    async with (
        TcpProxy("127.0.0.1", etcd.members[0].port, Http2) as proxy,
        a_node("a", [proxy.endpoint], keys) as a,
    ):
        await a.mirror.wait_read()
        proxy.lose_answer()
        # Whichever request it is that loses its answer: the next ones are about the campaign.
        elected = await a.election(SHARD).campaign()
        await until(lambda: proxy.faults["answer lost"])
        assert await candidates(client, keys) == [elected.key]


async def test_a_leader_whose_resignation_had_no_answer_is_followed(etcd: EtcdCluster, keys: Keys) -> None:
    async with (
        TcpProxy("127.0.0.1", etcd.members[0].port) as proxy,
        a_node("a", [proxy.endpoint], keys) as a,
        a_node("b", etcd.endpoints, keys) as b,
    ):
        waiting = Campaign(b)
        elected = await a.election(SHARD).campaign()
        async with running(waiting.run()):
            await until(lambda: waiting.is_waiting)
            proxy.refuse()
            await a.election(SHARD).resign(elected)
            assert waiting.elected is None
            proxy.heal()
            # Long before the lease, which is kept alive, could expire.
            await until(lambda: waiting.elected)
            assert a.leases == [elected.lease]


async def test_a_leader_that_was_cut_off_is_followed_when_its_lease_expires(etcd: EtcdCluster, keys: Keys) -> None:
    async with (
        TcpProxy("127.0.0.1", etcd.members[0].port) as proxy,
        a_node("a", [proxy.endpoint], keys, SHORT) as a,
        a_node("b", etcd.endpoints, keys) as b,
    ):
        waiting = Campaign(b)
        over = Lost(a, await a.election(SHARD).campaign())
        async with running(waiting.run(), over.run()):
            await until(lambda: waiting.is_waiting)
            proxy.cut()
            # etcd looks for expired leases twice a second, and counts from when a beat has reached it.
            assert await until(lambda: waiting.elected) < SHORT + AT_ONCE
            assert proxy.faults["cut"] > 0
            # It cannot know; that it writes nothing is the fence's affair.
            assert over.reason is None
            proxy.heal()
            await until(lambda: over.reason)


async def test_a_leader_stays_elected_through_a_restart_of_etcd(own_etcd: EtcdCluster, keys: Keys) -> None:
    async with a_node("a", own_etcd.endpoints, keys) as a:
        over = Lost(a, await a.election(SHARD).campaign())
        async with running(over.run()):
            own_etcd.kill()
            await own_etcd.start()
            restarted = a.clock.elapsed()
            await until(lambda: (a.mirror.read_at or 0) > restarted)
            assert over.reason is None
            # And what is elected can still be handed over.
            await a.election(SHARD).resign(over.elected)
            await until(lambda: over.reason)


async def test_a_leader_is_told_when_etcd_was_set_back(own_etcd: EtcdCluster, keys: Keys, tmp_path: Path) -> None:
    own_etcd.stop()
    own_etcd.save(tmp_path / "copy")
    await own_etcd.start()
    async with a_node("a", own_etcd.endpoints, keys) as a:
        election = a.election(SHARD)
        elected = await election.campaign()
        for _ in range(20):
            revision = await own_etcd.put(keys.member("a"), b"")
        await until(lambda: a.mirror.revision >= revision)
        own_etcd.stop()
        own_etcd.set_back(tmp_path / "copy")
        await own_etcd.start()
        async with asyncio.timeout(10):
            await lost(a.standings, election, elected)
            # The new revision may be lower: such an epoch is refused by the store.
            again = await election.campaign()
        assert again.era == elected.era + 1


async def test_elections_go_on_while_a_member_is_frozen(etcd_of_three: EtcdCluster, keys: Keys) -> None:
    endpoints = etcd_of_three.endpoints
    async with a_node("a", endpoints, keys) as a, a_node("b", endpoints[1:], keys) as b:
        waiting = Campaign(b)
        elected = await a.election(SHARD).campaign()
        async with running(waiting.run()):
            await until(lambda: waiting.is_waiting)
            etcd_of_three.members[0].freeze()
            await a.election(SHARD).resign(elected)
            # Even if the frozen one led the others, and the resignation had no answer.
            await until(lambda: waiting.elected)
            assert a.leases == [elected.lease]


async def test_a_key_that_cannot_be_read_counts_all_the_same(etcd: EtcdCluster, keys: Keys) -> None:
    foreign = keys.candidate(SHARD, 1)
    await etcd.put(foreign, b"not a candidate")
    async with a_node("a", etcd.endpoints, keys) as a:
        waiting = Campaign(a)
        async with running(waiting.run()):
            await until(lambda: waiting.is_waiting)
            leader = a.standings.leader(SHARD)
            assert leader is not None
            assert leader.candidate is None
            await etcd.delete(foreign)
            assert await until(lambda: waiting.elected) < AT_ONCE
