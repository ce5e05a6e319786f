"""Nodes of a cluster in one process: real schedulers and a real etcd, but one memory store for all, and no servers.

Each node reaches etcd through a proxy of its own, and the store through a view of its own, so that a test can cut one
node off from either. A node that `crashed` has done nothing at its end: its session lives on.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from services.tcp_proxy import TcpProxy
from services.waiting import until

from duecourse.model import bounds, slots
from duecourse.model.addresses import host_and_port
from duecourse.model.instants import Micros
from duecourse.server.core.effects import Submitted
from duecourse.server.core.errors import DomainError
from duecourse.server.core.task import DEFAULT_POLICY, Epoch, Lane, ShardId, Submission
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Keys
from duecourse.server.failpoints import Failpoints
from duecourse.server.leadership import Member, identity
from duecourse.server.leadership.clustered import Clustered
from duecourse.server.scheduler import Options, Scheduler
from duecourse.server.storage import CommitAnswer, Refused, ShardBatch, StoreUnavailable
from duecourse.server.storage.memory import MemoryStore
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing.clock import SystemClock

SHARDS = 12
SESSION = 2 * bounds.SECOND
SETTLES = 300 * bounds.MILLISECOND
LANE = Lane("default", "default", "send", 0, "")


class StoreOfNode:
    """The shared store as one node sees it: away, refusing to load some shards, or slow to commit."""

    def __init__(self, store: MemoryStore) -> None:
        self.is_away = False
        self.unloadable: set[ShardId] = set()
        self.commit_time: Micros = 0
        self._store = store

    async def commit(self, batches: Sequence[ShardBatch]) -> Mapping[ShardId, CommitAnswer]:
        if self.commit_time:
            await SystemClock().sleep(self.commit_time)
        if self.is_away:
            return {batch.fence.shard: Refused("away", is_data=False) for batch in batches}
        return await self._store.commit(batches)

    async def load_held(self, shards: Sequence[ShardId]) -> Any:
        if self.is_away or self.unloadable.intersection(shards):
            raise StoreUnavailable("these shards take too long")
        return await self._store.load_held(shards)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._guarded(found) if callable(found) else found

    def _guarded(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any, **named: Any) -> Any:
            if self.is_away:
                raise StoreUnavailable("away")
            return await method(*arguments, **named)

        return call


class ClusterNode:
    """A node that runs, until it is stopped or crashes."""

    def __init__(self, scheduler: Scheduler, leadership: Clustered, store: StoreOfNode, etcd: TcpProxy) -> None:
        self.scheduler = scheduler
        self.leadership = leadership
        self.store = store
        self.etcd = etcd
        self.failure: BaseException | None = None
        self.has_ended = False
        self._task: asyncio.Task[None] | None = None

    @property
    def led(self) -> set[ShardId]:
        """The shards that it leads."""
        return set() if self.has_ended else set(self.scheduler.loop.shards)

    @property
    def is_ready(self) -> bool:
        return not self.has_ended and self.scheduler.why_not_ready() is None

    def start(self, group: asyncio.TaskGroup) -> None:
        self._task = group.create_task(self._run())

    async def stop(self) -> None:
        """End it, as at the end of a drain: it revokes its session."""
        assert self._task is not None
        self._task.cancel()
        await until(lambda: self.has_ended)

    async def crash(self) -> None:
        """End it without its doing anything more."""
        self.etcd.cut()
        self.store.is_away = True
        await self.stop()

    async def submit(self, *task_ids: str) -> Sequence[Submitted | DomainError]:
        """Submit tasks that are due in an hour."""
        return await self.scheduler.commands.submit([self._submission(task_id) for task_id in task_ids])

    def _submission(self, task_id: str) -> Submission:
        slot = slots.slot_of("default", task_id)
        return Submission(
            namespace="default",
            task_id=task_id,
            slot=slot,
            shard=self.scheduler.loop.shard_of_slot(slot),
            lane=LANE,
            uid=task_id.encode().ljust(16, b"-")[:16],
            run_at=None,
            delay=bounds.HOUR,
            policy=DEFAULT_POLICY,
            payload=b"",
            content_type="",
            headers={},
            labels={},
            fingerprint=b"\1",
        )

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self.scheduler.start(group)
        except* Exception as failure:
            self.failure = failure.exceptions[0]
            while isinstance(self.failure, BaseExceptionGroup):
                self.failure = self.failure.exceptions[0]
        finally:
            self.has_ended = True


class InProcessCluster:
    """Starts nodes; whatever runs at its end is cancelled."""

    def __init__(
        self, endpoint: str, keys: Keys, store: MemoryStore, stack: AsyncExitStack, group: asyncio.TaskGroup
    ) -> None:
        self.keys = keys
        self.store = store
        self.nodes: list[ClusterNode] = []
        self._endpoint = endpoint
        self._stack = stack
        self._group = group
        self._clock = SystemClock()

    async def start(
        self, name: str, *, address: str = "", offset: Callable[[], Micros] = lambda: 0, session: Micros = SESSION
    ) -> ClusterNode:
        """Start a node, without waiting for it to lead anything."""
        proxy = await self._stack.enter_async_context(TcpProxy(*host_and_port(self._endpoint)))
        client = await self._stack.enter_async_context(EtcdClient([f"127.0.0.1:{proxy.port}"], self._clock))
        store = StoreOfNode(self.store)
        cluster = await identity.establish(client, self.keys, store)
        leadership = Clustered(
            name,
            cluster,
            client=client,
            clock=self._clock,
            keys=self.keys,
            incarnation=os.urandom(8).hex(),
            session=session,
            settles=SETTLES,
            wall_clock_offset=offset,
        )
        leadership.introduce(
            Member(node_id=name, address=address or f"{name}.test:7400", peer_address="", version="test")
        )
        options = Options(node_id=name, idle_check=100 * bounds.MILLISECOND)
        scheduler = Scheduler(
            options,
            store,
            await store.shards(),
            leadership,
            self._clock,
            Metrics(),
            Failpoints(),
        )
        node = ClusterNode(scheduler, leadership, store, proxy)
        self.nodes.append(node)
        node.start(self._group)
        return node

    def leads_all(self, *nodes: ClusterNode) -> bool:
        """Tell whether these nodes together lead every shard, and none twice."""
        led = sorted(shard for node in nodes for shard in node.led)
        return led == sorted(self.epochs())

    def epochs(self) -> Mapping[ShardId, Epoch]:
        """Return the epochs of all shards' rows."""
        return {shard.row.shard: shard.row.epoch for shard in self.store._shards.values()}


@asynccontextmanager
async def a_cluster(endpoint: str, keys: Keys, store: MemoryStore) -> AsyncIterator[InProcessCluster]:
    """Give a cluster without nodes yet."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        cluster = InProcessCluster(endpoint, keys, store, stack, group)
        yield cluster
        for node in cluster.nodes:
            if not node.has_ended:
                await node.stop()
