"""Nodes that share a store and move shards when a test says so: all that a real node has, but for its coordination."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Never

import grpc
from services.waiting import until

from duecourse.model import bounds, slots
from duecourse.model.instants import Micros
from duecourse.server.core.task import DEFAULT_POLICY, Lane, ShardId, Submission, TaskKey, TaskState
from duecourse.server.failpoints import Failpoints
from duecourse.server.leadership import Claim, Member, Taking
from duecourse.server.rpc.calls import Calls
from duecourse.server.rpc.worker_service import WorkerService
from duecourse.server.scheduler import Options, Scheduler
from duecourse.server.storage import RaiseRefused, ShardRow, Stale, StoredTask
from duecourse.server.storage.memory import MemoryStore
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing.clock import SystemClock
from duecourse.v1 import worker_service_pb2_grpc

SHARDS = 2
LANE = Lane("default", "default", "note", 0, "")


class Puppet:
    """Leads what the test gives it. Implements `Leadership`."""

    coordination = "puppets"

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self._listeners: list[Callable[[], None]] = []
        self.taking: Taking | None = None

    def members(self) -> Sequence[Member]:
        return [node.member for node in self._cluster.nodes.values()]

    def is_current(self) -> bool:
        return True

    def leader(self, shard: ShardId) -> Member | None:
        leader = self._cluster.nodes.get(self._cluster.leaders.get(shard, ""))
        return leader.member if leader else None

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def changed(self) -> None:
        for listener in self._listeners:
            listener()

    def introduce(self, member: Member) -> None:
        raise AssertionError("a puppet's addresses do not change")

    def ended(self, shard: ShardId) -> None:
        """Leave it to the test."""

    def superseded(self, shard: ShardId, by: Stale | RaiseRefused) -> None:
        """Leave it to the test."""

    def why_not_ready(self, led: Collection[ShardId]) -> str | None:
        return None

    async def drain(self, until: Micros) -> None:
        raise AssertionError("the test moves shards itself")

    async def run(self, taking: Taking, shards: Sequence[ShardRow]) -> Never:
        self.taking = taking
        await asyncio.Event().wait()
        raise AssertionError("nothing ends it")


class ClusterNode:
    """A node: a scheduler and the streams of workers over gRPC."""

    def __init__(self, cluster: "Cluster", node_id: str, rows: Sequence[ShardRow]) -> None:
        self.leadership = Puppet(cluster)
        self.metrics = Metrics()
        options = Options(node_id=node_id, heartbeat=bounds.SECOND, idle_check=100 * bounds.MILLISECOND)
        self.scheduler = Scheduler(
            options, cluster.store, rows, self.leadership, cluster.clock, self.metrics, Failpoints()
        )
        self._server = grpc.aio.server()
        service = WorkerService(self.scheduler.hub, self.scheduler.loop, Calls(self.metrics))
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(service, self._server)
        address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.member = Member(node_id=node_id, address=address, peer_address="", version="1")
        self._task: asyncio.Task[None] | None = None

    async def start(self, group: asyncio.TaskGroup) -> None:
        await self._server.start()
        self._task = group.create_task(self._run(), name=self.member.node_id)
        await until(lambda: self.leadership.taking is not None)

    async def stop(self) -> None:
        """Vanish: no hand-over, no last word."""
        assert self._task is not None
        self._task.cancel()
        await self._server.stop(None)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self.scheduler.start(group)


class Cluster:
    """Nodes by name, and who leads."""

    def __init__(self) -> None:
        self.store = MemoryStore(SHARDS)
        self.clock = SystemClock()
        self.nodes: dict[str, ClusterNode] = {}
        self.leaders: dict[ShardId, str] = {}
        self._epochs = 0

    async def lead(self, node_id: str, *shards: int) -> None:
        """Have a node take shards over from whoever leads them, in good order if that node is there."""
        for number in shards:
            shard = ShardId(number)
            before = self.nodes.get(self.leaders.get(shard, ""))
            if before is not None:
                assert before.leadership.taking is not None
                await before.leadership.taking.hand_over(shard)
            taking = self.nodes[node_id].leadership.taking
            assert taking is not None
            taking.take({shard: Claim()})
            self.leaders[shard] = node_id
        self._tell()
        await until(lambda: all(self.nodes[node_id].scheduler.loop.leads(ShardId(shard)) for shard in shards))

    async def kill(self, node_id: str) -> None:
        """Have a node vanish."""
        await self.nodes.pop(node_id).stop()
        self._tell()

    async def submit(self, shard: int, count: int, prefix: str = "t") -> list[str]:
        """Submit tasks that are due now, all of one shard; return their ids."""
        tasks = [_submission(task_id) for task_id in _ids(shard, count, prefix)]
        leader = self.nodes[self.leaders[ShardId(shard)]]
        await leader.scheduler.commands.submit(tasks)
        return [task.task_id for task in tasks]

    async def read(self, task_id: str) -> StoredTask:
        stored = await self.store.read_task(TaskKey("default", task_id), full=True)
        assert isinstance(stored, StoredTask)
        return stored

    async def succeeded(self, task_ids: Sequence[str]) -> None:
        """Wait until all of these tasks have succeeded."""
        async with asyncio.timeout(30):
            for task_id in task_ids:
                while (await self.read(task_id)).task.progress.state is not TaskState.SUCCEEDED:
                    await self.clock.sleep(10 * bounds.MILLISECOND)

    def _tell(self) -> None:
        for node in self.nodes.values():
            node.leadership.changed()


@asynccontextmanager
async def a_cluster(*names: str) -> AsyncIterator[Cluster]:
    """Run nodes that lead nothing yet."""
    cluster = Cluster()
    rows = await cluster.store.shards()
    async with asyncio.TaskGroup() as group:
        for name in names:
            cluster.nodes[name] = ClusterNode(cluster, name, rows)
            await cluster.nodes[name].start(group)
        try:
            yield cluster
        finally:
            for node in cluster.nodes.values():
                await node.stop()


def _ids(shard: int, count: int, prefix: str) -> list[str]:
    found: list[str] = []
    number = 0
    while len(found) < count:
        number += 1
        task_id = f"{prefix}{number}"
        if slots.shard_of_slot(slots.slot_of("default", task_id), SHARDS) == shard:
            found.append(task_id)
    return found


def _submission(task_id: str) -> Submission:
    slot = slots.slot_of("default", task_id)
    uid = task_id.encode().ljust(16, b"\0")
    shard = ShardId(slots.shard_of_slot(slot, SHARDS))
    return Submission(
        "default", task_id, slot, shard, LANE, uid, None, 0, DEFAULT_POLICY, b"", "text/plain", {}, {}, b"\1"
    )
