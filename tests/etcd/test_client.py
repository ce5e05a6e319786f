"""Calls to a real etcd: what is answered, refused, lost, and what is surely not applied."""

import asyncio
import socket

import pytest
from services.etcd import EtcdCluster
from services.tcp_proxy import Http2, TcpProxy

from duecourse.model import bounds
from duecourse.server.etcd import keys as key_space
from duecourse.server.etcd import transaction
from duecourse.server.etcd.client import EtcdClient, Server
from duecourse.server.etcd.endpoints import Endpoints
from duecourse.server.etcd.errors import (
    Compacted,
    EtcdError,
    EtcdRefused,
    EtcdUnavailable,
    EtcdUnknown,
    ForeignCluster,
    LeaseNotFound,
)
from duecourse.server.etcd.keys import Keys
from duecourse.timing.clock import SystemClock

NO_SUCH_LEASE = 4711


@pytest.fixture
def key(keys: Keys) -> bytes:
    return keys.member("key")


@pytest.fixture
def nowhere() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def test_a_transaction_goes_one_way_or_the_other(client: EtcdClient, key: bytes) -> None:
    steps = [transaction.absent(key)], [transaction.put(key, b"first")], [transaction.get(key)]
    first = await client.txn(*steps)
    assert first.succeeded
    second = await client.txn(*steps)
    assert not second.succeeded
    [kv] = second.found(0)
    assert (kv.value, kv.created, kv.modified) == (b"first", first.revision, first.revision)
    gone = await client.txn([transaction.modified(key, first.revision)], [transaction.delete(key)])
    assert gone.deleted(0) == 1
    assert await client.get(key) is None


async def test_answers_name_the_cluster_and_the_member(client: EtcdClient) -> None:
    server = await client.server()
    assert (server.members, server.is_inconsistent) == (1, False)
    assert (client.cluster_id, client.member_id) == (server.cluster_id, server.member_id)


@pytest.mark.parametrize(
    ("version", "members", "is_inconsistent"),
    [("3.5.1", 3, True), ("3.5.1", 1, False), ("3.5.2", 5, True), ("3.5.3", 3, False), ("3.4.23", 3, False)],
)
def test_versions_whose_members_may_disagree_are_known(version: str, members: int, is_inconsistent: bool) -> None:
    server = Server(version=version, members=members, database_bytes=0, cluster_id=1, member_id=1)
    assert server.is_inconsistent is is_inconsistent


async def test_more_steps_than_fit_into_a_transaction_are_divided(client: EtcdClient, keys: Keys) -> None:
    await client.write(transaction.put(keys.member(f"{n:04d}"), b"%d" % n) for n in range(1_100))
    # The first page holds a thousand; what is written in between does not show.
    reading = await client.read(keys.coordination, key_space.end_of(keys.coordination))
    assert [kv.value for kv in reading.found] == [b"%d" % n for n in range(1_100)]
    assert {kv.modified <= reading.revision for kv in reading.found} == {True}


async def test_steps_larger_than_a_request_may_be_are_divided(client: EtcdClient, keys: Keys) -> None:
    large = bytes(400_000)
    await client.write(transaction.put(keys.member(str(n)), large) for n in range(8))
    reading = await client.read(keys.coordination, key_space.end_of(keys.coordination))
    assert len(reading.found) == 8


async def test_what_etcd_refuses_is_told_apart(client: EtcdClient, etcd: EtcdCluster, key: bytes) -> None:
    with pytest.raises(EtcdRefused, match="too large") as refused:
        await client.txn([], [transaction.put(key, bytes(2_000_000))])
    assert refused.value.code == "INVALID_ARGUMENT"
    with pytest.raises(LeaseNotFound):
        await client.txn([], [transaction.put(key, b"", NO_SUCH_LEASE)])
    assert await client.get(key) is None
    assert await client.revoke(NO_SUCH_LEASE) is False


async def test_a_page_of_a_compacted_revision_is_not_taken_for_the_present(
    own_etcd: EtcdCluster, clock: SystemClock, keys: Keys
) -> None:
    async with EtcdClient(own_etcd.endpoints, clock) as client:
        await client.write(transaction.put(keys.member(f"{n:04d}"), b"") for n in range(1_100))

        async def forget() -> None:
            for _ in range(20):
                await own_etcd.compact(await own_etcd.put(b"other", b""))

        async def read() -> None:
            for _ in range(100):
                try:
                    reading = await client.read(keys.coordination, key_space.end_of(keys.coordination))
                except Compacted:
                    continue
                assert len(reading.found) == 1_100

        async with asyncio.TaskGroup() as group:
            group.create_task(forget())
            group.create_task(read())


async def test_a_lease_may_live_longer_than_asked_and_ends_with_its_keys(client: EtcdClient, key: bytes) -> None:
    lease = await client.grant(bounds.SECOND)
    assert lease.ttl >= bounds.SECOND
    await client.txn([], [transaction.put(key, b"", lease.number)])
    assert await client.revoke(lease.number) is True
    assert await client.get(key) is None


async def test_without_a_connection_a_write_is_surely_not_applied(clock: SystemClock, nowhere: str, key: bytes) -> None:
    async with EtcdClient([nowhere], clock) as client:
        start = clock.elapsed()
        with pytest.raises(EtcdUnavailable):
            await client.txn([], [transaction.put(key, b"")])
        assert clock.elapsed() - start < 2 * client.deadline


