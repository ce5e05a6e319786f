"""`ClusterService`: how the cluster looks from this node, and draining one of its nodes.

What clients reach asks the other nodes for what only they know: their clocks, their backlogs, the counts of the shards
that they lead. A node that does not answer soon is listed without. What other nodes reach answers for this node alone,
so that nothing is asked or passed on twice.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import grpc
from grpc import aio

from duecourse.model import bounds
from duecourse.server.core.errors import DomainError, InvalidField, NodeNotFound, NodeNotReached, Overloaded
from duecourse.server.core.task import ShardId
from duecourse.server.leadership import ClusterView, Member
from duecourse.server.rpc import Describe, convert, present, status
from duecourse.server.rpc.calls import Calls
from duecourse.server.rpc.cluster_news import ClusterNews
from duecourse.server.rpc.peers import Peers
from duecourse.server.rpc.registration import Malformed
from duecourse.server.rpc.relay import NotThere
from duecourse.v1 import cluster_service_pb2 as pb
from duecourse.v1 import cluster_service_pb2_grpc

MAX_ASKING: Final = 32
_DRAIN_SECONDS: Final = 5.0
_ASKING: Final = "descriptions of the cluster"
_WATCH: Final = "WatchCluster"
_Context = aio.ServicerContext[Any, Any]


class ClusterService(cluster_service_pb2_grpc.ClusterServiceServicer):
    """See the module's docstring."""

    def __init__(
        self,
        describe: Describe,
        view: ClusterView,
        news: ClusterNews,
        calls: Calls,
        *,
        drain: Callable[[], None],
        peers: Peers | None = None,
    ) -> None:
        """Serve clients by asking the other nodes, or without `peers` for this node alone, which `drain` drains."""
        self._describe = describe
        self._view = view
        self._news = news
        self._calls = calls
        self._drain_this = drain
        self._peers = peers
        self._asking = 0

    async def GetCluster(  # noqa: N802
        self,
        request: pb.GetClusterRequest,
        context: aio.ServicerContext[pb.GetClusterRequest, Awaitable[pb.GetClusterResponse]],
    ) -> pb.GetClusterResponse:
        """Describe the cluster."""
        return await self._calls.answer("GetCluster", context, partial(self._get, context), request)

    async def WatchCluster(  # type: ignore[override]  # noqa: N802
        self, request: pb.WatchClusterRequest, context: _Context
    ) -> None:
        """Tell where the shards are led, and again whenever it changes. Writes by the context."""
        refused: status.Refusal | None = None
        try:
            if isinstance(request, Malformed):
                raise InvalidField("request", request.problem)
            async with aclosing(self._news.watch()) as pictures:
                async for picture in pictures:
                    await context.write(picture)
        except asyncio.CancelledError:
            self._calls.count(_WATCH, grpc.StatusCode.CANCELLED)
            raise
        except DomainError as error:
            refused = status.refusal(error)
        except aio.BaseError:
            # gRPC has several ways to say that the client is gone.
            self._calls.count(_WATCH, grpc.StatusCode.CANCELLED)
            return
        if refused is not None:
            await self._calls.refuse(_WATCH, context, refused)
        self._calls.count(_WATCH, grpc.StatusCode.OK)

    async def DrainNode(  # noqa: N802
        self,
        request: pb.DrainNodeRequest,
        context: aio.ServicerContext[pb.DrainNodeRequest, Awaitable[pb.DrainNodeResponse]],
    ) -> pb.DrainNodeResponse:
        """Have a node hand its shards over and end."""
        return await self._calls.answer("DrainNode", context, self._drain, request)

    async def _get(self, context: _Context, _: pb.GetClusterRequest) -> pb.GetClusterResponse:
        own = present.cluster(self._describe())
        if self._peers is None:
            return own
        remaining = context.time_remaining()
        seconds = bounds.PEER_ANSWERS / bounds.SECOND
        if remaining is not None:
            # The answer should reach a client that is in a hurry.
            seconds = min(seconds, 0.8 * remaining)
        members = self._view.members()
        others = [member for member in members if member.node_id != own.answering_node and member.peer_address]
        return self._merge(own, members, await self._ask(self._peers, others, seconds))

    async def _ask(
        self, peers: Peers, members: Sequence[Member], seconds: float
    ) -> Mapping[str, pb.GetClusterResponse]:
        """Ask other nodes for what they know of themselves, all at once; return the answers by name.

        Raises Overloaded: calls of other nodes are not to be had for the asking.
        """
        if self._asking >= MAX_ASKING:
            raise Overloaded(_ASKING)
        answers: dict[str, pb.GetClusterResponse] = {}

        async def ask(member: Member) -> None:
            try:
                answer = await peers.call(member.peer_address, "GetCluster", pb.GetClusterRequest(), seconds)
            except DomainError:
                return
            # At an address that was set wrongly another node may answer, and only for itself.
            if answer.answering_node == member.node_id:
                answers[member.node_id] = answer

        self._asking += 1
        try:
            async with asyncio.TaskGroup() as group:
                for member in members:
                    group.create_task(ask(member), name=f"ask {member.node_id}")
        finally:
            self._asking -= 1
        return answers

    def _merge(
        self, own: pb.GetClusterResponse, members: Sequence[Member], answers: Mapping[str, pb.GetClusterResponse]
    ) -> pb.GetClusterResponse:
        """Make one description of all: of each node what it says of itself, of each shard what its leader says."""
        told = {own.answering_node: own, **answers}
        merged = pb.GetClusterResponse(
            coordination=own.coordination, answering_node=own.answering_node, worker_streams=own.worker_streams
        )
        for member in members:
            node = merged.nodes.add()
            if member.node_id in told:
                node.CopyFrom(told[member.node_id].nodes[0])
            node.node_id = member.node_id
            node.address = member.address
            node.version = member.version
            node.ineligible_reason = member.ineligible_reason
        claims: dict[int, pb.Shard] = {}
        for description in told.values():
            for shard in description.shards:
                if shard.leader and shard.epoch > (claims[shard.shard].epoch if shard.shard in claims else -1):
                    claims[shard.shard] = shard
        for shard in own.shards:
            merged.shards.add().CopyFrom(claims.get(shard.shard) or self._unclaimed(shard, told))
        return merged

    def _unclaimed(self, shard: pb.Shard, told: Mapping[str, object]) -> pb.Shard:
        """Describe a shard that no node which answered says it leads."""
        leader = self._view.leader(ShardId(shard.shard))
        if leader is None:
            return shard
        state = pb.SHARD_STATE_LOADING if leader.node_id in told else pb.SHARD_STATE_LED
        return pb.Shard(
            shard=shard.shard,
            slot_from=shard.slot_from,
            slot_until=shard.slot_until,
            state=state,
            leader=leader.node_id,
        )

    async def _drain(self, request: pb.DrainNodeRequest) -> pb.DrainNodeResponse:
        node_id = convert.required_name(request.node_id, "node_id")
        if node_id == self._describe().node_id:
            self._drain_this()
            return pb.DrainNodeResponse()
        member = next((member for member in self._view.members() if member.node_id == node_id), None)
        if self._peers is None or member is None:
            raise NodeNotFound(node_id)
        try:
            await self._peers.call(member.peer_address, "DrainNode", request, _DRAIN_SECONDS)
        except NotThere as error:
            raise NodeNotReached(node_id) from error
        return pb.DrainNodeResponse()
