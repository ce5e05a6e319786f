"""A cluster under test: real processes on a real store, three histories of what they do, and the verdict on them.

    async with Cluster(folder, dsn, nursery) as cluster:
        ...                       faults
        await cluster.settle()    heal first; waits until everything has ended, then checks store and histories

Nodes and workers are children of the test's nursery, so that nothing outlives it. Nodes have short leases; a node that
is started again listens on the same port.
"""

import asyncio
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Self

import grpc
from faults import checker, histories
from faults.audit import Store
from faults.recording_client import Ask, RecordingClient
from prometheus_client.parser import text_string_to_metric_families
from services.ports import free_port

from duecourse import client as sdk
from duecourse.cli.launcher.children import Child, Nursery
from duecourse.cli.launcher.ports import HOST, is_ready
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.storage import fsck
from duecourse.timing.clock import SystemClock

LEASE: Final = 4 * bounds.SECOND
HEARTBEAT: Final = bounds.SECOND
LISTEN: Final = bounds.SILENT_INTERVALS * HEARTBEAT + bounds.LISTEN_MARGIN
"""How long a new term listens for workers before it expires their leases."""
SETTLED: Final = 60 * bounds.SECOND

TESTS: Final = Path(__file__).resolve().parents[1]
_UNSETTLED: Final = """
    SELECT task_id, state, attempt_count, worker FROM duecourse.task
    WHERE state NOT IN ('succeeded', 'failed', 'cancelled') ORDER BY due_time LIMIT 5
"""
_POLL: Final = 10 * bounds.MILLISECOND
_ANSWER_LIMIT_SECONDS: Final = 5
_READY: Final = 60 * bounds.SECOND