async def test_an_endpoint_that_refuses_is_left_for_the_next(
    etcd: EtcdCluster, clock: SystemClock, nowhere: str, key: bytes
) -> None:
    async with EtcdClient([nowhere, *etcd.endpoints], clock) as client:
        assert (await client.txn([], [transaction.put(key, b"")])).succeeded


async def test_a_write_whose_answer_was_lost_is_unknown_and_not_repeated(
    etcd: EtcdCluster, clock: SystemClock, key: bytes
) -> None:
    async with _proxy(etcd) as proxy, EtcdClient([proxy.endpoint, *etcd.endpoints], clock) as client:
        await client.get(key)
        proxy.lose_answer()
        with pytest.raises(EtcdUnknown):
            await client.txn([], [transaction.put(key, b"once")])
        assert proxy.faults["answer lost"] == 1
        kv = await client.get(key)
        assert kv is not None
        # Written once: it was created and last written at the same revision.
        assert (kv.value, kv.created) == (b"once", kv.modified)


async def test_a_counter_survives_the_loss_of_every_third_answer(
    etcd: EtcdCluster, clock: SystemClock, key: bytes
) -> None:
    """Re-read before trying again, and write only over what was read: then nothing is applied twice."""
    async with _proxy(etcd) as proxy, EtcdClient([proxy.endpoint], clock) as client:
        retries = client.retries()
        unknown = 0
        for goal in range(1, 31):
            if goal % 3 == 0:
                proxy.lose_answer(2)
            while True:
                try:
                    kv = await client.get(key)
                    at, count = (kv.modified, int(kv.value)) if kv else (0, 0)
                    if count == goal:
                        break
                    await client.txn([transaction.modified(key, at)], [transaction.put(key, b"%d" % (count + 1))])
                except EtcdError as error:
                    unknown += isinstance(error, EtcdUnknown)
                    await clock.sleep(next(retries) // 10)
        assert unknown == proxy.faults["answer lost"] == 10
        assert await etcd.value(key) == b"30"


async def test_a_read_whose_answer_was_lost_is_repeated_at_the_next_endpoint(
    etcd: EtcdCluster, clock: SystemClock, key: bytes
) -> None:
    await etcd.put(key, b"value")
    async with _proxy(etcd) as proxy, EtcdClient([proxy.endpoint, *etcd.endpoints], clock) as client:
        await client.get(key)
        proxy.lose_answer()
        kv = await client.get(key)
        assert kv is not None
        assert proxy.faults["answer lost"] == 1


async def test_a_silent_connection_costs_one_deadline_and_is_replaced(
    etcd: EtcdCluster, clock: SystemClock, key: bytes
) -> None:
    async with _proxy(etcd) as proxy, EtcdClient([proxy.endpoint], clock) as client:
        await client.get(key)
        proxy.cut()
        start = clock.elapsed()
        with pytest.raises(EtcdUnknown):
            await client.txn([], [transaction.put(key, b"")])
        assert clock.elapsed() - start < 3 * client.deadline
        assert proxy.faults["cut"] > 0
        with pytest.raises(EtcdUnavailable):
            await client.txn([], [transaction.put(key, b"")])
        proxy.heal()
        await _answers(client, key)


async def test_a_frozen_member_is_left_within_a_deadline(
    etcd_of_three: EtcdCluster, clock: SystemClock, key: bytes
) -> None:
    async with EtcdClient(etcd_of_three.endpoints, clock) as client:
        await client.get(key)
        etcd_of_three.members[0].freeze()
        # Its peers may first have to elect a leader of their own.
        start = clock.elapsed()
        await _answers(client, key)
        assert clock.elapsed() - start < 6 * bounds.SECOND


async def test_endpoints_of_two_clusters_are_not_mixed_up(
    etcd: EtcdCluster, own_etcd: EtcdCluster, clock: SystemClock, nowhere: str, key: bytes
) -> None:
    async with _proxy(etcd) as proxy, EtcdClient([proxy.endpoint, *own_etcd.endpoints], clock) as client:
        await client.get(key)
        proxy.refuse()
        with pytest.raises(ForeignCluster, match="different clusters"):
            await _answers(client, key)
        proxy.heal()
        await _answers(client, key)


async def test_a_connection_that_was_left_serves_those_who_still_use_it(etcd: EtcdCluster) -> None:
    endpoints = Endpoints(etcd.endpoints)
    first = endpoints.connection()
    async with first:
        assert await first.ready()
        await endpoints.leave(first, silent=True)
        assert endpoints.connection() is not first
        assert await first.ready()
        # Somebody else who finds it wanting later must not make everybody move again.
        second = endpoints.connection()
        await endpoints.leave(first, silent=True)
        assert endpoints.connection() is second
    await endpoints.close()


async def test_etcd_may_be_away_for_a_while(own_etcd: EtcdCluster, clock: SystemClock, key: bytes) -> None:
    async with EtcdClient(own_etcd.endpoints, clock) as client:
        await client.txn([], [transaction.put(key, b"kept")])
        own_etcd.kill()
        with pytest.raises(EtcdError):
            await client.txn([], [transaction.put(key, b"lost")])
        with pytest.raises(EtcdUnavailable):
            await client.get(key)
        await own_etcd.start()
        assert await _answers(client, key) == b"kept"


async def _answers(client: EtcdClient, key: bytes) -> bytes:
    for wait in client.retries():
        try:
            kv = await client.get(key)
        except EtcdUnavailable:
            await SystemClock().sleep(wait)
        else:
            return kv.value if kv else b""
    raise AssertionError


def _proxy(etcd: EtcdCluster) -> TcpProxy:
    return TcpProxy("127.0.0.1", etcd.members[0].port, Http2)
