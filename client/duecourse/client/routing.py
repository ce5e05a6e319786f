"""Where a call goes: the only module that opens channels and picks one.

A client knows one or more nodes. All calls go to one of them until it turns out not to serve; then they go to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from duecourse.v1 import cluster_service_pb2_grpc, task_service_pb2_grpc

_OPTIONS: Final = (
    # A page of a thousand tasks may carry a lot of headers and labels.
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    # A node that restarts is wanted back within a second, not after minutes of doubled back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Notices a connection that was dropped without a word while a call waits on it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A way to one node."""

    address: str
    channel: grpc.aio.Channel
    tasks: task_service_pb2_grpc.TaskServiceStub
    cluster: cluster_service_pb2_grpc.ClusterServiceStub


class Router:
    """Picks the way of each call, and opens it on first use."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Know the nodes, at least one; the first is preferred."""
        if not addresses:
            raise ValueError("a client needs at least one address")
        self._addresses = tuple(addresses)
        self._current = 0
        self._routes: dict[str, Route] = {}

    def pick(self) -> Route:
        """Return the way that the next call takes."""
        address = self._addresses[self._current]
        route = self._routes.get(address)
        if route is None:
            channel = grpc.aio.insecure_channel(address, _OPTIONS)
            route = self._routes[address] = Route(
                address,
                channel,
                task_service_pb2_grpc.TaskServiceStub(channel),
                cluster_service_pb2_grpc.ClusterServiceStub(channel),
            )
        return route

    def avoid(self, route: Route) -> None:
        """Take the next node from now on, unless another call has moved on from this one already."""
        if route.address == self._addresses[self._current]:
            self._current = (self._current + 1) % len(self._addresses)

    async def close(self) -> None:
        """Close all channels; calls in flight are cancelled."""
        routes, self._routes = self._routes, {}
        for route in routes.values():
            await route.channel.close()
