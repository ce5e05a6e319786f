"""A node: a scheduler with the servers before it; starts them in order and drains them in order.

Start: the store is opened and etcd met (`opening`), for as long as it takes, and the cluster clock set by the store;
then the loop and its lanes run, the API is served, terms are taken; the node is ready once every shard that it should
lead is led. End: SIGTERM, SIGINT or DrainNode turns readiness off, hands the shards over to other nodes, refuses new
work, tells the streams, lets what is in flight become durable, all within `drain`, and exits 0. Before the node runs it
just ends. A second signal exits at once.
"""

import asyncio
import gc
import importlib.util
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib import metadata
from typing import Any, Final, Never, TypeVar

from google.protobuf.internal import api_implementation

from duecourse.model import addresses, bounds
from duecourse.model.instants import Micros
from duecourse.server import config_listing, opening
from duecourse.server.clock.cluster_clock import ClusterClock
from duecourse.server.config import CoordinationKind, Settings
from duecourse.server.etcd.errors import EtcdError
from duecourse.server.failpoints import Failpoints
from duecourse.server.leadership import DuplicateNode, Leadership, Member, Superseded, identity, vigil
from duecourse.server.leadership.clustered import Clustered
from duecourse.server.leadership.identity import IdentityRefused
from duecourse.server.leadership.solo import Solo
from duecourse.server.leadership.vigil import NotFound, Vigil
from duecourse.server.opening import Meeting
from duecourse.server.rpc import ClusterDescription, NodeDescription
from duecourse.server.rpc.server import Server, api_server, peer_server
from duecourse.server.rpc.surfaces import Behind, Surfaces
from duecourse.server.scheduler import Options, Scheduler
from duecourse.server.storage import ShardRow, StoreRefused, TaskStore
from duecourse.server.telemetry import logs
from duecourse.server.telemetry.admin import AdminServer
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing.clock import SystemClock

EXIT_FAILED: Final = 1
EXIT_STORE_REFUSED: Final = 3
EXIT_SUPERSEDED: Final = 4
EXIT_IDENTITY_REFUSED: Final = 5
EXIT_DUPLICATE_NODE: Final = 6

_LIVE_WITHIN: Final[Micros] = 5 * bounds.SECOND
_LOOK_INTERVAL: Final[Micros] = bounds.SECOND
_REACHED_WITHIN: Final[Micros] = 5 * bounds.SECOND
_NAMED_WITHIN: Final[Micros] = 20 * bounds.SECOND
"""A name may become known only a while after its node has started."""
_STEP: Final[Micros] = 5 * bounds.MILLISECOND
_KEPT_OF_DRAIN: Final = 5
"""Such a part of a drain's time is kept for what is in flight, should nobody take the shards over."""
_CLOSE_LIMIT: Final[Micros] = bounds.SECOND
# The collector looks at young objects rarely and at old ones hardly ever: tasks in memory are no garbage, and no part
# of the hot path makes cycles.
_COLLECT_AFTER: Final = (100_000, 20, 100)

_PARSER: Final = "upb"

_WhyNot = Callable[[str], Awaitable[NotFound | None]]
"""Tells why an address is none to name to others, if it is none."""

_Result = TypeVar("_Result")

_log = logs.get("node")


def run(settings: Settings) -> int:
    """Run a node until it is told to end; returns the exit code."""
    logs.configure(settings.log_format, settings.log_level)
    if api_implementation.Type() != _PARSER:
        # The one in Python can be made to recurse without bound by what a client sends, and is 50 times slower.
        _log.error(
            "parser_refused", detail="protobuf runs without its C parser: see PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
        )
        return EXIT_FAILED
    gc.set_threshold(*_COLLECT_AFTER)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run(settings))


async def _run(settings: Settings) -> int:
    _log.info("node_starting", **config_listing.redacted(settings))
    code = 0
    told_to_end = asyncio.Event()
    try:
        async with _signals(told_to_end), AsyncExitStack() as stack:
            node = await _unless(told_to_end, _make_node(settings, told_to_end, stack))
            if node is not None:
                await node.run()
    except* StoreRefused as refused:
        _log.error("store_refused", detail=_message(refused))
        code = EXIT_STORE_REFUSED
    except* IdentityRefused as refused:
        _log.error("cluster_refused", detail=_message(refused))
        code = EXIT_IDENTITY_REFUSED
    except* DuplicateNode as duplicate:
        _log.error("node_id_taken", detail=_message(duplicate))
        code = EXIT_DUPLICATE_NODE
    except* Superseded as superseded:
        _log.error("node_superseded", detail=_message(superseded))
        code = EXIT_SUPERSEDED
    except* OSError as error:
        _log.error("node_failed", detail=_message(error))
        code = EXIT_FAILED
    _log.info("node_ended", code=code)
    return code


