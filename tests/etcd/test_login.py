"""Etcds that want to know who is there, and show who they are."""

from pathlib import Path

import pytest
from services.coordinating import CoordinatingNode
from services.etcd import EtcdCluster
from services.waiting import running, until

from duecourse.server.etcd import transaction
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.endpoints import Tls, User
from duecourse.server.etcd.errors import EtcdError, EtcdRefused, EtcdUnavailable
from duecourse.server.etcd.keys import Keys
from duecourse.server.leadership.session import DEFAULT_TTL
from duecourse.timing.clock import SystemClock


async def demand_logins(etcd: EtcdCluster, password: str) -> None:
    for method, body in [
        ("auth/user/add", {"name": "root", "password": password}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/enable", {}),
    ]:
        await etcd.members[0].ask(method, body)


async def test_a_client_logs_in_and_again_when_its_login_was_forgotten(
    own_etcd: EtcdCluster, clock: SystemClock, keys: Keys, tmp_path: Path
) -> None:
    key = keys.member("key")
    password_file = tmp_path / "password"
    password_file.write_text("secret\n")
    await demand_logins(own_etcd, "secret")
    async with EtcdClient(own_etcd.endpoints, clock) as stranger:
        with pytest.raises(EtcdRefused):
            await stranger.get(key)
    async with EtcdClient(own_etcd.endpoints, clock, user=User(name="root", password_file=password_file)) as client:
        node = CoordinatingNode("a", client, keys, DEFAULT_TTL)
        node.session.keep(key, b"here")
        async with running(node.mirror.run(), node.session.run()):
            await until(lambda: node.mirror.get(key))
            # It keeps logins in memory.
            own_etcd.kill()
            await own_etcd.start()
            for wait in client.retries():
                try:
                    await client.txn([], [transaction.put(keys.member("other"), b"")])
                    break
                except EtcdError:
                    await clock.sleep(wait)
            await until(lambda: node.mirror.get(keys.member("other")))
            assert len(node.leases) == 1


async def test_a_wrong_password_is_refused(
    own_etcd: EtcdCluster, clock: SystemClock, keys: Keys, tmp_path: Path
) -> None:
    password_file = tmp_path / "password"
    password_file.write_text("wrong")
    await demand_logins(own_etcd, "secret")
    async with EtcdClient(own_etcd.endpoints, clock, user=User(name="root", password_file=password_file)) as client:
        with pytest.raises(EtcdRefused, match="authentication failed"):
            await client.get(keys.member("key"))
        password_file.write_text("secret")
        assert await client.get(keys.member("key")) is None


async def test_files_that_are_away_for_a_while_are_an_etcd_that_is_away(
    own_etcd: EtcdCluster, clock: SystemClock, keys: Keys, tmp_path: Path
) -> None:
    password_file = tmp_path / "password"
    await demand_logins(own_etcd, "secret")
    async with EtcdClient(own_etcd.endpoints, clock, user=User(name="root", password_file=password_file)) as client:
        with pytest.raises(EtcdUnavailable, match="password cannot be read"):
            await client.get(keys.member("key"))
        password_file.write_text("secret")
        assert await client.get(keys.member("key")) is None
    for tls in (Tls(ca=tmp_path / "ca"), Tls(certificate=tmp_path / "cert", key=tmp_path / "key")):
        async with EtcdClient(own_etcd.endpoints, clock, tls=tls) as client:
            with pytest.raises(EtcdUnavailable, match="cannot be read"):
                await client.get(keys.member("key"))


async def test_only_an_etcd_whose_certificate_is_trusted_is_spoken_to(
    clock: SystemClock, keys: Keys, tmp_path: Path
) -> None:
    async with EtcdCluster(tmp_path / "etcd", tls=True) as etcd:
        trusted = Tls(ca=etcd.members[0].certificate)
        async with EtcdClient(etcd.endpoints, clock, tls=trusted) as client:
            assert await client.get(keys.member("key")) is None
        for tls in (Tls(), None):
            async with EtcdClient(etcd.endpoints, clock, tls=tls) as client:
                with pytest.raises(EtcdUnavailable):
                    await client.get(keys.member("key"))
