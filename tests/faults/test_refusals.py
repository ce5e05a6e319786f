"""Nodes that do not belong, or whose etcd is not the one that gave the terms: refused, with a word on what to do."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from faults.audit import Store
from faults.cluster import NodeProcess
from faults.cluster_of_nodes import ClusterOfNodes
from faults.conftest import StartCluster
from services.etcd import EtcdCluster
from services.ports import free_port
from services.postgres import SHARDS

from duecourse.model import bounds
from duecourse.server.node import EXIT_DUPLICATE_NODE, EXIT_FAILED, EXIT_IDENTITY_REFUSED, EXIT_STORE_REFUSED
from duecourse.server.storage.embedded import EmbeddedPostgres
from duecourse.server.storage.migrate import migrate

_EVENTS = {
    EXIT_IDENTITY_REFUSED: "cluster_refused",
    EXIT_DUPLICATE_NODE: "node_id_taken",
    EXIT_STORE_REFUSED: "store_refused",
    EXIT_FAILED: "node_failed",
}


async def _refused(node: NodeProcess, code: int, *words: str) -> None:
    """Start a node that must end by itself, with a word on why and what to do."""
    node.spawn()
    assert await node.ended() == code, node.end_of_log()
    detail = node.logged(_EVENTS[code])[-1]["detail"]
    assert all(word in detail for word in words), detail


async def test_what_belongs_to_another_cluster_is_refused_and_harms_nobody(
    start_cluster: StartCluster, postgres_server: EmbeddedPostgres
) -> None:
    cluster = await start_cluster(2)
    cluster.start_worker()
    stranger = cluster.add_node()
    own = dict(stranger.settings)
    async with cluster.load():
        await cluster.recovers("the start")
        # One database, another prefix.
        stranger.settings = {**own, "etcd_prefix": f"{cluster.etcd_prefix}-other"}
        await _refused(stranger, EXIT_IDENTITY_REFUSED, "etcd_prefix", "duecourse store rebind")
        # One prefix, a database of its own; of as many shards, and of others.
        for shards, word in ((SHARDS, "two clusters were pointed at one"), (SHARDS + 1, f"{SHARDS + 1} shards")):
            name = f"stranger_{cluster.source.getrandbits(32):08x}"
            await cluster.store.execute(f"CREATE DATABASE {name}")
            await migrate(postgres_server.dsn_of(name), shards)
            stranger.settings = {**own, "postgres_dsn": postgres_server.dsn_of(name)}
            await _refused(stranger, EXIT_IDENTITY_REFUSED, word)
            await cluster.store.execute(f"DROP DATABASE {name} WITH (FORCE)")
        # A name that is taken.
        stranger.settings = {**own, "node_id": "node-1"}
        await _refused(stranger, EXIT_DUPLICATE_NODE, "DUECOURSE_NODE_ID")
        # The same, and its address with it.
        theirs = f"127.0.0.1:{cluster.nodes[0].peer_port}"
        stranger.settings = {**own, "node_id": "node-1", "advertise_peer": theirs}
        await _refused(stranger, EXIT_FAILED, "another node named node-1 answers there")
        # An address at which nobody listens.
        stranger.settings = {**own, "advertise_peer": f"127.0.0.1:{free_port()}"}
        await _refused(stranger, EXIT_FAILED, "DUECOURSE_ADVERTISE_PEER")
        # An older schema than this version can use.
        name = f"older_{cluster.source.getrandbits(32):08x}"
        await cluster.store.execute(f"CREATE DATABASE {name}")
        older = Store(postgres_server.dsn_of(name))
        await migrate(older.dsn, SHARDS)
        await older.execute("UPDATE duecourse.schema SET version = version - 1")
        stranger.settings = {**own, "postgres_dsn": older.dsn}
        await _refused(stranger, EXIT_STORE_REFUSED, "duecourse store migrate")
        await cluster.store.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await cluster.recovers("strangers")
    await cluster.settle()
    assert all(node.child.is_running for node in cluster.nodes[:2])


async def test_an_etcd_that_was_restored_from_an_older_copy_is_refused_until_the_store_is_bound_to_it(
    start_cluster: StartCluster, own_etcd: EtcdCluster, tmp_path: Path
) -> None:
    cluster = await start_cluster(2, own_etcd=own_etcd)
    own_etcd.stop()
    own_etcd.save(tmp_path / "older")
    await own_etcd.start()
    await cluster.until_led(*cluster.nodes)
    cluster.start_worker()
    async with cluster.load():
        for node in cluster.nodes:
            # Raises that the copy knows nothing of.
            node.kill()
            await cluster.recovers(f"kill -9 of {node.name}")
            await node.start()
            await cluster.until_led(*cluster.nodes)
    highest = await cluster.epochs()
    for node in cluster.nodes:
        node.kill()
    own_etcd.kill()
    own_etcd.set_back(tmp_path / "older")
    await own_etcd.start()
    for node in cluster.nodes:
        await _refused(node, EXIT_IDENTITY_REFUSED, "restored from an older copy", "duecourse store rebind")
    await _rebind(cluster)
    for node in cluster.nodes:
        await node.start()
    await cluster.until_led(*cluster.nodes)
    await cluster.recovers("a rebinding")
    after = await cluster.epochs()
    assert all(after[shard] > epoch for shard, epoch in highest.items())
    await cluster.settle()


async def _rebind(cluster: ClusterOfNodes) -> None:
    """Do as an operator does, until those that were killed no longer count as alive."""
    settings = {name: cluster.node.settings[name] for name in ("postgres_dsn", "etcd_endpoints", "etcd_prefix")}
    environment = {**os.environ, **{f"DUECOURSE_{name.upper()}": value for name, value in settings.items()}}
    command = (sys.executable, "-m", "duecourse.cli.main", "store", "rebind")
    told = b""
    for _ in range(20):
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        told, _ = await process.communicate()
        if process.returncode == 0:
            return
        assert b"stop all nodes" in told, told
        await cluster.clock.sleep(bounds.SECOND)
    pytest.fail(f"it was not bound: {told.decode()}")