async def _make_node(settings: Settings, told_to_end: asyncio.Event, stack: AsyncExitStack) -> "Node":
    """Open what a node needs, to be closed with the stack, and make it. Raises StoreRefused, IdentityRefused."""
    local = SystemClock(settings.wall_clock_error)
    store, rows = await opening.open_store(settings, local)
    stack.push_async_callback(_close, store)
    meeting = None
    if settings.coordination is CoordinationKind.ETCD:
        client = await stack.enter_async_context(opening.etcd_client(settings, local))
        meeting = await opening.meet(settings, client, store, local)
    else:
        identity.check_solo(rows)
    return Node(settings, store, rows, local, meeting, told_to_end)


async def _close(store: TaskStore) -> None:
    # A store that is frozen takes no leave; what is open then ends with the process.
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_LIMIT / bounds.SECOND):
            await store.close()


class _Ended(Exception):
    """The node was told to end, and has drained."""


class Node:
    """A scheduler, the servers before it, and the signals that end it."""

    def __init__(
        self,
        settings: Settings,
        store: TaskStore,
        rows: Sequence[ShardRow],
        local: SystemClock,
        meeting: Meeting | None,
        told_to_end: asyncio.Event,
    ) -> None:
        """`meeting` is where the other nodes are; None: this one is alone."""
        self._settings = settings
        self._meeting = meeting
        self._told_to_end = told_to_end
        self._version = metadata.version("duecourse")
        self._incarnation = os.urandom(8).hex()
        self._address = settings.api_listen
        self._peer_address = ""
        metrics = Metrics(node_id=settings.node_id, version=self._version)
        self._clock = clock = ClusterClock(store, local, settings.node_id, metrics, self._others_offsets)
        self._clustered: Clustered | None = None
        self._others: Sequence[Member] | None = None if meeting else ()
        """The other nodes when this one started; None: not known yet."""
        self._vigil: Vigil | None = None
        self._leadership = leadership = self._make_leadership(local)
        self._scheduler = scheduler = Scheduler(
            _options(settings), store, rows, leadership, clock, metrics, Failpoints(settings.failpoints)
        )
        behind = Behind(
            node_id=settings.node_id,
            commands=scheduler.commands,
            loop=scheduler.loop,
            hub=scheduler.hub,
            store=store,
            rows=rows,
            view=scheduler.view,
            metrics=metrics,
            describe=self._describe,
            drain=self._told_to_end.set,
        )
        self._surfaces = surfaces = Surfaces(behind, has_peers=meeting is not None)
        self._server = api_server(surfaces.api, has_reflection=settings.reflection)
        self._peer_server: Server | None = None if surfaces.peer is None else peer_server(surfaces.peer)
        self._admin = AdminServer(metrics, is_live=self._is_live, why_not_ready=self._why_not_ready, notes=clock.alarms)

    async def run(self) -> None:
        """Run until it was told to end, and has drained. Raises Superseded, DuplicateNode, OSError."""
        host, port = addresses.host_and_port(self._settings.admin_listen)
        try:
            async with self._admin.serving(host, port) as admin_port, asyncio.TaskGroup() as group:
                group.create_task(self._clock.run(), name="clock")
                group.create_task(self._serve(admin_port, group), name="serve")
        except* _Ended:
            pass

    def _make_leadership(self, local: SystemClock) -> Leadership:
        meeting, settings = self._meeting, self._settings
        if meeting is None:
            return Solo(self._member())
        self._clustered = clustered = Clustered(
            settings.node_id,
            meeting.cluster,
            client=meeting.client,
            clock=local,
            keys=meeting.keys,
            incarnation=self._incarnation,
            session=settings.session,
            settles=settings.placement_settles,
            is_refused=vigil.is_refused,
            wall_clock_offset=self._clock.wall_clock_offset,
        )
        self._vigil = Vigil(clustered.membership, meeting.client, local)
        clustered.subscribe(self._vigil.members_changed)
        return clustered

    async def _serve(self, admin_port: int, rooms: asyncio.TaskGroup) -> Never:
        await self._set_clock()
        try:
            await self._listen()
            self._scheduler.start(rooms)
            if self._vigil is not None:
                rooms.create_task(self._vigil.run(), name="vigil")
            async with asyncio.TaskGroup() as group:
                ready = group.create_task(self._announce_ready(admin_port), name="announce ready")
                await self._told_to_end.wait()
                ready.cancel()
            await self._drain()
        finally:
            await self._server.stop(0)
            if self._peer_server is not None:
                await self._peer_server.stop(0)
            await self._surfaces.close()
        raise _Ended

    async def _set_clock(self) -> None:
        """Wait until it is known what time it is: before, nothing may be due, or be written down with a time."""
        looks_at = self._clock.elapsed()
        while not self._clock.is_set:
            if self._told_to_end.is_set():
                raise _Ended
            if self._clustered is not None and self._clock.elapsed() >= looks_at:
                looks_at = self._clock.elapsed() + _LOOK_INTERVAL
                try:
                    self._others = await self._clustered.look()
                except EtcdError as error:
                    _log.warning("etcd_not_reached", reason=str(error))
            await self._clock.sleep(_STEP)

    async def _listen(self) -> None:
        """Serve clients, workers and the other nodes, and tell the others where."""
        port = await self._server.start(self._settings.api_listen)
        self._address = self._settings.advertised_address(port)
        if self._peer_server is not None:
            port = await self._peer_server.start(self._settings.peer_listen)
            self._peer_address = self._settings.advertised_peer_address(port)
            await self._check_address("advertise", self._address, vigil.why_unreachable)
            await self._check_address("advertise_peer", self._peer_address, self._why_no_peer_address)
        self._leadership.introduce(self._member())

    async def _check_address(self, setting: str, address: str, why_not: _WhyNot) -> None:
        """Refuse to name an address to others at which they surely do not find this node. Raises OSError."""
        began = self._clock.elapsed()
        told: NotFound | None = None
        while (fault := await why_not(address)) is not None:
            if self._told_to_end.is_set():
                raise _Ended
            if self._clock.elapsed() - began > (_NAMED_WITHIN if fault.is_name_unknown else _REACHED_WITHIN):
                raise OSError(
                    f"{setting}: {address} cannot be reached ({fault.why}); set DUECOURSE_{setting.upper()} to where"
                    " the others reach this node"
                )
            if fault != told:
                told = fault
                _log.info("address_not_reached", setting=setting, address=address, reason=fault.why)
            await self._clock.sleep(_LOOK_INTERVAL)

    async def _why_no_peer_address(self, address: str) -> NotFound | None:
        """Tell why an address surely leads the other nodes to nobody, or to another node."""
        fault = await vigil.why_unreachable(address)
        if fault is not None:
            return fault
        found = await self._surfaces.who_answers(address)
        if found is None or found.incarnation == self._incarnation:
            return None
        is_twin = found.node_id == self._settings.node_id
        return NotFound(f"{'another node named ' if is_twin else ''}{found.node_id} answers there")

    async def _announce_ready(self, admin_port: int) -> None:
        while self._why_not_ready() is not None:
            await self._clock.sleep(_STEP)
        gc.collect()
        gc.freeze()
        await self._server.set_serving(is_serving=True)
        _log.info("node_ready", address=self._address, admin_port=admin_port, shards=len(self._scheduler.loop.shards))

    async def _drain(self) -> None:
        _log.info("node_draining")
        until = self._clock.elapsed() + self._settings.drain
        await self._server.set_serving(is_serving=False)
        await self._scheduler.hand_over(until - self._settings.drain // _KEPT_OF_DRAIN)
        self._scheduler.begin_drain()
        await self._scheduler.finish_drain(until)
        await self._server.stop(max(_STEP, until - self._clock.elapsed()))

    def _member(self) -> Member:
        return Member(
            node_id=self._settings.node_id,
            address=self._address,
            peer_address=self._peer_address,
            version=self._version,
            wall_clock_offset=self._clock.wall_clock_offset(),
        )

    def _others_offsets(self) -> Sequence[Micros] | None:
        others = self._others
        if self._clock.is_set:
            others = [one for one in self._leadership.members() if one.node_id != self._settings.node_id]
        return None if others is None else [other.wall_clock_offset for other in others]

    def _describe(self) -> ClusterDescription:
        offset = self._clock.wall_clock_offset()
        return self._scheduler.describe(
            NodeDescription(
                self._settings.node_id,
                self._address,
                self._version,
                wall_clock_offset=offset,
                incarnation=self._incarnation,
            )
        )

    def _why_not_ready(self) -> str | None:
        return self._clock.why_not_set() or self._scheduler.why_not_ready()

    def _is_live(self) -> bool:
        return not self._clock.is_set or self._clock.elapsed() - self._scheduler.loop.last_turn < _LIVE_WITHIN


def _options(settings: Settings) -> Options:
    return Options(
        node_id=settings.node_id,
        lease=settings.lease,
        heartbeat=settings.heartbeat,
        horizon=settings.horizon,
        retention=settings.retention,
        idle_check=settings.idle_check,
        commit_lanes=settings.commit_lanes,
        max_pending_submissions=settings.max_pending_submissions,
        max_worker_streams=settings.max_worker_streams,
    )


async def _unless(told_to_end: asyncio.Event, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Do something, unless the node is told to end before it is done; None: it was."""

    async def cancel_when_told() -> None:
        await told_to_end.wait()
        working.cancel()

    async with asyncio.TaskGroup() as group:
        working = group.create_task(work, name="open")
        watcher = group.create_task(cancel_when_told(), name="told to end")
        working.add_done_callback(lambda _: watcher.cancel())
    return None if working.cancelled() else working.result()


@asynccontextmanager
async def _signals(told: asyncio.Event) -> AsyncIterator[None]:
    """Have the first signal set an event; a second signal ends the process as if nobody had asked for it."""
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
        yield
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
