"""A watch of a real etcd: every event once and in order, through everything that happens to servers and connections."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.etcd import EtcdCluster
from services.tcp_proxy import TcpProxy
from services.waiting import running, until

from duecourse.model import bounds
from duecourse.server.etcd import keys as key_space
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Keys
from duecourse.server.etcd.watch import Event, Watch
from duecourse.timing.clock import SystemClock

CHANGE_SEEN = 10 * bounds.SECOND
"""On a machine that is busy. It takes 3 s where a connection has to be found dead first."""


class Watcher:
    """Notes what a watch delivers."""

    def __init__(self, client: EtcdClient, prefix: bytes) -> None:
        self.events: list[Event] = []
        self.values: list[bytes] = []
        self.rereads = 0
        self.connections = 0
        self._client = client
        self._range = (prefix, key_space.end_of(prefix))
        self.watch = Watch(
            client,
            SystemClock(),
            *self._range,
            deliver=self._deliver,
            reread=self._reread,
            connected=self._connected,
        )

    def _deliver(self, events: Sequence[Event]) -> None:
        self.events += events
        self.values += [event.kv.value for event in events]

    async def _reread(self) -> int:
        reading = await self._client.read(*self._range)
        self.rereads += 1
        return reading.revision

    def _connected(self) -> None:
        self.connections += 1


@asynccontextmanager
async def a_watcher(endpoints: Sequence[str], keys: Keys) -> AsyncIterator[Watcher]:
    async with EtcdClient(endpoints, SystemClock()) as client:
        watcher = Watcher(client, keys.coordination)
        async with running(watcher.watch.run()):
            yield watcher


async def test_events_come_once_and_in_order(etcd: EtcdCluster, keys: Keys) -> None:
    key = keys.member("a")
    await etcd.put(key, b"before")
    async with a_watcher(etcd.endpoints, keys) as watcher:
        await until(lambda: watcher.connections)
        for n in range(20):
            await etcd.put(key, b"%d" % n)
        await etcd.delete(key)
        await until(lambda: len(watcher.events) == 21)
    assert watcher.values == [b"%d" % n for n in range(20)] + [b""]
    assert [event.is_deletion for event in watcher.events] == [False] * 20 + [True]
    revisions = [event.kv.modified for event in watcher.events]
    assert revisions == sorted(set(revisions))


async def test_events_of_other_keys_do_not_come(etcd: EtcdCluster, keys: Keys) -> None:
    async with a_watcher(etcd.endpoints, keys) as watcher:
        await until(lambda: watcher.connections)
        await etcd.put(Keys("other").member("a"), b"other")
        await etcd.put(keys.member("a"), b"own")
        await until(lambda: watcher.events)
    assert watcher.values == [b"own"]


async def test_a_watch_goes_on_when_etcd_was_killed_and_started_again(own_etcd: EtcdCluster, keys: Keys) -> None:
    async with a_watcher(own_etcd.endpoints, keys) as watcher:
        await until(lambda: watcher.connections)
        for n in range(2):
            await own_etcd.put(keys.member("a"), b"%d" % n)
            own_etcd.kill()
            await own_etcd.start()
        await own_etcd.put(keys.member("a"), b"last")
        await until(lambda: watcher.values[-1:] == [b"last"], CHANGE_SEEN)
    assert watcher.values == [b"0", b"1", b"last"]
    assert watcher.rereads == 1


async def test_a_watch_starts_when_etcd_does(own_etcd: EtcdCluster, keys: Keys) -> None:
    own_etcd.kill()
    async with a_watcher(own_etcd.endpoints, keys) as watcher:
        await SystemClock().sleep(300 * bounds.MILLISECOND)
        assert not watcher.connections
        await own_etcd.start()
        await until(lambda: watcher.connections)
        await own_etcd.put(keys.member("a"), b"value")
        await until(lambda: watcher.values == [b"value"])


async def test_a_watch_that_was_away_gets_what_it_has_missed(etcd: EtcdCluster, keys: Keys) -> None:
    async with TcpProxy("127.0.0.1", etcd.members[0].port) as proxy, a_watcher([proxy.endpoint], keys) as watcher:
        await until(lambda: watcher.connections)
        proxy.refuse()
        assert proxy.faults["reset"] > 0
        for n in range(5):
            await etcd.put(keys.member("a"), b"%d" % n)
        proxy.heal()
        await until(lambda: len(watcher.values) == 5, CHANGE_SEEN)
    assert watcher.values == [b"%d" % n for n in range(5)]
    assert watcher.rereads == 1


async def test_compaction_of_what_a_watch_has_missed_makes_it_read_everything_again(
    own_etcd: EtcdCluster, keys: Keys
) -> None:
    async with TcpProxy("127.0.0.1", own_etcd.members[0].port) as proxy, a_watcher([proxy.endpoint], keys) as watcher:
        await until(lambda: watcher.connections)
        proxy.refuse()
        for n in range(5):
            revision = await own_etcd.put(keys.member("a"), b"missed %d" % n)
        await own_etcd.compact(revision)
        proxy.heal()
        await until(lambda: watcher.rereads == 2, CHANGE_SEEN)
        await own_etcd.put(keys.member("a"), b"after")
        await until(lambda: watcher.values[-1:] == [b"after"], CHANGE_SEEN)
    assert watcher.values == [b"after"]


async def test_a_connection_that_was_cut_without_a_word_is_noticed(etcd: EtcdCluster, keys: Keys) -> None:
    async with (
        TcpProxy("127.0.0.1", etcd.members[0].port) as proxy,
        a_watcher([proxy.endpoint, *etcd.endpoints], keys) as watcher,
    ):
        await until(lambda: watcher.connections)
        proxy.cut()
        await etcd.put(keys.member("a"), b"value")
        await until(lambda: watcher.values == [b"value"], CHANGE_SEEN)
        assert proxy.faults["cut"] > 0


async def test_a_connection_that_nobody_reads_from_is_noticed(etcd: EtcdCluster, keys: Keys) -> None:
    async with (
        TcpProxy("127.0.0.1", etcd.members[0].port) as proxy,
        a_watcher([proxy.endpoint, *etcd.endpoints], keys) as watcher,
    ):
        await until(lambda: watcher.connections)
        proxy.stop_reading()
        await etcd.put(keys.member("a"), b"value")
        await until(lambda: watcher.values == [b"value"], CHANGE_SEEN)
        assert proxy.faults["not read"] > 0


async def test_changes_are_seen_when_the_member_that_is_watched_freezes(etcd_of_three: EtcdCluster, keys: Keys) -> None:
    leader = await etcd_of_three.leader()
    follower = next(member for member in etcd_of_three.members if member is not leader)
    others = [endpoint for endpoint in etcd_of_three.endpoints if endpoint != follower.endpoint]
    async with a_watcher([follower.endpoint, *others], keys) as watcher:
        await until(lambda: watcher.connections)
        follower.freeze()
        await etcd_of_three.put(keys.member("a"), b"value")
        assert await until(lambda: b"value" in watcher.values) < CHANGE_SEEN


async def test_a_member_that_lost_its_peers_is_left(etcd_of_three: EtcdCluster, keys: Keys) -> None:
    """It answers probes; only that it has no leader tells that it will bring no news."""
    lonely, *others = etcd_of_three.members
    async with a_watcher([lonely.endpoint], keys) as watcher:
        await until(lambda: watcher.connections)
        for member in others:
            member.freeze()
        await until(lambda: watcher.watch.interruptions, 20 * bounds.SECOND)
        for member in others:
            member.thaw()
        await etcd_of_three.wait_healthy()
        await etcd_of_three.put(keys.member("a"), b"value")
        await until(lambda: b"value" in watcher.values, CHANGE_SEEN)
