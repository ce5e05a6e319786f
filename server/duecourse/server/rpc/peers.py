"""`Peers`: calls to the other nodes of the cluster, at their peer addresses.

A channel is opened on the first call to a node and closed once the node is no member any more. Every call has a
deadline, and so many at most are under way to one node; what comes above that is refused at once. A connection that
fell silent is found within seconds by its pings, whatever the deadline.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message
from grpc import aio

from duecourse.model import bounds
from duecourse.server.core import errors
from duecourse.server.leadership import ClusterView
from duecourse.server.rpc import relay
from duecourse.server.telemetry.metrics import Metrics
from duecourse.v1 import cluster_service_pb2, cluster_service_pb2_grpc, task_service_pb2_grpc

_PEER_CALLS: Final = "calls to another node"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Several nodes of one process, in tests, share no connections.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A name that leads elsewhere after a restart would be looked up again after half a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # No such ping is sent while one that measures the bandwidth is out, which would be waited for for a minute.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class Answering(NamedTuple):
    """A node that has answered, and the start of its process."""

    node_id: str
    incarnation: str


class _Peer:
    """A channel to one node."""

    __slots__ = ("calls", "channel", "methods")

    def __init__(self, address: str) -> None:
        self.calls = 0
        self.channel = aio.insecure_channel(address, _OPTIONS)
        tasks = task_service_pb2_grpc.TaskServiceStub(self.channel)
        cluster = cluster_service_pb2_grpc.ClusterServiceStub(self.channel)
        self.methods: dict[str, Callable[..., Any]] = {
            "SubmitTask": tasks.SubmitTask,
            "SubmitTasks": tasks.SubmitTasks,
            "CancelTask": tasks.CancelTask,
            "GetCluster": cluster.GetCluster,
            "DrainNode": cluster.DrainNode,
        }


class Peers:
    """See the module's docstring."""

    def __init__(self, view: ClusterView, metrics: Metrics, max_calls: int = bounds.MAX_PEER_CALLS) -> None:
        self._view = view
        self._metrics = metrics
        self._max_calls = max_calls
        self._peers: dict[str, _Peer] = {}
        self._has_left = False
        view.subscribe(self._changed)

    async def call(self, address: str, method: str, request: Message, seconds: float) -> Any:
        """Call a node, for so long at most. Raises DomainError: `NotThere`, `OutcomeUncertain`, or what it refused."""
        if self._has_left:
            await self._close_unused()
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(address)
        if peer.calls >= self._max_calls:
            self._metrics.admission_refusals[_PEER_CALLS] += 1
            raise errors.Overloaded(_PEER_CALLS)
        peer.calls += 1
        result = "lost"
        try:
            answer = await peer.methods[method](request, timeout=seconds)
            result = "answered"
            return answer
        except aio.AioRpcError as failed:
            error = relay.of_call(failed)
            result = _RESULTS.get(type(error), "refused")
            try:
                raise error from failed
            finally:
                del error  # its traceback refers to this frame
        finally:
            peer.calls -= 1
            self._metrics.peer_calls[result] += 1

    async def who_answers(self, address: str, seconds: float) -> Answering | None:
        """Ask which node is at an address; None: nobody told."""
        try:
            answer = await self.call(address, "GetCluster", cluster_service_pb2.GetClusterRequest(), seconds)
        except errors.DomainError:
            return None
        nodes = (node for node in answer.nodes if node.node_id == answer.answering_node)
        return Answering(answer.answering_node, next((node.incarnation for node in nodes), ""))

    async def close(self) -> None:
        """Close all channels."""
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            await peer.channel.close()

    def _changed(self) -> None:
        self._has_left = True

    async def _close_unused(self) -> None:
        """Close the channels to nodes that are members no more, but for those with calls under way."""
        members = {member.peer_address for member in self._view.members()}
        left = [(address, peer) for address, peer in self._peers.items() if address not in members]
        idle = [self._peers.pop(address) for address, peer in left if not peer.calls]
        self._has_left = len(idle) < len(left)
        for peer in idle:
            await peer.channel.close()


_RESULTS: Final = {relay.NotThere: "not there", errors.OutcomeUncertain: "lost"}
