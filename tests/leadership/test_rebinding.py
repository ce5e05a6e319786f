"""A store that is given to another cluster, or to a solo node: never while there are nodes."""

import pytest
from services.clustering import SHARDS, a_cluster
from services.etcd import EtcdCluster
from services.waiting import until

from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Keys
from duecourse.server.leadership import rebinding
from duecourse.server.leadership.rebinding import NodesAlive
from duecourse.server.leadership.solo import COORDINATION
from duecourse.server.storage.memory import MemoryStore
from duecourse.timing.clock import SystemClock


async def test_a_store_is_given_away_only_when_its_nodes_are_gone(etcd: EtcdCluster, keys: Keys) -> None:
    store = MemoryStore(SHARDS)
    async with EtcdClient(etcd.endpoints, SystemClock()) as client:
        async with a_cluster(etcd.endpoints[0], keys, store) as cluster:
            a = await cluster.start("a")
            await until(lambda: cluster.leads_all(a))
            before = await store.shards()
            for give in (rebinding.to_cluster, rebinding.to_solo):
                with pytest.raises(NodesAlive, match="a may be alive: stop all nodes first"):
                    await give(client, keys, store)
            assert await store.shards() == before
            await a.stop()
        assert {row.coordination for row in await rebinding.to_solo(client, keys, store)} == {COORDINATION}
        cluster_id = (await rebinding.to_cluster(client, keys, store)).id
    assert {row.coordination for row in await store.shards()} == {cluster_id}


async def test_without_an_etcd_a_store_is_given_to_a_solo_node_unasked(keys: Keys) -> None:
    store = MemoryStore(SHARDS)
    assert {row.coordination for row in await rebinding.to_solo(None, keys, store)} == {COORDINATION}
