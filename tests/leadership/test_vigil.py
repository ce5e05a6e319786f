"""A node that died is noticed by its closed connections; silence and refusals that prove nothing are let pass."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from services.etcd import EtcdCluster
from services.tcp_proxy import TcpProxy
from services.waiting import running, until

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.etcd import transaction
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Keys
from duecourse.server.etcd.mirror import Mirror
from duecourse.server.leadership import Member
from duecourse.server.leadership.membership import Membership, format_member
from duecourse.server.leadership.session import Session
from duecourse.server.leadership.vigil import Vigil, is_refused
from duecourse.timing.clock import SystemClock

SESSION = 12 * bounds.SECOND
"""Two thirds of it are always left, longer than AT_ONCE: what ends within that was revoked."""
AT_ONCE: Micros = 6 * bounds.SECOND

clock = SystemClock()


class Listener:
    """A peer address: somebody who accepts connections and says nothing."""

    def __init__(self) -> None:
        self.connections: list[asyncio.StreamWriter] = []
        self.closes_at_once = False
        self.accepted = 0
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    def close_connections(self) -> None:
        while self.connections:
            self.connections.pop().close()

    def die(self) -> None:
        assert self._server is not None
        self._server.close()
        self.close_connections()

    async def _serve(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.closes_at_once:
            writer.close()
        else:
            self.connections.append(writer)


class Present:
    """A node as far as membership goes."""

    def __init__(self, name: str, client: EtcdClient, keys: Keys) -> None:
        self.mirror = Mirror(client, clock, keys.coordination)
        self.session = Session(client, clock, SESSION)
        self.membership = Membership(
            name,
            client=client,
            clock=clock,
            keys=keys,
            mirror=self.mirror,
            session=self.session,
            ttl=SESSION,
            incarnation=os.urandom(8).hex(),
            is_refused=is_refused,
        )
        self.vigil = Vigil(self.membership, client, clock)
        self.mirror.subscribe(lambda _: self.vigil.members_changed())


@asynccontextmanager
async def present(name: str, etcd: EtcdCluster, keys: Keys, member: Member) -> AsyncIterator[Present]:
    async with EtcdClient(etcd.endpoints, clock) as client:
        node = Present(name, client, keys)
        async with running(node.mirror.run(), node.session.run(), node.vigil.run()):
            await node.membership.join(member)
            yield node


def member(name: str, peer_address: str) -> Member:
    return Member(node_id=name, address="", peer_address=peer_address, version="")


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    await listener.open()
    yield listener
    listener.die()


async def test_the_session_of_a_peer_that_died_is_revoked(etcd: EtcdCluster, keys: Keys, listener: Listener) -> None:
    async with (
        present("a", etcd, keys, member("a", "")) as a,
        present("b", etcd, keys, member("b", listener.address)) as b,
    ):
        lease = b.session.lease
        await until(lambda: listener.connections)
        listener.die()
        await until(lambda: all(other.lease != lease for other in a.membership.others()), AT_ONCE)
        # It was alive after all: it is back with another session.
        await until(lambda: a.membership.get("b"))


async def test_a_connection_that_closes_while_somebody_listens_proves_nothing(
    etcd: EtcdCluster, keys: Keys, listener: Listener
) -> None:
    async with (
        present("a", etcd, keys, member("a", "")),
        present("b", etcd, keys, member("b", listener.address)) as b,
    ):
        lease = b.session.lease
        await until(lambda: listener.connections)
        listener.close_connections()
        await until(lambda: listener.connections)
        assert b.session.lease == lease


async def test_who_accepts_and_closes_at_once_is_not_asked_without_a_pause(
    etcd: EtcdCluster, keys: Keys, listener: Listener
) -> None:
    listener.closes_at_once = True
    async with present("a", etcd, keys, member("a", "")), present("b", etcd, keys, member("b", listener.address)):
        await until(lambda: listener.accepted)
        # The waits are 25, 50, 100 and 200 ms at least.
        assert await until(lambda: listener.accepted >= 5) >= 300 * bounds.MILLISECOND


@pytest.mark.parametrize("address", ["nonsense", "a..b:1", "127.0.0.1:70000"])
async def test_an_address_that_means_nothing_proves_nothing(etcd: EtcdCluster, keys: Keys, address: str) -> None:
    assert not await is_refused(address)
    async with present("a", etcd, keys, member("a", "")) as a, present("b", etcd, keys, member("b", address)):
        await until(lambda: a.membership.get("b"))


async def test_a_cut_proves_nothing(etcd: EtcdCluster, keys: Keys, listener: Listener) -> None:
    async with TcpProxy("127.0.0.1", listener.port) as proxy:
        address = f"127.0.0.1:{proxy.port}"
        async with present("a", etcd, keys, member("a", "")), present("b", etcd, keys, member("b", address)) as b:
            lease = b.session.lease
            await until(lambda: listener.connections)
            proxy.cut()
            await clock.sleep(bounds.SECOND)
            assert b.session.lease == lease


async def test_an_address_that_never_answered_proves_nothing(etcd: EtcdCluster, keys: Keys, listener: Listener) -> None:
    address = listener.address
    listener.die()
    async with present("a", etcd, keys, member("a", "")), present("b", etcd, keys, member("b", address)) as b:
        lease = b.session.lease
        await clock.sleep(bounds.SECOND)
        assert b.session.lease == lease


async def test_a_peer_that_drains_ends_its_session_by_itself(etcd: EtcdCluster, keys: Keys, listener: Listener) -> None:
    leaving = member("b", listener.address)
    async with present("a", etcd, keys, member("a", "")) as a, present("b", etcd, keys, leaving) as b:
        lease = b.session.lease
        await until(lambda: listener.connections)
        b.membership.tell(replace(leaving, ineligible_reason="it drains"))
        await until(lambda: (seen := a.membership.get("b")) is not None and seen.ineligible_reason)
        listener.die()
        await clock.sleep(bounds.SECOND)
        assert b.session.lease == lease


async def test_a_node_takes_the_place_of_its_last_run_at_once_if_nobody_listens_there(
    etcd: EtcdCluster, keys: Keys, listener: Listener
) -> None:
    async with EtcdClient(etcd.endpoints, clock) as client:
        lease = (await client.grant(SESSION)).number
        left_behind = format_member(member("a", "127.0.0.1:9"), "an earlier start")
        await client.write([transaction.put(keys.member("a"), left_behind, lease)])
        before = clock.elapsed()
        async with present("a", etcd, keys, member("a", listener.address)) as a:
            assert clock.elapsed() - before < AT_ONCE
            await until(lambda: a.membership.get("a"))


async def test_only_a_name_all_of_whose_addresses_refuse_is_refused(listener: Listener) -> None:
    # It stands for two addresses on most machines, and at one of them somebody listens.
    assert not await is_refused(f"localhost:{listener.port}")
    port = listener.port
    listener.die()
    assert await is_refused(f"localhost:{port}")
    assert not await is_refused("no-such-host.invalid:7401")
