"""What a node serves, and to whom: the services of its two surfaces, wired to what is behind them.

`api` is for clients and workers. `peer` is for the other nodes: it has what nodes ask each other and nothing else,
carries out only what this node leads, and passes nothing on. A node alone has no peer surface, and passes nothing on
either. Nothing here listens: `server` does, and a simulation in its place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.descriptor import ServiceDescriptor

from duecourse.model import bounds
from duecourse.server.leadership import ClusterView
from duecourse.server.rpc import Commands, Describe
from duecourse.server.rpc.calls import Calls
from duecourse.server.rpc.cluster_news import ClusterNews
from duecourse.server.rpc.cluster_service import ClusterService
from duecourse.server.rpc.peers import Answering, Peers
from duecourse.server.rpc.routing import Routing
from duecourse.server.rpc.task_service import TaskService
from duecourse.server.rpc.worker_service import WorkerService
from duecourse.server.shards.loop import Loop
from duecourse.server.storage import ShardRow, TaskStore
from duecourse.server.streams.hub import Hub
from duecourse.server.telemetry.metrics import Metrics
from duecourse.v1 import cluster_service_pb2, task_service_pb2, worker_service_pb2

TASKS: Final = task_service_pb2.DESCRIPTOR.services_by_name["TaskService"]
WORKERS: Final = worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"]
CLUSTER: Final = cluster_service_pb2.DESCRIPTOR.services_by_name["ClusterService"]
_OF_PEERS: Final = "peer/"
_NAME_SECONDS: Final = bounds.PEER_ANSWERS / bounds.SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """What is behind a node's surfaces."""

    node_id: str
    commands: Commands
    loop: Loop
    hub: Hub
    store: TaskStore
    rows: Sequence[ShardRow]
    view: ClusterView
    metrics: Metrics
    describe: Describe
    drain: Callable[[], None]
    """Has the node begin to drain."""


@dataclass(frozen=True, slots=True)
class Surface:
    """Services, the calls that are under way to them, and what their watchers are told."""

    servicers: Mapping[ServiceDescriptor, object]
    calls: Calls
    news: ClusterNews


class Surfaces:
    """See the module's docstring."""

    def __init__(self, behind: Behind, *, has_peers: bool) -> None:
        view, loop, metrics = behind.view, behind.loop, behind.metrics
        self._behind = behind
        self._news = ClusterNews(view, behind.rows, loop.clock, metrics)
        self._peers = Peers(view, metrics) if has_peers else None
        routing = None
        if self._peers is not None:
            routing = Routing(behind.node_id, loop.shards.keys(), view, self._peers, loop.clock, metrics)
        calls = Calls(metrics)
        servicers = self._servicers(calls, routing, self._peers)
        servicers[WORKERS] = WorkerService(behind.hub, loop, calls)
        self.api = Surface(servicers, calls, self._news)
        self.peer: Surface | None = None
        if has_peers:
            calls = Calls(metrics, counted_as=_OF_PEERS)
            self.peer = Surface(self._servicers(calls, None, None), calls, self._news)

    async def who_answers(self, peer_address: str) -> Answering | None:
        """Ask which node is at an address for nodes; None: nobody tells."""
        return None if self._peers is None else await self._peers.who_answers(peer_address, _NAME_SECONDS)

    async def close(self) -> None:
        """Close the channels to other nodes; nothing is served any more."""
        if self._peers is not None:
            await self._peers.close()

    def _servicers(self, calls: Calls, routing: Routing | None, peers: Peers | None) -> dict[ServiceDescriptor, object]:
        behind, loop = self._behind, self._behind.loop
        tasks = TaskService(
            behind.commands,
            behind.store,
            calls,
            behind.metrics,
            shard_of_slot=loop.shard_of_slot,
            utc=loop.utc,
            routing=routing,
        )
        cluster = ClusterService(behind.describe, behind.view, self._news, calls, drain=behind.drain, peers=peers)
        return {TASKS: tasks, CLUSTER: cluster}
