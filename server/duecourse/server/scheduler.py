"""`Scheduler`: the rooms of a node that schedule, wired to each other; everything but gRPC, signals and the admin port.

It runs on any event loop and any clock, so that a simulation runs the very same. Nothing is decided here.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Never

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.shard import ShardOptions
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.failpoints import Failpoints
from duecourse.server.leadership import ClusterView, Leadership
from duecourse.server.maintenance import audit, retention
from duecourse.server.rpc import ClusterDescription, NodeDescription, ShardDescription, ShardStanding
from duecourse.server.shards.buckets import Horizon
from duecourse.server.shards.commands import NodeCommands, resolve
from duecourse.server.shards.lanes import CommitLane, CommitLanes
from duecourse.server.shards.loop import Loop
from duecourse.server.shards.reads import Reads
from duecourse.server.shards.terms import Terms
from duecourse.server.storage import ShardRow, TaskStore
from duecourse.server.streams.hub import Hub
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing.clock import Clock

_STEP: Final[Micros] = 5 * bounds.MILLISECOND


@dataclass(frozen=True, slots=True)
class Options:
    """What a scheduler is told; see the settings of the same names, or the bound where there is none (`head`)."""

    node_id: str
    lease: Micros = bounds.DEFAULT_LEASE
    heartbeat: Micros = bounds.DEFAULT_HEARTBEAT
    horizon: Micros = bounds.HORIZON
    head: int = bounds.HEAD
    retention: Micros = bounds.DEFAULT_RETENTION
    idle_check: Micros = bounds.IDLE_CHECK
    commit_lanes: int = bounds.COMMIT_LANES
    max_pending_submissions: int = bounds.MAX_PENDING_SUBMISSIONS
    max_worker_streams: int = bounds.MAX_WORKER_STREAMS


class Scheduler:
    """See the module's docstring."""

    def __init__(
        self,
        options: Options,
        store: TaskStore,
        rows: Sequence[ShardRow],
        leadership: Leadership,
        clock: Clock,
        metrics: Metrics,
        failpoints: Failpoints,
    ) -> None:
        self._options = options
        self._store = store
        self._rows = rows
        self._leadership = leadership
        self._clock = clock
        self._metrics = metrics
        self._is_draining = False
        self.view: ClusterView = leadership
        self.loop = loop = Loop(clock, len(rows), options.lease, options.head, metrics, failpoints)
        shard_options = ShardOptions(options.node_id, options.lease, options.heartbeat, options.head)
        self.terms = terms = Terms(store, loop, leadership, shard_options, options.horizon, metrics)
        self.lanes = lanes = CommitLanes(
            [CommitLane(store, loop, terms, metrics, failpoints) for _ in range(options.commit_lanes)]
        )
        terms.connect(lanes)
        self._reads = Reads(store, loop, metrics)
        self._horizon = Horizon(store, loop, options.horizon, options.head, metrics)
        self.commands = NodeCommands(loop, lanes, metrics, options.max_pending_submissions)
        self.hub = Hub(
            loop,
            leadership,
            metrics,
            node_id=options.node_id,
            heartbeat=options.heartbeat,
            max_streams=options.max_worker_streams,
        )
        loop.connect(self.hub, lanes, self._reads, resolve, terms.failed, self._leader_of)
        metrics.samplers.append(self._sample)

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start all rooms in a group whose end ends them. One of them raises Superseded if another node took over."""
        rooms = {
            "loop": self.loop.run(),
            "reads": self._reads.run(),
            "terms": self.terms.run(),
            "leadership": self._leadership.run(self.terms, self._rows),
            "terms watch": self.terms.watch(self._options.idle_check, self.hub),
            "horizon": self._horizon.run(),
            "retention": retention.run(self._store, self.loop, self._options.retention),
            "audit": audit.run(self._store, self.loop),
            "stream heartbeats": self._beat(),
        }
        for name, room in rooms.items():
            group.create_task(room, name=name)
        for number, lane in enumerate(self.lanes.lanes):
            group.create_task(lane.run(), name=f"commit lane {number}")

    async def hand_over(self, until: Micros) -> None:
        """Be ready no more, and hand what this node leads over to others, until an elapsed time at most."""
        self._is_draining = True
        await self._leadership.drain(until)

    def begin_drain(self) -> None:
        """Refuse new work, grant no more, and tell the workers."""
        self._is_draining = self.commands.is_draining = True
        self.loop.is_granting = False
        self.hub.drain()

    async def finish_drain(self, until: Micros) -> None:
        """Let what is in flight become durable, until an elapsed time; what waits for a worker waits in the store."""
        await self._rest(until)
        self.hub.close()
        # What was granted and could not be sent any more is returned.
        await self._rest(until)

    def why_not_ready(self) -> str | None:
        """Tell what keeps the node from serving; None if nothing does."""
        if self._is_draining:
            return "draining"
        missing = self._leadership.why_not_ready(self.loop.shards.keys())
        if missing is not None:
            return missing
        if self.lanes.is_refused:
            return "the store refuses writes"
        return None

    def describe(self, node: NodeDescription) -> ClusterDescription:
        """Describe the cluster as this node sees it."""
        shards = []
        for row in self._rows:
            place = (row.shard, row.slot_from, row.slot_until)
            led = self.loop.shards.get(row.shard)
            loading = self.terms.loading.get(row.shard)
            if led is not None:
                counts = (led.tasks_in_memory, len(led.leases))
                shards.append(ShardDescription(*place, ShardStanding.LED, node.node_id, led.fence.epoch, *counts))
            elif loading is not None:
                shards.append(ShardDescription(*place, ShardStanding.LOADING, node.node_id, loading, 0, 0))
            else:
                shards.append(ShardDescription(*place, ShardStanding.UNLED, "", Epoch(0), 0, 0))
        now = self._clock.now()
        ready, age = self.loop.ready()
        node = replace(
            node,
            clock_uncertainty=(now.latest - now.earliest) // 2,
            ready_tasks=ready,
            oldest_ready_age=age,
            worker_streams=self.hub.streams,
        )
        return ClusterDescription(self._leadership.coordination, node.node_id, [node], shards, self.hub.streams)

    async def _rest(self, until: Micros) -> None:
        """Wait until all that was asked of the store is answered and handled."""
        while not (self.lanes.is_idle and not self.loop.inbox_size) and self._clock.elapsed() < until:
            await self._clock.sleep(_STEP)

    async def _beat(self) -> Never:
        interval = min(self._options.heartbeat // 4, bounds.LONGEST_SLEEP)
        while True:
            self.hub.tick(self._clock.elapsed())
            await self._clock.sleep(interval)

    def _leader_of(self, shard: ShardId) -> str:
        leader = self.view.leader(shard)
        return "" if leader is None or leader.node_id == self._options.node_id else leader.address

    def _sample(self) -> None:
        metrics = self._metrics
        shards = self.loop.shards.values()
        metrics.tasks_in_memory = sum(shard.tasks_in_memory for shard in shards)
        metrics.leases = sum(len(shard.leases) for shard in shards)
        metrics.credits = self.loop.matcher.credits()
        metrics.ready_tasks, metrics.oldest_ready_age = self.loop.ready()
        metrics.inbox_size = self.loop.inbox_size
