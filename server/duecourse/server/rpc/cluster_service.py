"""`ClusterService`: how the cluster looks from this node."""

from collections.abc import Awaitable

from grpc import aio

from duecourse.server.rpc import Describe, present
from duecourse.server.rpc.calls import Calls
from duecourse.v1 import cluster_service_pb2, cluster_service_pb2_grpc


class ClusterService(cluster_service_pb2_grpc.ClusterServiceServicer):
    """See the module's docstring."""

    def __init__(self, describe: Describe, calls: Calls) -> None:
        self._describe = describe
        self._calls = calls

    async def GetCluster(  # noqa: N802
        self,
        request: cluster_service_pb2.GetClusterRequest,
        context: aio.ServicerContext[
            cluster_service_pb2.GetClusterRequest, Awaitable[cluster_service_pb2.GetClusterResponse]
        ],
    ) -> cluster_service_pb2.GetClusterResponse:
        """Describe the cluster."""
        return await self._calls.answer("GetCluster", context, self._get, request)

    async def _get(self, _: cluster_service_pb2.GetClusterRequest) -> cluster_service_pb2.GetClusterResponse:
        return present.cluster(self._describe())
