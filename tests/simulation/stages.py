"""Where a test of etcd may be played: at a real one in real time, or at the simulated one in virtual time."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine, MutableMapping
from pathlib import Path
from typing import Any, Final, Protocol

from services.etcd import EtcdCluster
from simulation import machine
from simulation.clock import MachineClock
from simulation.etcd import SimulatedEtcd
from simulation.keyspace import Keyspace
from simulation.loop import Process, SimulationLoop
from simulation.network import Network, Status

from duecourse.model import bounds
from duecourse.timing.clock import Clock, SystemClock

_PATIENCE: Final = 20 * bounds.SECOND
_STEP: Final = 10 * bounds.MILLISECOND


class Stage(Protocol):
    """An etcd of one member, and what an outsider may do to it."""

    clock: Clock
    endpoints: list[str]

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> int: ...
    async def delete(self, key: bytes) -> int: ...
    async def revoke(self, lease: int) -> None: ...
    async def compact(self, revision: int) -> None: ...
    async def start(self) -> None: ...
    async def kill(self) -> None: ...
    async def freeze(self) -> None: ...
    async def thaw(self) -> None: ...
    async def save(self) -> None: ...
    async def set_back(self) -> None: ...


Play = Callable[[Stage], Coroutine[Any, Any, None]]


async def until(stage: Stage, condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    deadline = stage.clock.elapsed() + _PATIENCE
    while not condition():
        assert stage.clock.elapsed() < deadline, "it did not happen in time"
        await stage.clock.sleep(_STEP)


def play_on_real(play: Play, folder: Path) -> None:
    """Start an etcd, and play."""

    async def main() -> None:
        async with EtcdCluster(folder / "etcd") as cluster:
            await play(_Real(cluster, folder / "copy"))

    asyncio.run(main())


def play_on_simulated(play: Play, folder: Path) -> None:
    """Make a simulated world of nothing but an etcd and a client, and play. `folder` is not needed."""
    loop = SimulationLoop(1)  # type: ignore[abstract]
    network = Network(loop, 1, Nobody())
    etcd = SimulatedEtcd(network, 1)
    etcd.start()

    def log(level: str, event: MutableMapping[str, Any]) -> None:
        pass

    with machine.replaced(network, 1, log, is_verbose=False):
        loop.run(play(_Simulated(etcd, MachineClock(loop))))
    assert not loop.failures


class _Real:
    def __init__(self, cluster: EtcdCluster, copy: Path) -> None:
        self.clock: Clock = SystemClock()
        self.endpoints = cluster.endpoints
        self.put, self.delete, self.revoke = cluster.put, cluster.delete, cluster.revoke
        self.compact, self.start = cluster.compact, cluster.start
        self._cluster = cluster
        self._copy = copy

    async def kill(self) -> None:
        self._cluster.kill()

    async def freeze(self) -> None:
        self._cluster.members[0].freeze()

    async def thaw(self) -> None:
        self._cluster.members[0].thaw()

    async def save(self) -> None:
        self._cluster.kill()
        self._cluster.save(self._copy)
        await self._cluster.start()

    async def set_back(self) -> None:
        self._cluster.kill()
        self._cluster.set_back(self._copy)
        shutil.rmtree(self._copy)
        await self._cluster.start()


class _Simulated:
    def __init__(self, etcd: SimulatedEtcd, clock: Clock) -> None:
        self.clock = clock
        self.endpoints = etcd.endpoints
        self._etcd = etcd
        self._copy: Keyspace | None = None

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        return self._etcd.put(key, value, lease)

    async def delete(self, key: bytes) -> int:
        return self._etcd.delete(key)

    async def revoke(self, lease: int) -> None:
        self._etcd.revoke(lease)

    async def compact(self, revision: int) -> None:
        self._etcd.keyspace.compact(revision)

    async def start(self) -> None:
        self._etcd.start()

    async def kill(self) -> None:
        self._etcd.kill()

    async def freeze(self) -> None:
        self._etcd.members[0].freeze()

    async def thaw(self) -> None:
        self._etcd.members[0].thaw()

    async def save(self) -> None:
        self._copy = self._etcd.save()

    async def set_back(self) -> None:
        assert self._copy is not None
        self._etcd.kill()
        self._etcd.set_back(self._copy)
        self._etcd.start()


class Nobody:
    """A watcher that looks away."""

    def client_says(self, client: Process, method: str, message: Any) -> None: ...
    def server_says(self, server: Process, client: Process, method: str, request: Any, message: Any) -> None: ...
    def server_refuses(self, server: Process, method: str, request: Any, status: Status, since: int) -> None: ...
