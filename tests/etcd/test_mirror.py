"""The copy in memory of what is below a prefix in a real etcd."""

import statistics
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from services.etcd import EtcdCluster
from services.tcp_proxy import TcpProxy
from services.waiting import running, until

from duecourse.model import bounds
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Keys
from duecourse.server.etcd.mirror import REREAD_INTERVAL, Mirror
from duecourse.timing.clock import SystemClock


class Reader:
    """A mirror, and what it told."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        self.told: list[Collection[bytes]] = []
        mirror.subscribe(self.told.append)

    def value(self, key: bytes) -> bytes | None:
        kv = self.mirror.get(key)
        return None if kv is None else kv.value

    def holds(self) -> dict[bytes, bytes]:
        return {kv.key: kv.value for kv in self.mirror}


@asynccontextmanager
async def a_reader(endpoints: Sequence[str], keys: Keys) -> AsyncIterator[Reader]:
    async with EtcdClient(endpoints, SystemClock()) as client:
        reader = Reader(Mirror(client, SystemClock(), keys.coordination))
        async with running(reader.mirror.run()):
            await reader.mirror.wait_read()
            yield reader


async def test_what_is_there_and_what_changes_is_shown_and_told(etcd: EtcdCluster, keys: Keys) -> None:
    a, b = keys.member("a"), keys.member("b")
    await etcd.put(a, b"1")
    async with a_reader(etcd.endpoints, keys) as reader:
        assert reader.holds() == {a: b"1"}
        revision = await etcd.put(b, b"2")
        await until(lambda: reader.value(b) == b"2")
        assert reader.mirror.revision >= revision
        await etcd.delete(a)
        await until(lambda: reader.holds() == {b: b"2"})
        assert [set(changed) for changed in reader.told if changed] == [{a}, {b}, {a}]


async def test_news_come_within_the_time_of_a_call(etcd: EtcdCluster, keys: Keys) -> None:
    key = keys.member("a")
    async with a_reader(etcd.endpoints, keys) as reader:
        assert await _news(etcd, key, reader) < REREAD_INTERVAL / 2


async def _news(etcd: EtcdCluster, key: bytes, reader: Reader) -> float:
    """Return how long news take. By the watch they come at once; by reading at intervals each would take one."""
    took = []
    for n in range(19):
        await etcd.put(key, b"news %d" % n)
        took.append(await until(lambda n=n: reader.value(key) == b"news %d" % n))  # type: ignore[misc]
    # Not the slowest: the machine may have been busy with something else.
    return statistics.median(took)


async def test_a_read_shows_what_the_watch_was_too_far_behind_to_tell(own_etcd: EtcdCluster, keys: Keys) -> None:
    a, b = keys.member("a"), keys.member("b")
    await own_etcd.put(a, b"1")
    async with TcpProxy("127.0.0.1", own_etcd.members[0].port) as proxy, a_reader([proxy.endpoint], keys) as reader:
        proxy.refuse()
        await own_etcd.delete(a)
        await own_etcd.compact(await own_etcd.put(b, b"2"))
        proxy.heal()
        await until(lambda: reader.holds() == {b: b"2"})
        assert {a, b} <= {key for changed in reader.told for key in changed}
        await own_etcd.put(a, b"3")
        await until(lambda: reader.value(a) == b"3")


async def test_the_copy_says_how_old_it_may_be(etcd: EtcdCluster, keys: Keys) -> None:
    clock = SystemClock()
    async with TcpProxy("127.0.0.1", etcd.members[0].port) as proxy, a_reader([proxy.endpoint], keys) as reader:
        first = reader.mirror.read_at
        assert first is not None
        await until(lambda: (reader.mirror.read_at or 0) > first + REREAD_INTERVAL)
        proxy.cut()
        cut = clock.elapsed()
        await until(lambda: clock.elapsed() > cut + 3 * bounds.SECOND)
        assert reader.mirror.read_at is not None
        assert reader.mirror.read_at <= cut
        proxy.heal()
        await until(lambda: (reader.mirror.read_at or 0) > cut)


async def test_the_copy_is_current_again_when_etcd_comes_back(own_etcd: EtcdCluster, keys: Keys) -> None:
    key = keys.member("a")
    async with a_reader(own_etcd.endpoints, keys) as reader:
        await own_etcd.put(key, b"before")
        await until(lambda: reader.value(key) == b"before")
        own_etcd.kill()
        await own_etcd.start()
        await own_etcd.put(key, b"after")
        await until(lambda: reader.value(key) == b"after", 5 * bounds.SECOND)
        assert reader.mirror.era == 0


async def test_an_etcd_that_was_set_back_begins_a_new_era(own_etcd: EtcdCluster, keys: Keys, tmp_path: Path) -> None:
    kept, lost = keys.member("kept"), keys.member("lost")
    await own_etcd.put(kept, b"1")
    own_etcd.stop()
    own_etcd.save(tmp_path / "copy")
    await own_etcd.start()
    async with a_reader(own_etcd.endpoints, keys) as reader:
        for n in range(20):
            await own_etcd.put(lost, b"%d" % n)
        await until(lambda: reader.value(lost) == b"19")
        seen = reader.mirror.revision
        own_etcd.stop()
        own_etcd.set_back(tmp_path / "copy")
        await own_etcd.start()
        await until(lambda: reader.mirror.era == 1)
        assert reader.holds() == {kept: b"1"}
        assert reader.mirror.revision < seen
        assert await _news(own_etcd, kept, reader) < REREAD_INTERVAL / 2
