"""The gRPC server of a node: its bounds, its services, their health, and how it stops.

Every bound is set here and none is left to a default: gRPC's own are unlimited where it hurts. A message may be larger
than a request may be, so that a request that is too large is refused by us, with the field named and no retry asked
for, and not by gRPC, whose RESOURCE_EXHAUSTED clients retry.
"""

import asyncio
from typing import Final

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.rpc import registration
from duecourse.server.rpc.calls import Calls
from duecourse.server.rpc.cluster_service import ClusterService
from duecourse.server.rpc.task_service import TaskService
from duecourse.server.rpc.worker_service import WorkerService
from duecourse.v1 import cluster_service_pb2, task_service_pb2, worker_service_pb2

_SERVICES: Final = (
    task_service_pb2.DESCRIPTOR.services_by_name["TaskService"],
    worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"],
    cluster_service_pb2.DESCRIPTOR.services_by_name["ClusterService"],
)
SERVICES: Final = tuple(service.full_name for service in _SERVICES)
MAX_MESSAGE_BYTES: Final = 4 * bounds.MAX_REQUEST_BYTES
MAX_METADATA_BYTES: Final = 16 * 1024
MAX_STREAMS_PER_CONNECTION: Final = 4_096
# Far above the bound on calls, which answers what is too much: gRPC throws calls away with CANCELLED, some from its
# first bound on (1,000 by default) and all from its second one on.
MAX_UNSEEN_CALLS: Final = 32_768
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES // 2),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ("grpc.server.max_pending_requests", MAX_UNSEEN_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_UNSEEN_CALLS),
    # Two nodes on one port would share its connections without a word.
    ("grpc.so_reuseport", 0),
    # Dead connections are found by workers' heartbeats and calls' deadlines; this frees what they leave behind.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
)
# What is left of a drain's time for the last calls to be told why they end.
_LAST_WORDS: Final = 0.5


class Server:
    """See the module's docstring. Not serving until it is said so."""

    def __init__(
        self,
        calls: Calls,
        tasks: TaskService,
        workers: WorkerService,
        cluster: ClusterService,
        *,
        has_reflection: bool,
    ) -> None:
        self._calls = calls
        self._server = aio.server(options=_OPTIONS)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        servicers = (tasks, workers, cluster)
        self._server.add_generic_rpc_handlers(tuple(map(registration.handler_of, _SERVICES, servicers)))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)  # type: ignore[no-untyped-call]
        if has_reflection:
            names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)  # type: ignore[no-untyped-call]

    async def start(self, address: str) -> int:
        """Listen; returns the port. Raises OSError if the address cannot be had."""
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}") from error
        await self.set_serving(is_serving=False)
        await self._server.start()
        return port

    async def set_serving(self, *, is_serving: bool) -> None:
        """Say by `grpc.health.v1` whether this node takes requests."""
        word = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *SERVICES):
            await self._health.set(name, word)

    async def stop(self, grace: Micros) -> None:
        """Take no more calls; give those under way so long, then end them with a status."""
        await self._health.enter_graceful_shutdown()
        seconds = grace / bounds.SECOND
        ending = asyncio.get_running_loop().call_later(max(0.0, seconds - _LAST_WORDS), self._calls.close)
        try:
            await self._server.stop(max(seconds, _LAST_WORDS))
        finally:
            ending.cancel()
