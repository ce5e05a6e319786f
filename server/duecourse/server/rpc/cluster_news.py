"""`ClusterNews`: what those who watch the cluster are told, and when.

Every watcher gets the whole picture at once, and again when it has changed, at most once in
`bounds.CLUSTER_NEWS_INTERVAL`: in between it misses nothing but states that are over. A picture is made once for all
of them. The number of watchers is bounded; all of them end with the node.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from duecourse.model import bounds
from duecourse.server.core.errors import Draining, Overloaded
from duecourse.server.leadership import ClusterView
from duecourse.server.storage import ShardRow
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing.clock import Clock
from duecourse.v1 import cluster_service_pb2

_WATCHERS = "cluster_watchers"


class ClusterNews:
    """See the module's docstring."""

    def __init__(
        self,
        view: ClusterView,
        rows: Sequence[ShardRow],
        clock: Clock,
        metrics: Metrics,
        max_watchers: int = bounds.MAX_CLUSTER_WATCHERS,
    ) -> None:
        self._view = view
        self._rows = rows
        self._clock = clock
        self._metrics = metrics
        self._max_watchers = max_watchers
        self._watchers = 0
        self._is_closed = False
        self._news = asyncio.Event()
        self._picture: cluster_service_pb2.WatchClusterResponse | None = None
        view.subscribe(self._changed)

    async def watch(self) -> AsyncGenerator[cluster_service_pb2.WatchClusterResponse, None]:
        """Yield the cluster as it is, and as it becomes, until the node ends. Raises Draining, Overloaded."""
        if self._is_closed:
            raise Draining
        if self._watchers >= self._max_watchers:
            self._metrics.admission_refusals[_WATCHERS] += 1
            raise Overloaded("watchers of the cluster")
        self._watchers += 1
        told: cluster_service_pb2.WatchClusterResponse | None = None
        try:
            while not self._is_closed:
                news = self._news
                picture = self._now()
                if picture != told:
                    told = picture
                    yield picture
                await news.wait()
                if not self._is_closed:
                    await self._clock.sleep(bounds.CLUSTER_NEWS_INTERVAL)
        finally:
            self._watchers -= 1

    def close(self) -> None:
        """Tell nothing more: all watchers end."""
        self._is_closed = True
        self._news.set()

    def _changed(self) -> None:
        self._picture = None
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _now(self) -> cluster_service_pb2.WatchClusterResponse:
        if self._picture is None:
            self._picture = self._draw()
        return self._picture

    def _draw(self) -> cluster_service_pb2.WatchClusterResponse:
        picture = cluster_service_pb2.WatchClusterResponse()
        for member in self._view.members():
            picture.nodes.add(
                node_id=member.node_id,
                address=member.address,
                version=member.version,
                ineligible_reason=member.ineligible_reason,
            )
        for row in self._rows:
            leader = self._view.leader(row.shard)
            picture.shards.add(
                shard=row.shard,
                slot_from=row.slot_from,
                slot_until=row.slot_until,
                state=cluster_service_pb2.SHARD_STATE_LED if leader else cluster_service_pb2.SHARD_STATE_UNLED,
                leader=leader.node_id if leader else "",
            )
        return picture
