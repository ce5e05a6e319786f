"""Nodes of a cluster as processes: how they end when they are told to, and when they do not belong."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.etcd import EtcdCluster
from services.ports import free_port
from services.tcp_proxy import HOST, TcpProxy

from duecourse.model import bounds
from duecourse.model.addresses import host_and_port
from duecourse.model.instants import Micros
from duecourse.server import node as exits
from duecourse.timing.clock import SystemClock

NOWHERE = f"{HOST}:9"
START: Micros = 40 * bounds.SECOND
SOON: Micros = 10 * bounds.SECOND

clock = SystemClock()


class Process:
    """A node, and what it has logged so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []

    async def until_logged(self, event: str, limit: Micros = START) -> dict[str, Any]:
        """Wait for an event."""
        assert self.process.stderr is not None
        try:
            async with asyncio.timeout(limit / bounds.SECOND):
                while line := await self.process.stderr.readline():
                    self.events.append(json.loads(line))
                    if self.events[-1]["event"] == event:
                        return self.events[-1]
        except TimeoutError:
            raise AssertionError(f"no {event} in time: {self.events}") from None
        raise AssertionError(f"it ended without {event}: {self.events}")

    async def until_ended(self, limit: Micros = SOON) -> int:
        """Wait for its end, and return its exit code."""
        assert self.process.stderr is not None
        async with asyncio.timeout(limit / bounds.SECOND):
            while line := await self.process.stderr.readline():
                self.events.append(json.loads(line))
            return await self.process.wait()

    def tell(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)


@asynccontextmanager
async def a_process(name: str, dsn: str, endpoint: str, prefix: str, **settings: str) -> AsyncIterator[Process]:
    """Run a node; it is killed at the end of the scope."""
    given = {
        "node_id": name,
        "postgres_dsn": dsn,
        "coordination": "etcd",
        "etcd_endpoints": endpoint,
        "etcd_prefix": prefix,
        "session": "3s",
        "log_format": "json",
        **dict.fromkeys(("api_listen", "peer_listen", "admin_listen"), f"{HOST}:0"),
        **settings,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "duecourse.cli.main", "server"),
        env=os.environ | {f"DUECOURSE_{setting.upper()}": value for setting, value in given.items()},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_node_that_waits_for_etcd_ends_when_it_is_told(postgres_dsn: str) -> None:
    async with a_process("a", postgres_dsn, NOWHERE, "prefix") as node:
        await node.until_logged("cluster_not_known")
        node.tell()
        assert await node.until_ended() == 0


async def test_a_node_that_waits_for_its_store_ends_when_it_is_told() -> None:
    async with a_process("a", f"postgresql://nobody@{NOWHERE}/nothing", NOWHERE, "prefix") as node:
        await node.until_logged("store_not_open")
        node.tell()
        assert await node.until_ended() == 0


async def test_a_node_drains_within_bounds_though_etcd_is_silent(etcd: EtcdCluster, postgres_dsn: str) -> None:
    async with (
        TcpProxy(*host_and_port(etcd.endpoints[0])) as proxy,
        a_process("a", postgres_dsn, f"{HOST}:{proxy.port}", "drains") as node,
    ):
        await node.until_logged("node_ready")
        proxy.cut()
        node.tell()
        assert await node.until_ended() == 0


async def test_two_nodes_share_out_the_shards_and_one_hands_over_when_it_is_told(
    etcd: EtcdCluster, postgres_dsn: str
) -> None:
    async with a_process("a", postgres_dsn, etcd.endpoints[0], "pair") as a:
        await a.until_logged("node_ready")
        async with a_process("b", postgres_dsn, etcd.endpoints[0], "pair") as b:
            await b.until_logged("terms_begun")
            b.tell()
            assert await b.until_ended(START) == 0
            assert any(event["event"] == "shard_handed_over" and event["is_settled"] for event in b.events)
            assert not any(event["event"] == "term_ended" for event in b.events)
        await a.until_logged("terms_begun")


async def test_a_node_of_a_name_that_is_taken_ends_with_a_code_of_its_own(etcd: EtcdCluster, postgres_dsn: str) -> None:
    async with a_process("a", postgres_dsn, etcd.endpoints[0], "twins") as first:
        await first.until_logged("node_ready")
        async with a_process("a", postgres_dsn, etcd.endpoints[0], "twins") as second:
            await second.until_logged("node_id_taken")
            assert await second.until_ended() == exits.EXIT_DUPLICATE_NODE
        assert first.process.returncode is None


async def test_a_node_whose_etcd_knows_nothing_of_its_store_is_refused(etcd: EtcdCluster, postgres_dsn: str) -> None:
    async with a_process("a", postgres_dsn, etcd.endpoints[0], "one-prefix") as node:
        await node.until_logged("node_ready")
        node.tell()
        assert await node.until_ended() == 0
    async with a_process("a", postgres_dsn, etcd.endpoints[0], "another-prefix") as node:
        refused = await node.until_logged("cluster_refused")
        assert "store rebind" in refused["detail"]
        assert await node.until_ended() == exits.EXIT_IDENTITY_REFUSED


async def test_a_node_whose_advertised_address_leads_nowhere_is_refused(etcd: EtcdCluster, postgres_dsn: str) -> None:
    endpoint = etcd.endpoints[0]
    for setting, address in (("advertise_peer", NOWHERE), ("advertise", "no-such-host.invalid:7400")):
        async with a_process("a", postgres_dsn, endpoint, "astray", **{setting: address}) as node:
            failed = await node.until_logged("node_failed")
            assert f"{setting}: {address} cannot be reached" in failed["detail"]
            assert f"DUECOURSE_{setting.upper()}" in failed["detail"]
            assert await node.until_ended() == exits.EXIT_FAILED


async def test_a_node_that_advertises_another_nodes_address_to_its_peers_is_refused(
    etcd: EtcdCluster, postgres_dsn: str
) -> None:
    endpoint = etcd.endpoints[0]
    peers = f"{HOST}:{free_port()}"
    async with a_process("a", postgres_dsn, endpoint, "borrowed", peer_listen=peers) as first:
        await first.until_logged("node_ready")
        async with a_process("b", postgres_dsn, endpoint, "borrowed", advertise_peer=peers) as second:
            failed = await second.until_logged("node_failed")
            assert f"advertise_peer: {peers} cannot be reached (a answers there)" in failed["detail"]
            assert await second.until_ended() == exits.EXIT_FAILED
