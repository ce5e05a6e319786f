"""A node on a simulated machine: the real code, all of it but its sockets and signals.

The same scheduler, leadership, clock and surfaces as in `duecourse.server.node`, started and drained in the same order.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Final, Never, TypeVar

from simulation.checker import Checker
from simulation.clock import MachineClock
from simulation.loop import Process
from simulation.network import Network
from simulation.plan import Setup
from simulation.store import SimulatedStore

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.clock.cluster_clock import ClusterClock
from duecourse.server.core.effects import Effects
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.errors import EtcdError
from duecourse.server.etcd.keys import Cluster, Keys
from duecourse.server.failpoints import Failpoints
from duecourse.server.leadership import DuplicateNode, Leadership, Member, Superseded, identity, vigil
from duecourse.server.leadership.clustered import Clustered
from duecourse.server.leadership.identity import IdentityRefused
from duecourse.server.leadership.solo import Solo
from duecourse.server.leadership.vigil import Vigil
from duecourse.server.maintenance import audit, retention
from duecourse.server.rpc import ClusterDescription, NodeDescription, registration
from duecourse.server.rpc.surfaces import Behind, Surface, Surfaces
from duecourse.server.scheduler import Options, Scheduler
from duecourse.server.shards.loop import Loop
from duecourse.server.storage import ShardRow, StoreUnavailable
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing import backoff

KEYS: Final = Keys("simulated")
_PORT: Final = 7400
_PEER_PORT: Final = 7401
_DRAIN: Final = 5 * bounds.SECOND
_STEP: Final = 5 * bounds.MILLISECOND
_IN_ORDER_EVERY: Final = 5 * bounds.SECOND
_Result = TypeVar("_Result")


class _Stopped(Exception):
    """The node was told to end, and has drained."""


def api_address(host: str) -> str:
    """Return where clients and workers reach the node of a machine."""
    return f"{host}:{_PORT}"


class Node:
    """The node of a machine, named like it. `etcd` are the endpoints where it meets others; none: it is alone."""

    def __init__(
        self,
        setup: Setup,
        address: str,
        process: Process,
        clock: MachineClock,
        store: SimulatedStore,
        network: Network,
        checker: Checker,
        etcd: Sequence[str],
    ) -> None:
        self.address = address
        self.process = process
        self.clock = clock
        """Of its machine."""
        self.has_ended = False
        self.is_refused = False
        """Whether etcd and the store did not agree on the cluster, and nobody has done anything about it yet."""
        self.scheduler: Scheduler | None = None
        self.metrics = Metrics(node_id=address)
        self.excused_misses = 0
        """How many of its audits' findings come from what the store had lost."""
        self._cluster_clock = ClusterClock(store, clock, address, self.metrics, self._others_offsets)
        self._setup = setup
        self._store = store
        self._network = network
        self._checker = checker
        self._etcd = etcd
        self._leadership: Leadership
        self._vigil: Vigil | None = None
        self._told_to_end = asyncio.Event()

    @property
    def is_up(self) -> bool:
        """Whether it runs now."""
        return not (self.has_ended or self.process.is_dead or self.process.is_paused)

    @property
    def is_gone(self) -> bool:
        """Whether it has ended or was killed; one that is paused is still there."""
        return self.has_ended or self.process.is_dead

    @property
    def is_draining(self) -> bool:
        """Whether it was told to end."""
        return self._told_to_end.is_set()

    def stop(self) -> None:
        """Tell it to drain and to end."""
        self._told_to_end.set()

    def credit_of(self, incarnation: str) -> int:
        """Return how much a worker's streams would take, as far as this node knows."""
        assert self.scheduler is not None, "it runs"
        streams = self.scheduler.loop.matcher._streams.values()
        return sum(stream.credit for stream in streams if stream.holder.incarnation == incarnation)

    async def run(self) -> None:
        """Run until it was told to end, or cannot go on."""
        coverage = self._checker.coverage
        try:
            async with AsyncExitStack() as stack:
                await self._run(stack)
        except* Superseded:
            self._checker.superseded(self.process)
            coverage["node superseded"] += 1
        except* DuplicateNode:
            coverage["node duplicate"] += 1
        except* IdentityRefused:
            self.is_refused = True
            coverage["node refused"] += 1
        except* _Stopped:
            coverage["node drained"] += 1
        except* Exception as errors:
            if not self.process.is_dead:
                self._checker.fail("S20", f"{self.process} failed: {errors.exceptions[0]!r}")
        finally:
            self.has_ended = True
            if not self.process.is_dead:
                self._network.gone(self.process, has_notice=True)

    async def _run(self, stack: AsyncExitStack) -> None:
        await self._until_answered(self._store.open)
        rows = await self._until_answered(self._store.shards)
        if self._etcd:
            client = await stack.enter_async_context(EtcdClient(self._etcd, self.clock))
            cluster = await self._until_answered(partial(identity.establish, client, KEYS, self._store))
            self._leadership = self._clustered(client, cluster)
        else:
            self._leadership = Solo(self._member())
        scheduler = self._scheduler(rows)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._cluster_clock.run(), name="clock")
            group.create_task(self._serve(scheduler, rows, group), name="serve")

    async def _until_answered(self, ask: Callable[[], Awaitable[_Result]]) -> _Result:
        waits = backoff.delays(100 * bounds.MILLISECOND, 2 * bounds.SECOND, random.Random())
        while True:
            try:
                return await ask()
            except (StoreUnavailable, EtcdError):
                if self._told_to_end.is_set():
                    raise _Stopped from None
                await self.clock.sleep(next(waits))

    def _clustered(self, client: EtcdClient, cluster: Cluster) -> Clustered:
        clustered = Clustered(
            self.address,
            cluster,
            client=client,
            clock=self.clock,
            keys=KEYS,
            incarnation=self.process.name,
            session=self._setup.session,
            is_refused=vigil.is_refused,
            wall_clock_offset=self._cluster_clock.wall_clock_offset,
        )
        self._vigil = Vigil(clustered.membership, client, self.clock)
        clustered.subscribe(self._vigil.members_changed)
        return clustered

    def _scheduler(self, rows: Sequence[ShardRow]) -> Scheduler:
        setup = self._setup
        options = Options(
            node_id=self.address,
            lease=setup.lease,
            heartbeat=setup.heartbeat,
            horizon=setup.horizon,
            head=setup.head,
            retention=setup.retention,
        )
        scheduler = Scheduler(
            options, self._store, rows, self._leadership, self._cluster_clock, self.metrics, Failpoints()
        )
        self._count_unmatched(scheduler.loop)
        return scheduler

    def _count_unmatched(self, loop: Loop) -> None:
        """Count grants that came to nothing: neither the store nor a worker learns of them."""
        free_credit = loop._free_credit

        def count_and_free(out: Effects) -> None:
            if out.unmatched:
                self._checker.coverage["effect unmatched"] += len(out.unmatched)
            free_credit(out)

        loop._free_credit = count_and_free  # type: ignore[method-assign]

    async def _serve(self, scheduler: Scheduler, rows: Sequence[ShardRow], rooms: asyncio.TaskGroup) -> Never:
        while not self._cluster_clock.is_set:
            await self._cluster_clock.sleep(_STEP)
            if self._told_to_end.is_set():
                raise _Stopped
        surfaces = self._listen(scheduler, rows)
        self.scheduler = scheduler
        scheduler.start(rooms)
        if self._vigil is not None:
            rooms.create_task(self._vigil.run(), name="vigil")
        rooms.create_task(self._keep_order(scheduler), name="keep order")
        await self._told_to_end.wait()
        until = self.clock.elapsed() + _DRAIN
        await scheduler.hand_over(until)
        scheduler.begin_drain()
        await scheduler.finish_drain(until)
        await surfaces.close()
        raise _Stopped

    async def _keep_order(self, scheduler: Scheduler) -> Never:
        """Audit and purge as the node itself does, but more often: once a minute is hardly ever in a run."""
        while True:
            await self.clock.sleep(_IN_ORDER_EVERY)
            await audit.once(self._store, scheduler.loop)
            await retention.once(self._store, scheduler.loop, self._setup.retention)

    def _listen(self, scheduler: Scheduler, rows: Sequence[ShardRow]) -> Surfaces:
        """Serve clients, workers and the other nodes, and tell the others where."""
        behind = Behind(
            node_id=self.address,
            commands=scheduler.commands,
            loop=scheduler.loop,
            hub=scheduler.hub,
            store=self._store,
            rows=rows,
            view=scheduler.view,
            metrics=self.metrics,
            describe=partial(self._describe, scheduler),
            drain=self._told_to_end.set,
        )
        surfaces = Surfaces(behind, has_peers=bool(self._etcd))
        self._serve_at(api_address(self.address), surfaces.api)
        if surfaces.peer is not None:
            self._serve_at(self._peer_address, surfaces.peer)
        self._leadership.introduce(self._member())
        return surfaces

    def _serve_at(self, address: str, surface: Surface) -> None:
        handlers = [registration.handler_of(*service) for service in surface.servicers.items()]
        self._network.listen(address, self.process, handlers)

    @property
    def _peer_address(self) -> str:
        return f"{self.address}:{_PEER_PORT}" if self._etcd else ""

    def _member(self) -> Member:
        return Member(
            node_id=self.address,
            address=api_address(self.address),
            peer_address=self._peer_address,
            version="simulated",
            wall_clock_offset=self._cluster_clock.wall_clock_offset(),
        )

    def _others_offsets(self) -> Sequence[Micros]:
        members = self._leadership.members()
        return [member.wall_clock_offset for member in members if member.node_id != self.address]

    def _describe(self, scheduler: Scheduler) -> ClusterDescription:
        offset = self._cluster_clock.wall_clock_offset()
        return scheduler.describe(
            NodeDescription(self.address, api_address(self.address), "simulated", wall_clock_offset=offset)
        )
