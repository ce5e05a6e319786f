"""Faults of the Postgres that several nodes share, and one that has forgotten the latest terms."""

import os
import signal
from datetime import timedelta

import pytest
from faults.cluster import children_of
from faults.cluster_of_nodes import ClusterOfNodes
from faults.conftest import StartCluster
from faults.test_postgres import end_connections, postmaster_of
from services.etcd import EtcdCluster
from services.freezing import frozen
from services.postgres import SHARDS

from duecourse.model import bounds
from duecourse.server.storage.embedded import EmbeddedPostgres

_RETURNED = 30 * bounds.SECOND


async def _pids(cluster: ClusterOfNodes) -> list[int]:
    return [node.child.pid for node in cluster.nodes]


@pytest.mark.parametrize("how", ["restarted", "killed"])
async def test_a_postgres_that_is_restarted_under_several_nodes_costs_nothing_but_time(
    start_cluster: StartCluster, own_postgres: EmbeddedPostgres, how: str, is_long: bool
) -> None:
    cluster = await start_cluster(dsn=own_postgres.dsn)
    nodes = await _pids(cluster)
    cluster.start_worker("one")
    cluster.start_worker("two")
    async with cluster.load(), cluster.client() as client:
        for _ in range(5 if is_long else 1):
            await cluster.recovers("the start")
            if how == "restarted":
                await own_postgres.kill()
            else:
                os.kill(await postmaster_of(cluster), signal.SIGKILL)
            while own_postgres.is_running:
                await cluster.clock.sleep(bounds.MILLISECOND)
            await cluster.refuses(client, timedelta(seconds=20))
            # Longer than it takes the nodes to find themselves without their store.
            await cluster.clock.sleep(5 * bounds.SECOND)
            await own_postgres.start()
            await cluster.recovers(f"a Postgres that was {how}", _RETURNED)
            await cluster.until_led(*cluster.nodes)
    await cluster.settle()
    assert await _pids(cluster) == nodes
    assert all(node.child.is_running for node in cluster.nodes)


async def test_connections_read_only_and_frozen_backends_under_several_nodes_are_lived_through(
    start_cluster: StartCluster, own_postgres: EmbeddedPostgres, is_long: bool
) -> None:
    cluster = await start_cluster(dsn=own_postgres.dsn)
    cluster.start_worker("one")
    cluster.start_worker("two")
    async with cluster.load():
        await cluster.recovers("the start")
        await end_connections(cluster, 60 if is_long else 4, least=13)
        await cluster.recovers("ended connections", _RETURNED)
        async with cluster.client() as client:
            await _set_read_only(cluster, "on")
            await cluster.refuses(client, timedelta(seconds=20))
            await cluster.clock.sleep((60 if is_long else 4) * bounds.SECOND)
            await _set_read_only(cluster, "off")
        await cluster.recovers("a read-only Postgres", _RETURNED)
        postmaster = await postmaster_of(cluster)
        with frozen(postmaster, *children_of(postmaster)):
            await cluster.clock.sleep((60 if is_long else 8) * bounds.SECOND)
        await cluster.recovers("a frozen Postgres", _RETURNED)
        await cluster.until_led(*cluster.nodes)
    await cluster.settle()
    assert all(node.child.is_running for node in cluster.nodes)


async def _set_read_only(cluster: ClusterOfNodes, to: str) -> None:
    await cluster.store.execute(f"ALTER SYSTEM SET default_transaction_read_only = {to}")
    await cluster.store.execute("SELECT pg_reload_conf()")


async def test_a_postgres_that_has_forgotten_the_latest_terms_never_gets_an_epoch_twice(
    start_cluster: StartCluster, etcd: EtcdCluster, is_long: bool
) -> None:
    cluster = await start_cluster()
    cluster.start_worker("one")
    cluster.start_worker("two")
    async with cluster.load():
        for _ in range(10 if is_long else 1):
            await cluster.recovers("the start")
            await cluster.store.execute(
                "DROP TABLE IF EXISTS audit.older; CREATE TABLE audit.older AS TABLE duecourse.shard"
            )
            # Some raises that an asynchronous replica has not seen when it is promoted.
            victim = cluster.nodes[cluster.source.randrange(3)]
            victim.kill()
            await cluster.recovers(f"kill -9 of {victim.name}")
            await victim.start()
            await cluster.until_led(*cluster.nodes)
            seen = await cluster.epochs()
            # By the statement's own answer: nodes raise again within milliseconds.
            put_back = await cluster.store.fetch(
                "UPDATE duecourse.shard now SET epoch = older.epoch, holder = older.holder"
                " FROM audit.older older WHERE older.shard = now.shard AND older.epoch < now.epoch"
                " RETURNING now.shard, now.epoch",
                unseen=True,
            )
            fallen = [row["shard"] for row in put_back if row["epoch"] < seen[row["shard"]]]
            assert fallen, "nothing was forgotten"
            await cluster.recovers("forgotten terms", _RETURNED)
            await cluster.until_led(*cluster.nodes)
            after = await cluster.epochs()
            assert all(after[shard] > seen[shard] for shard in fallen)
    recorded = await cluster.settle()
    assert len(recorded.terms) > SHARDS
