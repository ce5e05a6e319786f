"""The gRPC servers of a node: their bounds, their services, their health, and how they stop.

`api_server` serves clients and workers, `peer_server` the other nodes, on an address that clients need not reach.

Every bound is set here and none is left to a default: gRPC's own are unlimited where it hurts. A message may be larger
than a request may be, so that a request that is too large is refused by us, with the field named and no retry asked
for, and not by gRPC, whose RESOURCE_EXHAUSTED clients retry.
"""

import asyncio
from collections.abc import Sequence
from itertools import starmap
from typing import Final

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.rpc import registration
from duecourse.server.rpc.surfaces import CLUSTER, TASKS, WORKERS, Surface

SERVICES: Final = tuple(service.full_name for service in (TASKS, WORKERS, CLUSTER))
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
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 2),
)
_API_OPTIONS: Final = (
    *_OPTIONS,
    # Dead connections are found by workers' heartbeats and calls' deadlines; this frees what they leave behind.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
_PEER_OPTIONS: Final = (
    *_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Nodes find out soon that another one is silent: see `peers`.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)
# What is left of a drain's time for the last calls to be told why they end.
_LAST_WORDS: Final = 0.5


def api_server(surface: Surface, *, has_reflection: bool) -> "Server":
    """Make the server of clients and workers."""
    return Server(surface, _API_OPTIONS, has_reflection=has_reflection)


def peer_server(surface: Surface) -> "Server":
    """Make the server of the other nodes."""
    return Server(surface, _PEER_OPTIONS, has_reflection=False)


class Server:
    """See the module's docstring. Not serving until it is said so."""

    def __init__(self, surface: Surface, options: Sequence[tuple[str, int]], *, has_reflection: bool) -> None:
        self._surface = surface
        self._names = tuple(service.full_name for service in surface.servicers)
        self._server = aio.server(options=options)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server.add_generic_rpc_handlers(tuple(starmap(registration.handler_of, surface.servicers.items())))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)  # type: ignore[no-untyped-call]
        if has_reflection:
            names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
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
        for name in ("", *self._names):
            await self._health.set(name, word)

    async def stop(self, grace: Micros) -> None:
        """Take no more calls; give those under way so long, then end them with a status."""
        self._surface.news.close()
        await self._health.enter_graceful_shutdown()
        seconds = grace / bounds.SECOND
        ending = asyncio.get_running_loop().call_later(max(0.0, seconds - _LAST_WORDS), self._surface.calls.close)
        try:
            await self._server.stop(max(seconds, _LAST_WORDS))
        finally:
            ending.cancel()
