"""What a bench runs in: a cluster, given or started for it, a client, and crews of worker processes.

A cluster of its own is new for every repeat, on a temporary folder, and leaves nothing behind.
"""

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from duecourse import client as sdk
from duecourse.cli.bench import usage
from duecourse.cli.bench.meter import Meter
from duecourse.cli.bench.records import TASK_TYPE, Phase, Records
from duecourse.cli.bench.sending import Sender
from duecourse.cli.launcher.children import Child, Nursery
from duecourse.cli.launcher.cluster import LocalCluster
from duecourse.cli.launcher.errors import LaunchError
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import SystemClock

_LOOK_EVERY: Final = 20 * bounds.MILLISECOND
_WORKER_LIMIT: Final = 30 * bounds.SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is measured, and with how much around it."""

    address: str | None = None
    """Of a running cluster; None: one is started."""
    store: str = "postgres"
    payload_bytes: int = 200
    workers: int = 1
    slots: int = 1_000
    batch: int = 100
    in_flight: int = 8
    nodes: int = 1
    coordination: str = "solo"


class Crew:
    """Worker processes that share the queues of one measurement."""

    def __init__(self, children: Sequence[Child], records: Sequence[Records]) -> None:
        self._children = children
        self._records = records

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [child.pid for child in self._children if child.is_running]

    @property
    def count(self) -> int:
        """How many handlers began."""
        return sum(records.count for records in self._records)

    @property
    def last_start(self) -> Micros:
        """When the latest one did."""
        return max(records.last_start for records in self._records)

    @property
    def ended_at(self) -> Micros:
        """When the last of them had ended."""
        return max(records.ended_at for records in self._records)

    def are_in(self, phase: Phase) -> bool:
        """Tell whether all of them have come to a phase."""
        return all(records.phase >= phase for records in self._records)

    def say(self, word: bytes) -> None:
        """Send all of them a line."""
        for child in self._children:
            child.stdin.write(word + b"\n")
            child.stdin.flush()

    def starts(self) -> Iterator[tuple[int, int, Micros]]:
        """Yield (index, attempt, at) of all starts so far."""
        for records in self._records:
            yield from records.starts()

    def what_ended(self) -> str | None:
        """Tell whether one has ended without having been asked to."""
        for child, records in zip(self._children, self._records, strict=True):
            if records.phase != Phase.ENDED and not child.is_running:
                return f"a worker {child.how_it_ended()}"
        return None

    def close(self) -> None:
        """End them at once and unmap their records."""
        for child in self._children:
            child.close()
        for records in self._records:
            records.close()


class Laboratory:
    """A cluster with everything around it."""

    def __init__(
        self, nursery: Nursery, folder: Path, client: sdk.Client, setup: Setup, local: LocalCluster | None, meter: Meter
    ) -> None:
        self.client = client
        self.setup = setup
        self.meter = meter
        self.clock = SystemClock()
        self._local = local
        self._nursery = nursery
        self._folder = folder
        self._crews: list[Crew] = []

    @property
    def solo(self) -> LocalCluster:
        """The cluster, if it is our own."""
        if self._local is None:
            raise LaunchError("this bench kills and measures its node: it cannot run against --address")
        return self._local

    def sender(self, name: str, first: int = 0) -> Sender:
        """Make a sender to a new queue."""
        return Sender(
            self.client,
            self.clock,
            task_type=TASK_TYPE,
            payload_bytes=self.setup.payload_bytes,
            name=name,
            first=first,
        )

    async def hire(self, queues: Sequence[str], capacity: int) -> Crew:
        """Start worker processes; they have imported everything and wait to be let in."""
        number = len(self._crews)
        children, records = [], []
        for member in range(self.setup.workers):
            path = self._folder / f"records-{number}-{member}"
            records.append(Records.create(path, capacity))
            address = self._local.address if self._local else self.setup.address
            command = [sys.executable, "-m", "duecourse.cli.bench.worker_process"]
            command += [str(address), str(self.setup.slots), str(path), *queues]
            log = self._folder / f"worker-{number}-{member}.log"
            children.append(self._nursery.spawn("worker", command, output=log, takes_input=True))
        crew = Crew(children, records)
        self._crews.append(crew)
        if not await self.until(lambda: crew.are_in(Phase.LOADED), _WORKER_LIMIT):
            raise LaunchError("the workers did not start")
        return crew

    async def let_in(self, crew: Crew) -> None:
        """Have a crew connect, and wait until the cluster says so."""
        before = await self._streams()
        crew.say(b"go")
        waited = 0
        while await self._streams() < before + len(crew.pids) * (len(self._local.nodes) if self._local else 1):
            self.check()
            if waited >= _WORKER_LIMIT:
                raise LaunchError("the workers did not connect")
            await self.clock.sleep(_LOOK_EVERY)
            waited += _LOOK_EVERY

    async def _streams(self) -> int:
        """Count the streams of workers, of all nodes if the cluster is our own."""
        cluster = await self.client.cluster()
        if self._local is None or len(self._local.nodes) == 1:
            return cluster.worker_streams
        return sum(node.worker_streams for node in cluster.nodes)

    async def dismiss(self, crew: Crew) -> None:
        """Have a crew disconnect once everything is recorded."""
        crew.say(b"stop")
        if not await self.until(lambda: crew.are_in(Phase.ENDED), _WORKER_LIMIT):
            raise LaunchError("the workers did not end")

    async def until(self, condition: Callable[[], bool], limit: Micros) -> bool:
        """Wait for a condition; False if the time was over first. Raises LaunchError when something has ended."""
        end = self.clock.elapsed() + limit
        while not condition():
            self.check()
            if self.clock.elapsed() >= end:
                return False
            await self.clock.sleep(_LOOK_EVERY)
        return True

    async def until_started(self, crew: Crew, count: int, limit: Micros, *, before: int = 0) -> bool:
        """Wait until so many handlers began, showing how many have beyond those of before."""

        def has_started() -> bool:
            self.meter.at(crew.count - before)
            return crew.count >= count

        return await self.until(has_started, limit)

    def check(self) -> None:
        """Raise LaunchError if the cluster or a worker has ended by itself."""
        reasons = [crew.what_ended() for crew in self._crews]
        if self._local is not None:
            reasons.append(self._local.what_ended())
        for reason in reasons:
            if reason is not None:
                raise LaunchError(f"{reason}{self._worker_logs()}")

    def cpu(self) -> dict[str, Micros]:
        """Return what everybody has used so far; empty if it cannot be known."""
        if self._local is None or not usage.is_known():
            return {}
        postgres, etcd = self._local.postgres_pid, self._local.etcd_pid
        spent = {
            "client": usage.cpu_micros(os.getpid()),
            "node": sum(usage.cpu_micros(node.process.pid) for node in self._local.nodes),
            "postgres": usage.tree_cpu_micros(postgres) if postgres is not None else 0,
            "workers": sum(usage.cpu_micros(pid) for crew in self._crews for pid in crew.pids),
        }
        return spent | ({} if etcd is None else {"etcd": usage.cpu_micros(etcd)})

    def close(self) -> None:
        """Let go of the crews."""
        for crew in self._crews:
            crew.close()

    def _worker_logs(self) -> str:
        logs = (path.read_text(errors="replace").strip() for path in sorted(self._folder.glob("worker-*.log")))
        return "".join(f"\n{log[-2_000:]}" for log in logs if log)


def spent(before: dict[str, Micros], after: dict[str, Micros], tasks: int) -> dict[str, float]:
    """Return the processor time a task between two readings, by who spent it."""
    return {who: (after[who] - before.get(who, 0)) / tasks for who in after} if tasks else {}


@asynccontextmanager
async def opened(setup: Setup, meter: Meter) -> AsyncIterator[Laboratory]:
    """Open a laboratory with what the setup asks for."""
    with (
        tempfile.TemporaryDirectory(prefix="duecourse-bench-", ignore_cleanup_errors=True) as name,
        Nursery() as nursery,
    ):
        folder = Path(name)
        if setup.address is not None:
            async with _inside(nursery, folder, setup, setup.address, None, meter) as laboratory:
                yield laboratory
            return
        local = LocalCluster(
            nursery,
            folder / "data",
            store=setup.store,
            settings={"drain": "1s", "log_format": "json"},
            nodes=setup.nodes,
            coordination=setup.coordination,
            logs=folder,
            tell=meter.phase,
        )
        async with local, _inside(nursery, folder, setup, local.address, local, meter) as laboratory:
            yield laboratory


@asynccontextmanager
async def _inside(
    nursery: Nursery, folder: Path, setup: Setup, address: str, local: LocalCluster | None, meter: Meter
) -> AsyncIterator[Laboratory]:
    async with sdk.Client(address.split(",")) as client:
        laboratory = Laboratory(nursery, folder, client, setup, local, meter)
        try:
            yield laboratory
        finally:
            laboratory.close()
