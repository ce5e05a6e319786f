"""A simulated etcd of three members: what it does while some of them are away, as an etcd of three does."""

from collections.abc import Callable, Coroutine, MutableMapping
from typing import Any

import pytest
from services.waiting import running
from simulation import machine
from simulation.clock import MachineClock
from simulation.etcd import SimulatedEtcd
from simulation.loop import SimulationLoop
from simulation.network import Network
from simulation.stages import Nobody

from duecourse.model import bounds
from duecourse.server.etcd import transaction
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.errors import EtcdError, EtcdUnavailable
from duecourse.server.etcd.keys import Keys
from duecourse.server.etcd.mirror import Mirror

KEYS = Keys("members")
A = KEYS.member("a")


def _play(play: Callable[[SimulatedEtcd, MachineClock, EtcdClient], Coroutine[Any, Any, None]], seed: int = 1) -> None:
    loop = SimulationLoop(seed)  # type: ignore[abstract]
    network = Network(loop, seed, Nobody())
    etcd = SimulatedEtcd(network, seed, 3)
    clock = MachineClock(loop)
    etcd.start()

    async def main() -> None:
        async with EtcdClient(etcd.endpoints, clock) as client:
            await _answered(clock, client)
            await play(etcd, clock, client)

    def log(level: str, event: MutableMapping[str, Any]) -> None:
        pass

    with machine.replaced(network, seed, log, is_verbose=False):
        loop.run(main())
    assert not loop.failures


async def _answered(clock: MachineClock, client: EtcdClient) -> bytes:
    while True:
        try:
            kv = await client.get(A)
        except EtcdUnavailable:
            await clock.sleep(100 * bounds.MILLISECOND)
        else:
            return kv.value if kv else b""


@pytest.mark.parametrize("seed", range(3))
def test_a_leader_that_dies_is_followed_by_another_within_seconds_and_nothing_is_lost(seed: int) -> None:
    async def play(etcd: SimulatedEtcd, clock: MachineClock, client: EtcdClient) -> None:
        lease = await client.grant(4 * bounds.SECOND)
        await client.txn([], [transaction.put(A, b"kept", lease.number)])
        await clock.sleep(2 * bounds.SECOND)
        leader = etcd.leader
        assert leader is not None
        leader.kill()
        died_at = clock.elapsed()
        assert await _answered(clock, client) == b"kept"
        assert clock.elapsed() - died_at < 5 * bounds.SECOND
        # It counts anew.
        await clock.sleep(3 * bounds.SECOND)
        assert await client.get(A) is not None
        await clock.sleep(4 * bounds.SECOND)
        assert await client.get(A) is None

    _play(play, seed)


def test_without_a_majority_nothing_is_answered_until_it_is_back() -> None:
    async def play(etcd: SimulatedEtcd, clock: MachineClock, client: EtcdClient) -> None:
        for member in etcd.members[:2]:
            member.kill()
        with pytest.raises(EtcdError):
            await client.txn([], [transaction.put(A, b"perhaps")])
        with pytest.raises(EtcdUnavailable):
            await client.get(A)
        await clock.sleep(5 * bounds.SECOND)
        etcd.start()
        assert await _answered(clock, client) in (b"", b"perhaps")
        assert (await client.txn([], [transaction.put(A, b"surely")])).succeeded

    _play(play)


def test_a_mirror_leaves_a_member_that_is_frozen() -> None:
    async def play(etcd: SimulatedEtcd, clock: MachineClock, client: EtcdClient) -> None:
        mirror = Mirror(client, clock, KEYS.coordination)
        async with running(mirror.run()):
            await mirror.wait_read()
            etcd.members[0].freeze()
            await clock.sleep(3 * bounds.SECOND)
            etcd.put(A, b"changed")
            await clock.sleep(4 * bounds.SECOND)
            found = mirror.get(A)
            assert found is not None
            assert found.value == b"changed"

    _play(play)


def test_a_member_that_was_killed_holds_no_watches_any_more() -> None:
    async def play(etcd: SimulatedEtcd, clock: MachineClock, client: EtcdClient) -> None:
        mirror = Mirror(client, clock, KEYS.coordination)
        async with running(mirror.run()):
            await mirror.wait_read()
            await clock.sleep(bounds.SECOND)
            [before] = etcd.watches
            before.member.kill()
            assert not etcd.watches
            etcd.put(A, b"changed")
            await clock.sleep(10 * bounds.SECOND)
            [after] = etcd.watches
            assert after.member is not before.member

    _play(play)