class NodeProcess:
    """A scheduler node that can be killed and started again."""

    def __init__(self, nursery: Nursery, log: Path, settings: Mapping[str, str]) -> None:
        self._nursery = nursery
        self._clock = SystemClock()
        self._child: Child | None = None
        self.settings = dict(settings)
        """Of the next start."""
        self.known_as = ""
        """Where clients and workers that start later look for it, if not at its address."""
        self.log = log
        self.move()

    @property
    def name(self) -> str:
        """Its name."""
        return self.settings["node_id"]

    @property
    def address(self) -> str:
        """Where it is reached."""
        return self.known_as or self.settings.get("advertise", f"{HOST}:{self.port}")

    @property
    def child(self) -> Child:
        """Its process, the latest one."""
        assert self._child is not None
        return self._child

    def move(self) -> None:
        """Have it listen on other ports, from its next start on."""
        self.port, self.admin_port, self.peer_port = free_port(), free_port(), free_port()

    def spawn(self, *failpoints: str) -> Child:
        """Start the process, with failpoints armed."""
        settings = {
            "api_listen": f"{HOST}:{self.port}",
            "admin_listen": f"{HOST}:{self.admin_port}",
            "peer_listen": f"{HOST}:{self.peer_port}",
            "lease": f"{LEASE}us",
            "heartbeat": f"{HEARTBEAT}us",
            "short_times": "true",
            "log_format": "json",
            "failpoints": ",".join(failpoints),
            **self.settings,
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DUECOURSE_")}
        environment |= {f"DUECOURSE_{name.upper()}": value for name, value in settings.items()}
        command = [sys.executable, "-m", "duecourse.cli.main", "server"]
        self._child = self._nursery.spawn("node", command, environment=environment, output=self.log)
        return self._child

    async def start(self, *failpoints: str) -> Micros:
        """Start it and wait until it serves; returns how long that took."""
        child = self.spawn(*failpoints)
        began = self._clock.elapsed()
        while not await is_ready(self.admin_port):
            assert child.is_running, f"the node {child.how_it_ended()}: {self.end_of_log()}"
            assert self._clock.elapsed() - began < _READY, f"the node is not ready: {self.end_of_log()}"
            await self._clock.sleep(_POLL)
        return self._clock.elapsed() - began

    def kill(self) -> None:
        """End it as a crash does."""
        assert self.child.is_running, f"the node {self.child.how_it_ended()} by itself: {self.end_of_log()}"
        self.child.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        os.kill(self.child.pid, number)

    async def ended(self, limit: Micros = 30 * bounds.SECOND) -> int:
        """Wait until it has ended by itself, and return its exit code."""
        async with asyncio.timeout(limit / bounds.SECOND):
            return await self.child.wait()

    def end_of_log(self) -> str:
        """Return its last words."""
        return self.log.read_text(errors="replace")[-3_000:]

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return what it has logged by that name."""
        # Whatever else there is comes from gRPC, and the end of the last line may come while we read.
        text = self.log.read_text(errors="replace").rpartition("\n")[0]
        lines = (line for line in text.split("\n") if line.startswith("{"))
        return [line for line in map(json.loads, lines) if line["event"] == event]

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's values that have these labels."""
        async with asyncio.timeout(_ANSWER_LIMIT_SECONDS):
            reader, writer = await asyncio.open_connection(HOST, self.admin_port)
            writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
            _, _, text = (await reader.read()).decode().partition("\r\n\r\n")
            writer.close()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())

    def rss(self) -> int:
        """Return how many bytes of memory it has."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024


class Cluster:
    """See the module's docstring."""

    def __init__(
        self, folder: Path, dsn: str, nursery: Nursery, source: random.Random, settings: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.store = Store(dsn)
        self.clock = SystemClock()
        self.source = source
        self._nursery = nursery
        self._names = itertools.count(1)
        self._histories = folder / "histories"
        self._workers = histories.WorkersSoFar(self._histories)
        settings = dict(settings or {})
        self._failpoints = settings.pop("failpoints", "").split()
        self._settings = {"postgres_dsn": dsn, "store": "postgres", **settings}
        self.nodes: list[NodeProcess] = []
        self.node = self.add_node()

    async def __aenter__(self) -> Self:
        self._histories.mkdir(parents=True)
        await self.store.install()
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        # The nursery ends what still runs; a client of the node may outlive it.
        pass

    async def _start(self) -> None:
        await self.node.start(*self._failpoints)

    # Who takes part.

    def add_node(self) -> NodeProcess:
        """Have one more node, which is not started yet; workers that start later connect to it too."""
        name = f"node-{len(self.nodes) + 1}"
        node = NodeProcess(self._nursery, self.folder / f"{name}.log", {**self._settings, "node_id": name})
        self.nodes.append(node)
        return node

    def start_worker(
        self, name: str = "worker", *, slots: int = 50, queues: Sequence[str] = ("default",), slowness: int = 1
    ) -> Child:
        """Start a worker, that takes so many times as long as is asked; one of the same name is another incarnation."""
        file = self._histories / f"workers-{name}-{next(self._names)}.jsonl"
        addresses = ",".join(node.address for node in self.nodes)
        arguments = [addresses, str(file), name, ",".join(queues), str(slots), str(slowness)]
        command = [sys.executable, "-m", "faults.worker_process", *arguments]
        environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
        return self._nursery.spawn(name, command, environment=environment, output=self.folder / f"{name}.log")

    def client(self, timeout: timedelta = timedelta(seconds=60)) -> RecordingClient:
        """Make a client; it asks again for as long as the time-out allows."""
        others = [node.address for node in self.nodes if node is not self.node]
        return RecordingClient([self.node.address, *others], self._histories, f"{next(self._names)}", timeout)

    def ask_many(self, prefix: str, count: int, within: Micros, *, after: Micros = 0) -> list[Ask]:
        """Ask for tasks that are due at random times, `after` so long and within so long of that."""
        begin = self.clock.now().latest + after
        return [Ask(f"{prefix}-{index}", begin + self.source.randrange(within)) for index in range(count)]

    @asynccontextmanager
    async def load(self, *, batch: int = 20, pause: Micros = 100 * bounds.MILLISECOND) -> AsyncIterator[None]:
        """Have tasks submitted, some due at once, some in a while, for as long as this lasts."""
        over = asyncio.Event()

        async def submit(client: RecordingClient) -> None:
            for number in itertools.count():
                if over.is_set():
                    return
                await client.submit(*self.ask_many(f"load-{number}", batch, 2 * bounds.SECOND))
                await self.clock.sleep(pause)

        async with self.client(timedelta(seconds=10)) as client, asyncio.TaskGroup() as group:
            group.create_task(submit(client), name="load")
            try:
                yield
            finally:
                over.set()

    # What happened.

    def recorded(self) -> histories.Histories:
        """Read the histories as they are now; the store's comes with `settle`."""
        return histories.read(self._histories)

    def starts(self, task_id: str) -> list[histories.WorkerEvent]:
        """Return the starts of a task's handlers so far."""
        return self._workers.of(task_id, "start")

    def finishes(self, task_id: str) -> list[histories.WorkerEvent]:
        """Return the ends of a task's handlers so far."""
        return self._workers.of(task_id, "finish")

    async def until_started(self, *task_ids: str, attempt: int = 1, limit: Micros = SETTLED) -> Micros:
        """Wait until handlers of all of these tasks have started an attempt; returns how long that took."""
        began = self.clock.elapsed()
        while not all(any(one.attempt >= attempt for one in self.starts(task_id)) for task_id in task_ids):
            assert self.clock.elapsed() - began < limit, f"attempt {attempt} has not started: {self.node.end_of_log()}"
            await self.clock.sleep(_POLL)
        return self.clock.elapsed() - began

    async def refuses(self, client: RecordingClient, deadline: timedelta, times: int = 3) -> None:
        """Submit by bare calls until one is refused, and some more: nothing but OK and UNAVAILABLE is answered."""
        refused = 0
        for _ in range(1_000):
            code = await client.submit_once(Ask(f"bare-{next(self._names)}"), deadline)
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE), code
            refused += code is grpc.StatusCode.UNAVAILABLE
            if refused == times:
                return
        raise AssertionError("the fault did not fire: submissions are answered")

    async def recovers(self, name: str, limit: Micros = SETTLED) -> Micros:
        """Submit a probe and wait until its handler runs: how long firing takes to go on by itself."""
        began = self.clock.elapsed()
        async with self.client() as client:
            answers = await client.submit(*map(Ask, self._probes()))
        for answer in answers:
            assert isinstance(answer, sdk.SubmittedTask), answer
            await self.until_started(answer.task_id, limit=limit)
        took = self.clock.elapsed() - began
        print(f"recovered after {name}: {took // bounds.MILLISECOND} ms")
        return took

    def _probes(self) -> list[str]:
        """Return the ids of tasks that show that firing goes on."""
        return [f"probe-{next(self._names)}"]

    async def comes_to_rest(self, limit: Micros = SETTLED) -> None:
        """Wait until everything has ended."""
        assert self.node.child.is_running, f"the node {self.node.child.how_it_ended()}: {self.node.end_of_log()}"
        await self.store.until_none(_UNSETTLED, limit)

    async def settle(self, limit: Micros = SETTLED) -> histories.Histories:
        """Wait until everything has ended, check the store and what was recorded, and return that."""
        await self.comes_to_rest(limit)
        report = await fsck.check(self.store.dsn)
        assert report.is_sound, "\n".join(map(str, report.findings))
        await self.store.export(self._histories / "audit.jsonl")
        recorded = self.recorded()
        violations = checker.check(recorded, is_healed=True)
        assert not violations, "\n".join([f"histories in {self._histories}", *map(str, violations[:20])])
        return recorded


async def until_streams(node: NodeProcess, count: int, limit: Micros = SETTLED) -> Micros:
    """Wait until a node has so many workers' streams; returns how long that took."""
    clock = SystemClock()
    began = clock.elapsed()
    while (found := await node.metric("duecourse_worker_streams")) != count:
        assert clock.elapsed() - began < limit, f"{found:.0f} streams, not {count}"
        await clock.sleep(_POLL)
    return clock.elapsed() - began


def parent_of(pid: int) -> int:
    """Return who started a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> Iterator[int]:
    """Yield the processes that a process started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # It may end while it is looked at.
            with suppress(OSError):
                if parent_of(int(entry.name)) == pid:
                    yield int(entry.name)
