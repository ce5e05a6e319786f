"""Where a call goes: the only module that opens channels and picks one.

A client is given one or more nodes, its *seeds*. From them it learns which nodes there are and who leads which tasks,
and what changes a task goes straight to its leader, if the leader can be reached: a node's own word for its address may
mean nothing where the client is, behind a load balancer or a translation of addresses. So a leader is called only over
a connection that stands already. Everything else goes to one node, a seed if any serves, until it turns out not to;
then to the next. Any node carries out any call, so that a wrong choice costs time and nothing else.

A call that waits for a leader's answer while another node takes its place is given up, to be sent there: the one that
was asked may have fallen silent, and its connection takes long to be found dead.
"""

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import grpc

from duecourse.client.shard_map import ShardMap
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import Clock
from duecourse.v1 import cluster_service_pb2, cluster_service_pb2_grpc, task_service_pb2_grpc

_SHUNNED_FOR: Final = 2 * bounds.SECOND
_LAST_ANSWERS: Final = 500 * bounds.MILLISECOND
"""A leader that hands a shard over answers what it was asked before within this time."""
_OPTIONS: Final = (
    # A page of a thousand tasks may carry a lot of headers and labels.
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    # A node that restarts is wanted back within a second, not after minutes of doubled back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A name that leads elsewhere after a restart would be looked up again after half a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Notices a connection that was dropped without a word while a call waits on it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # No such ping is sent while one that measures the bandwidth is out, which would be waited for for a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
)


_Answer = TypeVar("_Answer", covariant=True)


class Cancellable(Protocol):
    """A call under way, or a stream, as `grpc.aio` makes them."""

    def cancel(self) -> bool:
        """Give it up: whoever awaits or reads it gets CancelledError."""
        ...


class Call(Cancellable, Awaitable[_Answer], Protocol[_Answer]):
    """A call under way that has one answer."""


@dataclass(slots=True, eq=False)
class Route:
    """A way to one node."""

    address: str
    channel: grpc.aio.Channel
    tasks: task_service_pb2_grpc.TaskServiceStub
    cluster: cluster_service_pb2_grpc.ClusterServiceStub
    calls: int = 0
    """How many are under way."""
    shunned_until: Micros = 0
    """An elapsed time: a call has failed here."""
    waiting: dict[Call[object], int] = field(default_factory=dict)
    """The calls that await an answer of the node as the leader of a slot, with that slot."""
    telling: Cancellable | None = None
    """The call by which the node tells of the cluster, if it is the one that does."""

    def is_connected(self) -> bool:
        """Tell whether a connection stands; if not, one is begun."""
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY


class Router:
    """Picks the way of each call, and opens it on first use."""

    def __init__(self, seeds: Sequence[str], clock: Clock) -> None:
        """Know the seeds, at least one; the first is preferred."""
        if not seeds:
            raise ValueError("a client needs at least one address")
        self._seeds = tuple(dict.fromkeys(seeds))
        self._clock = clock
        self._current = self._seeds[0]
        self._routes: dict[str, Route] = {}
        self._map: ShardMap | None = None
        self._given_up: set[Call[object]] = set()
        self.is_closed = False

    @property
    def has_several(self) -> bool:
        """Tell whether a call may have a leader to go to, so that it is worth telling which slot it is about."""
        return self._map is not None and self._map.has_several

    def leader(self, slot: int) -> str:
        """Return the address of the node that leads a slot, as far as is known; empty: it is not."""
        return self._map.leader(slot) if self._map is not None and self._map.has_several else ""

    def pick(self, slot: int | None = None, hint: str = "") -> Route:
        """Return the way that the next call takes: to who leads the slot, by a node's `hint` or by what is known.

        Raises RuntimeError if it is closed.
        """
        if self.is_closed:
            raise RuntimeError("the client is closed")
        address = hint or ("" if slot is None else self.leader(slot))
        if address and address != self._current:
            route = self._route(address)
            if route.shunned_until <= self._clock.elapsed() and route.is_connected():
                return route
        return self._route(self._current)

    def begin(self, route: Route, call: Call[object], slot: int | None) -> None:
        """Note that a call is under way."""
        route.calls += 1
        if slot is not None and self.leader(slot) == route.address:
            route.waiting[call] = slot

    def end(self, route: Route, call: Call[object]) -> None:
        """Note that a call has ended."""
        route.calls -= 1
        route.waiting.pop(call, None)
        self._given_up.discard(call)

    def has_given_up(self, call: Call[object]) -> bool:
        """Tell whether a call was cancelled here, since another node leads its slot now."""
        return call in self._given_up

    def avoid(self, route: Route, *, is_silent: bool = False) -> None:
        """Take another way from now on: a call has failed on this one, and was not even answered if it `is_silent`.

        Who does not answer may not tell of the cluster any more either: another node is asked to.
        """
        was_shunned = route.shunned_until > self._clock.elapsed()
        if is_silent and not was_shunned and route.telling is not None:
            route.telling.cancel()
        route.shunned_until = self._clock.elapsed() + _SHUNNED_FOR
        if route.address == self._current:
            self._current = self.after(route.address)

    def after(self, address: str) -> str:
        """Return the next of the addresses to try: of the seeds, and of what else is connected."""
        places = self._places()
        start = places.index(address) + 1 if address in places else 0
        for place in (*places[start:], *places[:start]):
            if place in self._seeds or self._route(place).is_connected():
                return place
        return self._seeds[0]

    def to(self, address: str) -> Route:
        """Return the way to one node."""
        return self._route(address)

    async def learn(self, picture: cluster_service_pb2.WatchClusterResponse) -> None:
        """Take in what a node told, connect to nodes that are new, and close the ways to those that are gone."""
        self._map = ShardMap(picture)
        places = self._places()
        if self._current not in places:
            self._current = self._seeds[0]
        if self._map.has_several:
            for address in places:
                self._route(address).is_connected()
        for address in self._routes.keys() - set(places):
            if not self._routes[address].calls:
                await self._routes.pop(address).channel.close()
        replaced = list(self._replaced())
        if replaced:
            asyncio.get_running_loop().call_later(_LAST_ANSWERS / bounds.SECOND, self._give_up, replaced)

    async def close(self) -> None:
        """Close all channels; calls in flight are cancelled."""
        self.is_closed = True
        routes, self._routes = self._routes, {}
        for route in routes.values():
            await route.channel.close()

    def _replaced(self) -> Iterator[tuple[Route, Call[object]]]:
        """Name the calls that await an answer of a node that another one has replaced."""
        for route in self._routes.values():
            for call, slot in route.waiting.items():
                # Also if it is the only one that is left, so that calls need no leader's address any more.
                leader = "" if self._map is None else self._map.leader(slot)
                if leader and leader != route.address:
                    yield route, call

    def _give_up(self, replaced: Sequence[tuple[Route, Call[object]]]) -> None:
        """Cancel those of the calls that still await an answer of a node that another one has replaced."""
        still = set(self._replaced())
        # In their order, which is the same wherever it runs, so that a simulation can be repeated.
        for route, call in replaced:
            if (route, call) in still:
                del route.waiting[call]
                self._given_up.add(call)
                call.cancel()

    def _places(self) -> tuple[str, ...]:
        known = () if self._map is None else self._map.addresses
        return tuple(dict.fromkeys((*self._seeds, *known)))

    def _route(self, address: str) -> Route:
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
