"""The simulated etcd behaves as a real one does: every test here is played on both, by our own client."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from services.coordinating import lost
from services.waiting import running
from simulation import stages
from simulation.stages import Play, Stage, until

from duecourse.etcd.v1 import kv_pb2
from duecourse.model import bounds
from duecourse.server.core.task import ShardId
from duecourse.server.etcd import keys as key_space
from duecourse.server.etcd import transaction
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.errors import (
    Compacted,
    EtcdError,
    EtcdRefused,
    EtcdUnavailable,
    EtcdUnknown,
    LeaseNotFound,
)
from duecourse.server.etcd.keepalive import KeepAlive
from duecourse.server.etcd.keys import Keys
from duecourse.server.etcd.mirror import Mirror
from duecourse.server.etcd.watch import Event, Watch
from duecourse.server.leadership.election import Elected, Election
from duecourse.server.leadership.session import Session
from duecourse.server.leadership.standings import Standings

KEYS = Keys("likeness")
A, B = KEYS.member("a"), KEYS.member("b")
SHARD = ShardId(3)
NO_SUCH_LEASE = 4711
PLAYERS: dict[str, Callable[[Play, Path], None]] = {
    "real": stages.play_on_real,
    "simulated": stages.play_on_simulated,
}

Test = Callable[[Callable[[Play, Path], None], Path], None]


def on_both(play: Play) -> Test:
    """Make a test that is played on either etcd."""

    @pytest.mark.parametrize("player", PLAYERS.values(), ids=PLAYERS.keys())
    def test(player: Callable[[Play, Path], None], tmp_path: Path) -> None:
        player(play, tmp_path)

    test.__name__ = play.__name__
    return test


def _client(stage: Stage) -> EtcdClient:
    return EtcdClient(stage.endpoints, stage.clock)


@on_both
async def test_a_transaction_compares_everything_that_a_key_has(stage: Stage) -> None:
    async with _client(stage) as client:
        assert not (await client.txn([transaction.holds(A, b"")], [])).succeeded
        lease = await client.grant(5 * bounds.SECOND)
        first = await client.txn(
            [transaction.absent(A), transaction.leased(A, 0)],
            [transaction.put(A, b"1", lease.number), transaction.put(B, b"2")],
        )
        assert first.succeeded
        again = await client.txn([transaction.absent(A)], [transaction.put(A, b"no")], [transaction.get(A)])
        assert not again.succeeded
        assert again.revision == first.revision
        [kv] = again.found(0)
        assert kv == transaction.KeyValue(A, b"1", first.revision, first.revision, lease.number)
        second = await client.txn(
            [transaction.created(A, first.revision), transaction.holds(A, b"1"), transaction.leased(A, lease.number)],
            [transaction.put(A, b"3"), transaction.get(A), transaction.delete(B), transaction.delete(B)],
        )
        assert second.revision == first.revision + 1
        assert second.found(1) == [transaction.KeyValue(A, b"3", first.revision, second.revision, 0)]
        assert (second.deleted(2), second.deleted(3)) == (1, 0)
        for compare in (
            kv_pb2.Compare(result=1, target=0, key=A, version=1),
            kv_pb2.Compare(result=2, target=2, key=A, mod_revision=second.revision + 1),
            kv_pb2.Compare(result=3, target=4, key=A, lease=lease.number),
        ):
            assert (await client.txn([compare], [])).succeeded
        # A key that comes again is a new one.
        assert await stage.delete(A) == 1
        assert await stage.delete(A) == 0
        revision = await stage.put(A, b"new")
        assert await client.get(A) == transaction.KeyValue(A, b"new", revision, revision, 0)


@on_both
async def test_what_is_refused_is_refused_for_the_same_reasons(stage: Stage) -> None:
    async with _client(stage) as client:
        many = [transaction.put(KEYS.member(f"{n:04d}"), b"") for n in range(transaction.MAX_OPERATIONS + 1)]
        with pytest.raises(EtcdRefused, match=r"INVALID_ARGUMENT.*too many operations"):
            await client.txn([], many)
        with pytest.raises(EtcdRefused, match=r"INVALID_ARGUMENT.*too large"):
            await client.txn([], [transaction.put(A, bytes(1_600_000))])
        with pytest.raises(EtcdRefused, match=r"INVALID_ARGUMENT.*duplicate key"):
            await client.txn([], [transaction.put(A, b""), transaction.put(A, b"")])
        with pytest.raises(LeaseNotFound):
            await client.txn([], [transaction.put(B, b""), transaction.put(A, b"", NO_SUCH_LEASE)])
        assert await client.revoke(NO_SUCH_LEASE) is False
        assert await client.get(B) is None
        await client.write(many[1:])


@on_both
async def test_a_long_range_is_read_as_of_one_revision_or_is_compacted(stage: Stage) -> None:
    async with _client(stage) as client:
        await client.write(transaction.put(KEYS.member(f"{n:04d}"), b"%d" % n) for n in range(1_100))
        start, end = KEYS.coordination, key_space.end_of(KEYS.coordination)
        reading = await client.read(start, end)
        assert [kv.value for kv in reading.found] == [b"%d" % n for n in range(1_100)]
        page = kv_pb2.RangeRequest(key=start, range_end=end, limit=3, revision=reading.revision)
        await stage.delete(KEYS.member("0001"))
        revision = await stage.put(KEYS.member("0000"), b"later")
        older = await client._range(page)
        assert older.more
        assert [kv.value for kv in older.kvs] == [b"0", b"1", b"2"]
        await stage.compact(revision)
        with pytest.raises(Compacted):
            await client._range(page)
        page.revision = revision + 1
        with pytest.raises(EtcdRefused, match="future"):
            await client._range(page)
        now = await client.read(start, end)
        assert [kv.value for kv in now.found[:2]] == [b"later", b"2"]


@on_both
async def test_a_lease_ends_its_keys_at_one_revision_when_it_is_revoked_or_expires(stage: Stage) -> None:
    async with _client(stage) as client:
        short = await client.grant(bounds.SECOND)
        assert short.ttl == 2 * bounds.SECOND
        other = await client.grant(60 * bounds.SECOND)
        await client.txn([], [transaction.put(A, b"", other.number), transaction.put(B, b"", short.number)])
        # It goes with the lease that it was last written with.
        moved = await client.txn([], [transaction.put(A, b"", short.number)])
        assert await client.revoke(other.number) is True
        assert await client.get(A) is not None
        granted_at = stage.clock.elapsed()
        gone: list[bool] = []
        while not gone:
            if await client.get(A) is None:
                gone.append(await client.get(B) is None)
            await stage.clock.sleep(50 * bounds.MILLISECOND)
        assert gone == [True]
        assert stage.clock.elapsed() - granted_at < 6 * bounds.SECOND
        # Both went at one revision, the next one.
        assert await stage.put(A, b"") == moved.revision + 2


@on_both
async def test_signs_of_life_keep_a_lease_until_somebody_revokes_it(stage: Stage) -> None:
    async with _client(stage) as client:
        lease = await client.grant(2 * bounds.SECOND)
        await client.txn([], [transaction.put(A, b"", lease.number)])
        heard: list[int] = []
        keep_alive = KeepAlive(client, stage.clock, lease, heard.append)
        async with running(keep_alive.run()):
            await stage.clock.sleep(bounds.SECOND)
            for _ in range(5):
                await stage.clock.sleep(bounds.SECOND)
            assert await client.get(A) is not None
        assert len(heard) > 5
        await stage.revoke(lease.number)
        with pytest.raises(LeaseNotFound):
            await keep_alive.run()


class _Watcher:
    def __init__(self, stage: Stage, client: EtcdClient) -> None:
        self.batches: list[Sequence[Event]] = []
        self.rereads = 0
        self._client = client
        self._range = (KEYS.coordination, key_space.end_of(KEYS.coordination))
        self.watch = Watch(client, stage.clock, *self._range, deliver=self.batches.append, reread=self._reread)

    @property
    def seen(self) -> list[tuple[bytes, bytes, bool]]:
        return [(event.kv.key, event.kv.value, event.is_deletion) for batch in self.batches for event in batch]

    async def _reread(self) -> int:
        reading = await self._client.read(*self._range)
        self.rereads += 1
        return reading.revision


@asynccontextmanager
async def _a_watcher(stage: Stage) -> AsyncIterator[_Watcher]:
    async with _client(stage) as client:
        watcher = _Watcher(stage, client)
        async with running(watcher.watch.run()):
            await until(stage, lambda: watcher.rereads)
            yield watcher


@on_both
async def test_a_watch_tells_what_changed_once_in_order_and_by_revision(stage: Stage) -> None:
    async with _a_watcher(stage) as watcher, _client(stage) as client:
        lease = await client.grant(60 * bounds.SECOND)
        both = await client.txn([], [transaction.put(A, b"1", lease.number), transaction.put(B, b"2", lease.number)])
        await stage.put(b"elsewhere", b"")
        await stage.put(A, b"3", lease.number)
        await client.revoke(lease.number)
        await until(stage, lambda: len(watcher.seen) == 5)
        assert watcher.seen[:3] == [(A, b"1", False), (B, b"2", False), (A, b"3", False)]
        assert sorted(watcher.seen[3:]) == [(A, b"", True), (B, b"", True)]
        events = [event for batch in watcher.batches for event in batch]
        assert [event.kv.modified - both.revision for event in events] == [0, 0, 2, 3, 3]
        # All of a revision come together.
        for batch in watcher.batches:
            assert {event.kv.modified for event in batch}.isdisjoint(
                event.kv.modified for other in watcher.batches if other is not batch for event in other
            )


@on_both
async def test_a_watch_misses_nothing_through_a_restart_and_re_reads_after_compaction(stage: Stage) -> None:
    async with _a_watcher(stage) as watcher:
        await stage.put(A, b"1")
        await until(stage, lambda: len(watcher.seen) == 1)
        await stage.kill()
        await stage.clock.sleep(500 * bounds.MILLISECOND)
        await stage.start()
        await stage.put(A, b"2")
        await until(stage, lambda: len(watcher.seen) == 2)
        assert watcher.rereads == 1
        await stage.kill()
        await stage.start()
        await stage.compact(await stage.put(A, b"3"))
        revision = await stage.put(A, b"4")
        await stage.compact(revision)
        await until(stage, lambda: watcher.rereads > 1 or len(watcher.seen) == 4)
        await stage.put(A, b"5")
        await until(stage, lambda: watcher.seen[-1] == (A, b"5", False))


@on_both
async def test_keys_and_leases_outlive_a_restart_and_leases_count_anew(stage: Stage) -> None:
    async with _client(stage) as client:
        lease = await client.grant(3 * bounds.SECOND)
        await client.txn([], [transaction.put(A, b"kept", lease.number)])
        await stage.clock.sleep(bounds.SECOND)
        await stage.clock.sleep(bounds.SECOND)
        await stage.kill()
        with pytest.raises(EtcdError):
            await client.txn([], [transaction.put(A, b"lost")])
        with pytest.raises(EtcdUnavailable):
            await client.get(A)
        await stage.start()
        value: list[bytes] = []
        await _until_answered(stage, client, value)
        assert value == [b"kept"]
        # It would have ended by now.
        await stage.clock.sleep(bounds.SECOND)
        assert await client.get(A) is not None


async def _until_answered(stage: Stage, client: EtcdClient, value: list[bytes]) -> None:
    while not value:
        try:
            kv = await client.get(A)
        except EtcdUnavailable:
            await stage.clock.sleep(100 * bounds.MILLISECOND)
        else:
            value.append(kv.value if kv else b"")


@on_both
async def test_a_frozen_member_answers_nothing_and_may_apply_later_what_it_was_sent(stage: Stage) -> None:
    async with _client(stage) as client:
        await stage.put(A, b"before")
        assert await client.get(A) is not None
        await stage.freeze()
        with pytest.raises(EtcdUnknown):
            await client.txn([], [transaction.put(A, b"after")])
        await stage.thaw()
        value: list[bytes] = []
        await _until_answered(stage, client, value)
        assert value in ([b"before"], [b"after"])


@on_both
async def test_an_older_copy_begins_a_new_era(stage: Stage) -> None:
    async with _client(stage) as client:
        mirror = Mirror(client, stage.clock, KEYS.coordination)
        await stage.put(A, b"old")
        async with running(mirror.run()):
            await mirror.wait_read()
            await stage.save()
            for n in range(20):
                await stage.put(B, b"%d" % n)
            await until(stage, lambda: mirror.get(B))
            await stage.set_back()
            await until(stage, lambda: mirror.era == 1)
            assert [kv.key for kv in mirror] == [A]
            await stage.put(B, b"anew")
            await until(stage, lambda: mirror.get(B))


class _Node:
    def __init__(self, stage: Stage, client: EtcdClient, name: str) -> None:
        self.elected: Elected | None = None
        self.lost = ""
        self.mirror = Mirror(client, stage.clock, KEYS.coordination)
        self.session = Session(client, stage.clock, 3 * bounds.SECOND)
        self.standings = Standings(client, stage.clock, self.mirror, self.session, KEYS)
        self.election = Election(
            SHARD,
            key_space.Candidate(node=name, address=name),
            client=client,
            clock=stage.clock,
            keys=KEYS,
            mirror=self.mirror,
            session=self.session,
            standings=self.standings,
        )

    async def campaign(self) -> None:
        while True:
            self.elected = await self.election.campaign()
            self.lost = await lost(self.standings, self.election, self.elected)
            self.elected = None


@asynccontextmanager
async def _a_node(stage: Stage, name: str) -> AsyncIterator[_Node]:
    async with _client(stage) as client:
        node = _Node(stage, client, name)
        async with (
            running(node.session.run()),
            running(node.mirror.run()),
            running(node.standings.run()),
            running(node.campaign()),
        ):
            yield node


@on_both
async def test_an_election_goes_on_when_a_key_is_deleted_or_a_lease_revoked(stage: Stage) -> None:
    async with _a_node(stage, "a") as a:
        await until(stage, lambda: a.elected)
        assert a.elected is not None
        async with _a_node(stage, "b") as b:
            await until(stage, lambda: len(a.standings.of(SHARD)) == 2)
            revision = a.elected.revision
            await stage.delete(a.elected.key)
            await until(stage, lambda: b.elected)
            assert b.elected is not None
            assert b.elected.revision > revision
            await until(stage, lambda: a.lost == "its key is gone")
            await until(stage, lambda: len(b.standings.of(SHARD)) == 2)
            await stage.revoke(b.elected.lease)
            await until(stage, lambda: a.elected)
            await until(stage, lambda: b.lost and len(a.standings.of(SHARD)) == 2)
            await stage.kill()
            await stage.start()
            await stage.delete(a.elected.key)
            await until(stage, lambda: b.elected)
