"""A node on a simulated machine: the real code, all of it but its sockets and signals.

The same scheduler, the same clock, the same services behind the same handlers as in `duecourse.server.node`.
"""

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from typing import Final, Never

from simulation.checker import Checker
from simulation.clock import MachineClock
from simulation.loop import Process
from simulation.network import Network
from simulation.plan import Setup
from simulation.store import SimulatedStore

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.clock.cluster_clock import ClusterClock
from duecourse.server.failpoints import Failpoints
from duecourse.server.leadership import Leadership, Member, Superseded
from duecourse.server.leadership.solo import Solo
from duecourse.server.rpc import ClusterDescription, NodeDescription, registration
from duecourse.server.rpc.surfaces import Behind, Surface, Surfaces
from duecourse.server.scheduler import Options, Scheduler
from duecourse.server.storage import ShardRow, StoreUnavailable
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing import backoff

_DRAIN: Final = 5 * bounds.SECOND
_STEP: Final = 5 * bounds.MILLISECOND


class _Stopped(Exception):
    """The node was told to end, and has drained."""


class Node:
    """A node at an address."""

    def __init__(
        self,
        setup: Setup,
        address: str,
        process: Process,
        clock: MachineClock,
        store: SimulatedStore,
        network: Network,
        checker: Checker,
    ) -> None:
        self.address = address
        self.process = process
        self.clock = clock
        """Of its machine."""
        self.has_ended = False
        self.scheduler: Scheduler | None = None
        self.metrics = Metrics(node_id=address)
        self._cluster_clock = ClusterClock(store, clock, address, self.metrics, self._others_offsets)
        self._setup = setup
        self._store = store
        self._network = network
        self._checker = checker
        self._told_to_end = asyncio.Event()
        self._leadership: Leadership = Solo(self._member())

    @property
    def is_up(self) -> bool:
        """Whether it runs now."""
        return not (self.has_ended or self.process.is_dead or self.process.is_paused)

    def stop(self) -> None:
        """Tell it to drain and to end."""
        self._told_to_end.set()

    async def run(self) -> None:
        """Run until another node takes over, or it is told to end."""
        try:
            await self._open()
            rows = await self._store.shards()
            scheduler = self._scheduler(rows)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._cluster_clock.run(), name="clock")
                group.create_task(self._serve(scheduler, rows, group), name="serve")
        except* StoreUnavailable:
            pass  # It could not even read the shards; whoever watches over it starts it again.
        except* Superseded:
            self._checker.superseded(self.process)
            self._checker.coverage["node superseded"] += 1
        except* _Stopped:
            self._checker.coverage["node drained"] += 1
        finally:
            self.has_ended = True
            if not self.process.is_dead:
                self._network.gone(self.process, has_notice=True)

    async def _serve(self, scheduler: Scheduler, rows: Sequence[ShardRow], rooms: asyncio.TaskGroup) -> Never:
        while not self._cluster_clock.is_set:
            await self._cluster_clock.sleep(_STEP)
            if self._told_to_end.is_set():
                raise _Stopped
        self.scheduler = scheduler
        scheduler.start(rooms)
        self._listen(scheduler, rows)
        await self._told_to_end.wait()
        scheduler.begin_drain()
        await scheduler.finish_drain(self.clock.elapsed() + _DRAIN)
        raise _Stopped

    async def _open(self) -> None:
        waits = backoff.delays(100 * bounds.MILLISECOND, 2 * bounds.SECOND, random.Random())
        while True:
            try:
                await self._store.open()
            except StoreUnavailable:
                await self.clock.sleep(next(waits))
                continue
            return

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
        return Scheduler(options, self._store, rows, self._leadership, self._cluster_clock, self.metrics, Failpoints())

    def _listen(self, scheduler: Scheduler, rows: Sequence[ShardRow]) -> None:
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
        surfaces = Surfaces(behind, has_peers=False)
        self._serve_at(self.address, surfaces.api)
        self._leadership.introduce(self._member())

    def _serve_at(self, address: str, surface: Surface) -> None:
        handlers = [registration.handler_of(*service) for service in surface.servicers.items()]
        self._network.listen(address, self.process, handlers)

    def _member(self) -> Member:
        return Member(
            node_id=self.address,
            address=self.address,
            peer_address="",
            version="simulated",
            wall_clock_offset=self._cluster_clock.wall_clock_offset(),
        )

    def _others_offsets(self) -> Sequence[Micros]:
        members = self._leadership.members()
        return [member.wall_clock_offset for member in members if member.node_id != self.address]

    def _describe(self, scheduler: Scheduler) -> ClusterDescription:
        return scheduler.describe(NodeDescription(self.address, self.address, "simulated"))
