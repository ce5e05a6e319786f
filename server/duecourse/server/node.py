"""A node: wires its rooms together, starts them in order and drains them in order. Nothing is decided here.

Start: the store is opened, for as long as it takes; then the loop and its lanes run, terms are taken, the API is
served; the node is ready once every shard that it should lead is led. End: SIGTERM or SIGINT turns readiness off,
refuses new work, tells the streams, lets what is in flight become durable, all within `drain`, and exits 0. A second
signal exits at once.
"""

import asyncio
import gc
import importlib.util
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Final, Never

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server import config, config_listing
from duecourse.server.config import Settings, StoreKind
from duecourse.server.core.shard import ShardOptions
from duecourse.server.core.task import Epoch
from duecourse.server.failpoints import Failpoints
from duecourse.server.leadership import Superseded
from duecourse.server.leadership.solo import Solo
from duecourse.server.maintenance import audit, retention
from duecourse.server.rpc import ClusterDescription, NodeDescription, ShardDescription, ShardStanding
from duecourse.server.rpc.calls import Calls
from duecourse.server.rpc.cluster_service import ClusterService
from duecourse.server.rpc.server import Server
from duecourse.server.rpc.task_service import TaskService
from duecourse.server.rpc.worker_service import WorkerService
from duecourse.server.shards.buckets import Horizon
from duecourse.server.shards.commands import NodeCommands, resolve
from duecourse.server.shards.lanes import CommitLane, CommitLanes
from duecourse.server.shards.loop import Loop
from duecourse.server.shards.reads import Reads
from duecourse.server.shards.terms import Terms
from duecourse.server.storage import ShardRow, StoreRefused, StoreUnavailable, TaskStore
from duecourse.server.streams.hub import Hub
from duecourse.server.telemetry import logs
from duecourse.server.telemetry.admin import AdminServer
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing import backoff
from duecourse.timing.clock import SystemClock

EXIT_FAILED: Final = 1
EXIT_STORE_REFUSED: Final = 3
EXIT_SUPERSEDED: Final = 4

_LIVE_WITHIN: Final[Micros] = 5 * bounds.SECOND
_STEP: Final[Micros] = 5 * bounds.MILLISECOND
_CLOSE_LIMIT: Final[Micros] = bounds.SECOND
# The collector looks at young objects rarely and at old ones hardly ever: tasks in memory are no garbage, and no part
# of the hot path makes cycles.
_COLLECT_AFTER: Final = (100_000, 20, 100)

_log = logs.get("node")


def run(settings: Settings) -> int:
    """Run a node until it is told to end; returns the exit code."""
    logs.configure(settings.log_format, settings.log_level)
    gc.set_threshold(*_COLLECT_AFTER)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run(settings))


async def _run(settings: Settings) -> int:
    _log.info("node_starting", **config_listing.redacted(settings))
    clock = SystemClock()
    code = 0
    try:
        store = await _open_store(settings, clock)
        node = Node(settings, store, await store.shards(), clock)
        await node.run()
    except* StoreRefused as refused:
        _log.error("store_refused", detail=_message(refused))
        code = EXIT_STORE_REFUSED
    except* Superseded as superseded:
        _log.error("node_superseded", detail=_message(superseded))
        code = EXIT_SUPERSEDED
    except* OSError as error:
        _log.error("node_failed", detail=_message(error))
        code = EXIT_FAILED
    _log.info("node_ended", code=code)
    return code


class _Ended(Exception):
    """The node was told to end, and has drained."""


