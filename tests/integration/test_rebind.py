"""`duecourse store rebind`: a store goes to a cluster, to another one, and back, with all nodes stopped."""

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from conformance import writes
from services.coordinating import a_node
from services.etcd import EtcdCluster
from services.ports import free_port
from services.postgres import SHARDS

from duecourse.cli.launcher.children import Nursery
from duecourse.cli.launcher.nodes import LocalNode
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Keys, parse_cluster
from duecourse.server.leadership import identity
from duecourse.server.leadership.identity import IdentityRefused
from duecourse.server.storage import Raised, RaiseRequest, ShardRow, fsck
from duecourse.server.storage.postgres import PostgresStore
from duecourse.timing.clock import SystemClock


class Store:
    """A store's database, that nobody has a session with unless it is `opened`."""

    def __init__(self, dsn: str, etcd: EtcdCluster) -> None:
        self.dsn = dsn
        self.prefix = f"test-{uuid.uuid4()}"
        self.keys = Keys(self.prefix)
        self.endpoints = ",".join(etcd.endpoints)

    async def lead(self, coordination: str, epoch: int | None = None) -> Raised:
        store = PostgresStore(self.dsn)
        await store.open()
        try:
            request = RaiseRequest(ShardId(0), b"holder", None if epoch is None else Epoch(epoch))
            raised = (await store.raise_epochs(coordination, [request], writes.NOW))[ShardId(0)]
            assert isinstance(raised, Raised), raised
            return raised
        finally:
            await store.close()

    async def rows(self) -> list[ShardRow]:
        store = PostgresStore(self.dsn)
        await store.open()
        try:
            return list(await store.shards())
        finally:
            await store.close()

    async def establish(self) -> str:
        """Do what a node does at its start."""
        store = PostgresStore(self.dsn)
        await store.open()
        try:
            async with EtcdClient(self.endpoints.split(","), SystemClock()) as client:
                return (await identity.establish(client, self.keys, store)).id
        finally:
            await store.close()

    async def rebind(self, *options: str, endpoints: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"DUECOURSE_POSTGRES_DSN": self.dsn, "DUECOURSE_ETCD_PREFIX": self.prefix}
        if endpoints is None or endpoints:
            environment["DUECOURSE_ETCD_ENDPOINTS"] = endpoints or self.endpoints
        command = [sys.executable, "-m", "duecourse.cli.main", "store", "rebind", *options]
        return await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, env=environment, timeout=60
        )


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    with Nursery() as one:
        yield one


@pytest_asyncio.fixture
async def store(postgres_dsn: str, etcd: EtcdCluster) -> AsyncIterator[Store]:
    yield Store(postgres_dsn, etcd)


async def test_a_solo_store_becomes_a_cluster_whose_epochs_lie_above(store: Store) -> None:
    await store.lead("solo", epoch=5_000_000_000)
    with pytest.raises(IdentityRefused, match="duecourse store rebind"):
        await store.establish()
    done = await store.rebind()
    assert done.returncode == 0, done.stderr
    rows = await store.rows()
    (cluster,) = {row.coordination for row in rows}
    assert done.stdout == f"{SHARDS} shards belong to cluster {cluster}: start nodes with coordination etcd\n"
    assert await store.establish() == cluster
    async with EtcdClient(store.endpoints.split(","), SystemClock()) as client:
        found = await client.get(store.keys.cluster)
    assert found is not None
    made = parse_cluster(found.value)
    assert made is not None
    assert identity.first_epoch(made, 1) > 5_000_000_000
    assert (await fsck.check(store.dsn)).is_sound


async def test_a_cluster_whose_etcd_was_lost_gets_another(store: Store) -> None:
    cluster = await store.establish()
    await store.lead(cluster, epoch=7)
    store.prefix = f"test-{uuid.uuid4()}"
    store.keys = Keys(store.prefix)
    with pytest.raises(IdentityRefused, match="knows of no cluster"):
        await store.establish()
    assert (await store.rebind()).returncode == 0
    assert await store.establish() != cluster


async def test_a_cluster_becomes_solo_and_its_tasks_go_on(store: Store) -> None:
    cluster = await store.establish()
    raised = await store.lead(cluster, epoch=7)
    done = await store.rebind("--to-solo")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{SHARDS} shards belong to a solo node: start one with coordination solo\n"
    assert (await store.lead("solo")).fence.epoch == raised.fence.epoch + 1
    with pytest.raises(IdentityRefused):
        await store.establish()


async def test_a_store_can_become_solo_without_an_etcd(store: Store) -> None:
    await store.lead(await store.establish(), epoch=7)
    assert (await store.rebind("--to-solo", endpoints="")).returncode == 0
    assert {row.coordination for row in await store.rows()} == {"solo"}


@pytest.mark.parametrize("option", [(), ("--to-solo",)])
async def test_nothing_is_done_while_a_node_lives(store: Store, option: tuple[str, ...]) -> None:
    before = await store.rows()
    async with a_node("node-7", store.endpoints.split(","), store.keys) as node:
        node.session.keep(store.keys.member("node-7"), b"{}")
        async with asyncio.timeout(20):
            while await node.client.get(store.keys.member("node-7")) is None:
                await node.clock.sleep(20_000)
        refused = await store.rebind(*option)
    assert refused.returncode == 1
    assert "node-7 may be alive: stop all nodes first" in refused.stderr
    assert await store.rows() == before


async def test_nothing_is_done_while_somebody_has_a_session_with_the_store(store: Store) -> None:
    solo = PostgresStore(store.dsn)
    await solo.open()
    await solo.shards()
    try:
        refused = await store.rebind()
    finally:
        await solo.close()
    assert refused.returncode == 1
    assert "nodes have sessions with the store, from 127.0.0.1" in refused.stderr
    assert {row.coordination for row in await store.rows()} == {""}


async def test_an_etcd_that_is_away_is_told_and_nothing_is_done(store: Store) -> None:
    ended = await store.rebind(endpoints="127.0.0.1:1")
    assert ended.returncode == 3
    assert "etcd does not answer" in ended.stderr
    assert {row.coordination for row in await store.rows()} == {""}


async def test_an_etcd_has_to_be_named(store: Store) -> None:
    ended = await store.rebind(endpoints="")
    assert ended.returncode == 2
    assert "DUECOURSE_ETCD_ENDPOINTS" in ended.stderr


async def test_nodes_refuse_what_does_not_agree_and_run_once_it_was_rebound(
    store: Store, nursery: Nursery, tmp_path: Path
) -> None:
    log = tmp_path / "node.log"
    node = LocalNode(nursery, SystemClock(), "node-1", free_port(), free_port(), log)
    solo = {"postgres_dsn": store.dsn, "coordination": "solo", "drain": "1s", "session": "2s"}
    clustered = solo | {
        "coordination": "etcd",
        "etcd_endpoints": store.endpoints,
        "etcd_prefix": store.prefix,
    }

    async def runs(settings: dict[str, str]) -> None:
        node.launch(settings)
        await node.ready()
        await node.stop()
        assert node.process.returncode == 0, log.read_text()

    async def is_refused(settings: dict[str, str], code: int) -> None:
        node.launch(settings)
        async with asyncio.timeout(60):
            assert await node.process.wait() == code, log.read_text()
        assert "duecourse store rebind" in log.read_text()
        log.write_text("")

    await runs(solo)
    await is_refused(clustered, 5)
    assert (await store.rebind()).returncode == 0
    await is_refused(solo, 5)
    await runs(clustered)
    assert (await store.rebind("--to-solo")).returncode == 0
    await runs(solo)
    assert (await fsck.check(store.dsn)).is_sound
