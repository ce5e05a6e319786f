"""A session in a real etcd: what ends it and what does not."""

import asyncio

from services.coordinating import a_node
from services.etcd import EtcdCluster
from services.tcp_proxy import TcpProxy
from services.waiting import running, until

from duecourse.model import bounds
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Keys
from duecourse.server.leadership.session import DEFAULT_TTL, Session
from duecourse.timing.clock import SystemClock

SHORT = 3 * bounds.SECOND
BUSY = 5 * bounds.SECOND
"""By how much a machine that is busy may be late."""
AWAY = 10 * bounds.SECOND


async def value_becomes(etcd: EtcdCluster, key: bytes, value: bytes | None, limit: int = 10 * bounds.SECOND) -> int:
    """Wait until a key holds a value, as an outsider sees it, and return how long that took."""
    clock = SystemClock()
    start = clock.elapsed()
    while await etcd.value(key) != value:
        assert clock.elapsed() - start < limit
        await clock.sleep(20 * bounds.MILLISECOND)
    return clock.elapsed() - start


async def next_beat(session: Session) -> int:
    """Wait until a beat was answered, and return how long the lease then lives."""
    last = session.remaining()

    def has_grown() -> bool:
        nonlocal last
        before, last = last, session.remaining()
        return last > before

    await until(has_grown)
    return last


async def test_the_keys_of_a_session_live_and_go_with_it(etcd: EtcdCluster, keys: Keys) -> None:
    key = keys.member("a")
    async with a_node("a", etcd.endpoints, keys) as node:
        node.session.keep(key, b"here")
        await value_becomes(etcd, key, b"here")
        node.session.keep(key, b"draining")
        await value_becomes(etcd, key, b"draining")
    # Revoked at the end, so nobody waits for the lease to expire.
    assert await etcd.value(key) is None
    assert node.session.lease == 0


async def test_keys_that_were_deleted_or_overwritten_are_written_again_within_a_lease(
    etcd: EtcdCluster, keys: Keys
) -> None:
    deleted, overwritten = keys.member("a"), keys.member("b")
    async with a_node("a", etcd.endpoints, keys, SHORT) as node:
        node.session.keep(deleted, b"here")
        node.session.keep(overwritten, b"here")
        await value_becomes(etcd, deleted, b"here")
        await value_becomes(etcd, overwritten, b"here")
        await etcd.delete(deleted)
        await etcd.put(overwritten, b"somebody else's")
        assert await value_becomes(etcd, deleted, b"here") < SHORT + BUSY
        await value_becomes(etcd, overwritten, b"here")
        assert len(node.leases) == 1


async def test_a_revoked_lease_is_lost_and_followed_by_a_new_one(etcd: EtcdCluster, keys: Keys) -> None:
    key = keys.member("a")
    async with a_node("a", etcd.endpoints, keys) as node:
        node.session.keep(key, b"here")
        await value_becomes(etcd, key, b"here")
        first = node.session.lease
        await etcd.revoke(first)
        assert await until(lambda: node.session.lease not in (0, first)) < 5 * bounds.SECOND
        assert node.leases == [first, 0, node.session.lease]
        await value_becomes(etcd, key, b"here")


async def test_a_session_that_is_ended_in_the_moment_of_its_loss_ends(etcd: EtcdCluster) -> None:
    async with EtcdClient(etcd.endpoints, SystemClock()) as client, asyncio.TaskGroup() as group:
        session = Session(client, SystemClock())
        running = group.create_task(session.run(), name="session")
        lease = await session.opened()
        await until(lambda: any(task.get_name() == "session beats" for task in asyncio.all_tasks()))
        [beats] = [task for task in asyncio.all_tasks() if task.get_name() == "session beats"]
        beats.add_done_callback(lambda _: running.cancel())
        await etcd.revoke(lease)
        await asyncio.wait((running,), timeout=10)
        was_cancelled = running.cancelled()
        running.cancel()
    assert beats.done(), "the lease was not lost"
    assert was_cancelled


async def test_a_session_survives_a_restart_of_etcd(own_etcd: EtcdCluster, keys: Keys) -> None:
    key = keys.member("a")
    async with a_node("a", own_etcd.endpoints, keys) as node:
        node.session.keep(key, b"here")
        await value_becomes(own_etcd, key, b"here")
        for _ in range(2):
            own_etcd.kill()
            await own_etcd.start()
            await next_beat(node.session)
        assert await own_etcd.value(key) == b"here"
        assert len(node.leases) == 1


async def test_a_session_goes_on_after_etcd_was_away_for_twice_its_time(own_etcd: EtcdCluster, keys: Keys) -> None:
    key = keys.member("a")
    clock = SystemClock()
    async with a_node("a", own_etcd.endpoints, keys) as node:
        node.session.keep(key, b"here")
        await value_becomes(own_etcd, key, b"here")
        own_etcd.kill()
        gone = clock.elapsed()
        await until(lambda: node.session.remaining() == 0)
        await until(lambda: clock.elapsed() > gone + AWAY, 2 * AWAY)
        # Silence ends nothing.
        assert len(node.leases) == 1
        await own_etcd.start()
        assert await until(lambda: node.session.remaining() > 0) < 5 * bounds.SECOND
        await value_becomes(own_etcd, key, b"here")


async def test_a_session_outlives_the_freeze_of_its_member(etcd_of_three: EtcdCluster, keys: Keys) -> None:
    key = keys.member("a")
    async with a_node("a", etcd_of_three.endpoints, keys) as node:
        node.session.keep(key, b"here")
        await value_becomes(etcd_of_three, key, b"here")
        etcd_of_three.members[0].freeze()
        # The first may have been under way.
        await next_beat(node.session)
        await next_beat(node.session)
        assert len(node.leases) == 1
        assert await etcd_of_three.value(key) == b"here"


async def test_a_session_that_was_cut_off_learns_of_its_loss_when_it_can(etcd: EtcdCluster, keys: Keys) -> None:
    key = keys.member("a")
    async with (
        TcpProxy("127.0.0.1", etcd.members[0].port) as proxy,
        a_node("a", [proxy.endpoint], keys, SHORT) as node,
    ):
        node.session.keep(key, b"here")
        await value_becomes(etcd, key, b"here")
        proxy.cut()
        await value_becomes(etcd, key, None)
        assert proxy.faults["cut"] > 0
        # It cannot know, but it can tell that it is not sure any more.
        assert len(node.leases) == 1
        assert node.session.remaining() == 0
        proxy.heal()
        await until(lambda: len(node.leases) == 3)
        await value_becomes(etcd, key, b"here")


async def test_a_lease_counts_from_the_sending_of_a_beat_not_from_its_answer(etcd: EtcdCluster, keys: Keys) -> None:
    delay = 200 * bounds.MILLISECOND
    async with (
        TcpProxy("127.0.0.1", etcd.members[0].port) as proxy,
        a_node("a", [proxy.endpoint], keys) as node,
    ):
        proxy.delay(delay)
        await until(lambda: proxy.faults["delayed"] > 1)
        await next_beat(node.session)
        # There and back.
        assert await next_beat(node.session) <= DEFAULT_TTL - 2 * delay


async def test_a_session_opens_when_etcd_can_be_reached(etcd: EtcdCluster, keys: Keys) -> None:
    async with TcpProxy("127.0.0.1", etcd.members[0].port) as proxy:
        proxy.refuse()

        async def heal() -> None:
            await until(lambda: proxy.faults["refused"] > 2)
            proxy.heal()

        async with running(heal()), a_node("a", [proxy.endpoint], keys) as node:
            assert node.session.remaining() > 0