class Node:
    """All rooms of one node, wired."""

    def __init__(self, settings: Settings, store: TaskStore, rows: Sequence[ShardRow], clock: SystemClock) -> None:
        version = metadata.version("duecourse")
        self._settings = settings
        self._store = store
        self._rows = rows
        self._clock = clock
        self._version = version
        self._address = settings.api_listen
        self._is_draining = False
        self._metrics = metrics = Metrics(node_id=settings.node_id, version=version)
        failpoints = Failpoints(settings.failpoints)
        self._loop = loop = Loop(clock, len(rows), settings.lease, metrics, failpoints)
        self._leadership = Solo()
        options = ShardOptions(settings.node_id, settings.lease, settings.heartbeat)
        self._terms = terms = Terms(store, loop, self._leadership, options, settings.horizon, metrics)
        self._lanes = lanes = CommitLanes(
            [CommitLane(store, loop, terms, metrics, failpoints) for _ in range(settings.commit_lanes)]
        )
        terms.connect(lanes)
        self._reads = Reads(store, loop, metrics)
        self._horizon = Horizon(store, loop, settings.horizon, options.head, metrics)
        self._commands = NodeCommands(loop, lanes, metrics, settings.max_pending_submissions)
        self._hub = Hub(
            loop,
            metrics,
            node_id=settings.node_id,
            heartbeat=settings.heartbeat,
            max_streams=settings.max_worker_streams,
        )
        loop.connect(self._hub, lanes, self._reads, resolve, terms.failed)
        calls = Calls(metrics)
        self._server = Server(
            calls,
            TaskService(self._commands, store, calls, metrics, shard_of=loop.shard_of, utc=loop.utc),
            WorkerService(self._hub, loop, calls),
            ClusterService(self.describe, calls),
            has_reflection=settings.reflection,
        )
        self._admin = AdminServer(metrics, is_live=self._is_live, why_not_ready=self._why_not_ready)
        metrics.samplers.append(self._sample)

    async def run(self) -> None:
        """Run until a signal has ended it. Raises Superseded, OSError."""
        host, port = config.host_and_port(self._settings.admin_listen)
        try:
            async with (
                self._admin.serving(host, port) as admin_port,
                _signals() as told_to_end,
                asyncio.TaskGroup() as group,
            ):
                self._start_rooms(group)
                group.create_task(self._serve(told_to_end, admin_port), name="serve")
        except* _Ended:
            pass
        finally:
            async with asyncio.timeout(_CLOSE_LIMIT / bounds.SECOND):
                await self._store.close()

    def _start_rooms(self, group: asyncio.TaskGroup) -> None:
        settings = self._settings
        rooms = {
            "loop": self._loop.run(),
            "reads": self._reads.run(),
            "terms": self._terms.run(),
            "leadership": self._leadership.run(self._terms, self._rows),
            "terms watch": self._terms.watch(settings.idle_check, self._hub),
            "horizon": self._horizon.run(),
            "retention": retention.run(self._store, self._loop, settings.retention),
            "audit": audit.run(self._store, self._loop),
            "stream heartbeats": self._beat(),
        }
        for name, room in rooms.items():
            group.create_task(room, name=name)
        for number, lane in enumerate(self._lanes.lanes):
            group.create_task(lane.run(), name=f"commit lane {number}")

    async def _serve(self, told_to_end: asyncio.Event, admin_port: int) -> Never:
        port = await self._server.start(self._settings.api_listen)
        self._address = self._settings.advertised_address(port)
        try:
            async with asyncio.TaskGroup() as group:
                ready = group.create_task(self._announce_ready(admin_port), name="announce ready")
                await told_to_end.wait()
                ready.cancel()
            await self._drain()
        finally:
            await self._server.stop(0)
        raise _Ended

    async def _announce_ready(self, admin_port: int) -> None:
        while self._why_not_ready() is not None:
            await self._clock.sleep(_STEP)
        gc.collect()
        gc.freeze()
        await self._server.set_serving(is_serving=True)
        _log.info("node_ready", address=self._address, admin_port=admin_port, shards=len(self._loop.shards))

    async def _drain(self) -> None:
        """Let what is in flight become durable, bounded; what waits for a worker waits in the store."""
        _log.info("node_draining")
        self._is_draining = self._commands.is_draining = True
        until = self._clock.elapsed() + self._settings.drain
        await self._server.set_serving(is_serving=False)
        self._loop.is_granting = False
        self._hub.drain()
        while not self._lanes.is_idle and self._clock.elapsed() < until:
            await self._clock.sleep(_STEP)
        self._hub.close()
        await self._server.stop(max(_STEP, until - self._clock.elapsed()))

    async def _beat(self) -> Never:
        interval = min(self._settings.heartbeat // 4, bounds.LONGEST_SLEEP)
        while True:
            self._hub.tick(self._clock.elapsed())
            await self._clock.sleep(interval)

    def describe(self) -> ClusterDescription:
        """Describe the cluster as this node sees it."""
        node_id = self._settings.node_id
        shards = []
        for row in self._rows:
            place = (row.shard, row.slot_from, row.slot_until)
            led = self._loop.shards.get(row.shard)
            loading = self._terms.loading.get(row.shard)
            if led is not None:
                counts = (led.tasks_in_memory, len(led.leases))
                shards.append(ShardDescription(*place, ShardStanding.LED, node_id, led.fence.epoch, *counts))
            elif loading is not None:
                shards.append(ShardDescription(*place, ShardStanding.LOADING, node_id, loading, 0, 0))
            else:
                shards.append(ShardDescription(*place, ShardStanding.UNLED, "", Epoch(0), 0, 0))
        node = NodeDescription(node_id, self._address, self._version)
        return ClusterDescription(self._leadership.coordination, node_id, [node], shards, self._hub.streams)

    def _is_live(self) -> bool:
        return self._clock.elapsed() - self._loop.last_turn < _LIVE_WITHIN

    def _why_not_ready(self) -> str | None:
        if self._is_draining:
            return "draining"
        unled = len(self._rows) - len(self._loop.shards)
        if unled:
            return f"{unled} of {len(self._rows)} shards are not led yet"
        if self._lanes.is_refused:
            return "the store refuses writes"
        return None

    def _sample(self) -> None:
        metrics = self._metrics
        shards = self._loop.shards.values()
        metrics.tasks_in_memory = sum(shard.tasks_in_memory for shard in shards)
        metrics.leases = sum(len(shard.leases) for shard in shards)
        metrics.credits = self._loop.matcher.credits()
        metrics.ready_tasks, oldest = self._loop.ready()
        metrics.oldest_ready_age = oldest
        metrics.inbox_size = self._loop.inbox_size


async def _open_store(settings: Settings, clock: SystemClock) -> TaskStore:
    """Open the store, waiting for it as long as it takes. Raises StoreRefused."""
    store = _make_store(settings)
    waits = backoff.delays(100 * bounds.MILLISECOND, 2 * bounds.SECOND, random.Random())
    while True:
        try:
            await store.open()
        except StoreUnavailable as error:
            _log.warning("store_not_open", detail=str(error))
            await clock.sleep(next(waits))
            continue
        if not store.is_durable:
            _log.warning("store_not_durable", detail="tasks are lost when this process ends")
        return store


def _make_store(settings: Settings) -> TaskStore:
    match settings.store:
        case StoreKind.POSTGRES:
            from duecourse.server.storage.postgres import PostgresStore

            return PostgresStore(settings.read_postgres_dsn())
        case StoreKind.MEMORY:
            from duecourse.server.storage.memory import MemoryStore

            return MemoryStore(settings.shards)


@asynccontextmanager
async def _signals() -> AsyncIterator[asyncio.Event]:
    """Yield an event that the first signal sets; a second signal ends the process as if nobody had asked for it."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def first() -> None:
        told.set()
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, first)
    try:
        yield told
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the faster event loop, if it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


def _message(errors: BaseExceptionGroup[BaseException]) -> str:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)
