"""What etcd and the store say of a cluster: what makes one, and what is refused with which advice."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from services.clustering import SHARDS, a_cluster
from services.etcd import EtcdCluster
from services.waiting import until

from duecourse.model import bounds
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Cluster, Keys, format_cluster, parse_cluster
from duecourse.server.leadership import identity
from duecourse.server.leadership.identity import IdentityRefused, establish, rebind
from duecourse.server.storage import RaiseRequest
from duecourse.server.storage.memory import MemoryStore
from duecourse.timing.clock import SystemClock


@pytest.fixture
async def client(etcd: EtcdCluster) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(etcd.endpoints, SystemClock()) as client:
        yield client


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SHARDS)


async def lead(store: MemoryStore, cluster: Cluster, revision: int) -> None:
    """Raise a shard as a node would that was elected at a revision."""
    request = RaiseRequest(ShardId(0), b"holder", identity.first_epoch(cluster, revision))
    await store.raise_epochs(cluster.id, [request], 1)


async def test_nodes_that_start_together_make_one_cluster(client: EtcdClient, keys: Keys, store: MemoryStore) -> None:
    async with asyncio.TaskGroup() as group:
        starts = [group.create_task(establish(client, keys, store)) for _ in range(5)]
    found = {start.result() for start in starts}
    assert len(found) == 1
    (cluster,) = found
    assert cluster.shards == SHARDS
    assert {row.coordination for row in await store.shards()} == {cluster.id}
    assert await establish(client, keys, store) == cluster


async def test_a_creation_that_was_interrupted_is_finished(client: EtcdClient, keys: Keys, store: MemoryStore) -> None:
    await store.bind("of-the-rows")
    assert (await establish(client, keys, store)).id == "of-the-rows"


async def test_a_second_database_under_one_prefix_is_refused(
    client: EtcdClient, keys: Keys, store: MemoryStore
) -> None:
    await establish(client, keys, store)
    with pytest.raises(IdentityRefused, match="two clusters were pointed at one database or one etcd_prefix"):
        await establish(client, keys, MemoryStore(SHARDS))


async def test_a_second_prefix_for_one_database_is_refused(client: EtcdClient, keys: Keys, store: MemoryStore) -> None:
    cluster = await establish(client, keys, store)
    await lead(store, cluster, 1)
    with pytest.raises(IdentityRefused, match=r"etcd knows of no cluster under .*store rebind"):
        await establish(client, Keys("another-prefix"), store)


async def test_a_database_of_another_cluster_is_refused(client: EtcdClient, keys: Keys, store: MemoryStore) -> None:
    await establish(client, keys, store)
    await store.bind("another", is_forced=True)
    with pytest.raises(IdentityRefused, match="belongs to cluster another"):
        await establish(client, keys, store)


async def test_another_number_of_shards_is_refused(client: EtcdClient, keys: Keys, store: MemoryStore) -> None:
    cluster = await establish(client, keys, store)
    other = MemoryStore(SHARDS + 1)
    await other.bind(cluster.id)
    with pytest.raises(IdentityRefused, match=f"has {SHARDS + 1} shards, and the cluster was created with {SHARDS}"):
        await establish(client, keys, other)


async def test_a_store_that_a_solo_node_led_is_refused_until_it_is_rebound(
    client: EtcdClient, keys: Keys, store: MemoryStore
) -> None:
    await store.raise_epochs("solo", [RaiseRequest(ShardId(0), b"holder")], 1)
    with pytest.raises(IdentityRefused, match="belongs to a solo node"):
        await establish(client, keys, store)
    cluster = await rebind(client, keys, store)
    assert await establish(client, keys, store) == cluster


async def test_an_etcd_that_has_not_given_the_rows_epochs_is_refused(
    client: EtcdClient, keys: Keys, store: MemoryStore
) -> None:
    cluster = await establish(client, keys, store)
    _, revision = await client.read(b"a", b"b")
    await lead(store, cluster, revision)
    assert await establish(client, keys, store) == cluster
    await lead(store, cluster, revision + 1_000)
    with pytest.raises(IdentityRefused, match=r"restored from an older copy.*store rebind"):
        await establish(client, keys, store)


async def test_a_rebound_store_gets_epochs_above_all_earlier_ones(
    client: EtcdClient, keys: Keys, store: MemoryStore
) -> None:
    before = await establish(client, keys, store)
    await lead(store, before, 10**9)
    after = await rebind(client, keys, store)
    assert after.id != before.id
    assert await establish(client, keys, store) == after
    highest = max(row.epoch for row in await store.shards())
    assert identity.first_epoch(after, 1) > highest


async def test_a_store_that_has_forgotten_epochs_gets_higher_ones_when_it_is_rebound(
    client: EtcdClient, keys: Keys
) -> None:
    time = 1_800_000_000 * bounds.SECOND
    before = await rebind(client, keys, MemoryStore(SHARDS, lambda: time))
    _, revision = await client.read(b"a", b"b")
    forgotten = identity.first_epoch(before, revision + 500)
    time += bounds.SECOND
    # An older copy: none of what was given since is in its rows.
    after = await rebind(client, keys, MemoryStore(SHARDS, lambda: time))
    _, revision = await client.read(b"a", b"b")
    assert identity.first_epoch(after, revision) > forgotten


async def test_epochs_do_not_fall_when_a_cluster_is_rebound_after_its_store_and_the_clock_went_back(
    client: EtcdClient, keys: Keys
) -> None:
    times = iter((bounds.DAY, bounds.DAY - bounds.HOUR))
    before = await rebind(client, keys, MemoryStore(SHARDS, lambda: next(times)))
    after = await rebind(client, keys, MemoryStore(SHARDS, lambda: next(times)))
    assert after.epoch_base >= before.epoch_base


async def test_a_rebinding_that_was_interrupted_is_refused_until_it_is_done_again(
    client: EtcdClient, keys: Keys, store: MemoryStore
) -> None:
    await establish(client, keys, store)
    await store.bind("half-way", is_forced=True)
    with pytest.raises(IdentityRefused, match="store rebind"):
        await establish(client, keys, store)
    assert await rebind(client, keys, store) == await establish(client, keys, store)


async def test_a_key_that_holds_something_else_is_refused(
    client: EtcdClient, keys: Keys, store: MemoryStore, etcd: EtcdCluster
) -> None:
    await etcd.put(keys.cluster, b"mine")
    with pytest.raises(IdentityRefused, match="choose another prefix"):
        await establish(client, keys, store)


async def test_a_restored_etcd_under_running_nodes_is_said_and_leads_nothing(keys: Keys, own_etcd: EtcdCluster) -> None:
    """The rows are higher than what etcd gives from now on: the store refuses, whatever etcd says."""
    store = MemoryStore(SHARDS)
    async with a_cluster(own_etcd.endpoints[0], keys, store) as cluster:
        a = await cluster.start("a")
        await until(lambda: cluster.leads_all(a))
        # As if this etcd had given all these epochs, and had then fallen back.
        for shard in store._shards.values():
            shard.row = replace(shard.row, epoch=Epoch(shard.row.epoch << 20), holder=b"later")
        before = cluster.epochs()
        await until(lambda: not a.led)
        await until(lambda: all(not seat.is_elected for seat in a.leadership._seats.values()))
        assert cluster.epochs() == before
        assert not a.has_ended
        await until(lambda: "the store refuses" in (a.scheduler.why_not_ready() or ""))
        await a.stop()
        await rebind_of(own_etcd, keys, store)
        b = await cluster.start("b")
        await until(lambda: cluster.leads_all(b))


async def rebind_of(etcd: EtcdCluster, keys: Keys, store: MemoryStore) -> None:
    async with EtcdClient(etcd.endpoints, SystemClock()) as client:
        await rebind(client, keys, store)


def test_what_is_written_is_read_again() -> None:
    cluster = Cluster(id="x", shards=3, epoch_base=Epoch(7))
    assert parse_cluster(format_cluster(cluster)) == cluster
    assert parse_cluster(b"{}") is None
    assert parse_cluster(b"\xff") is None
