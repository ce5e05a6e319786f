"""A cluster of several nodes under test: they meet in a real etcd, and what they talk to can be cut off from each.

    cluster = await start_cluster(3, links={"node-1": (Link.ETCD, Link.STORE)})
    cluster.links["node-1"][Link.STORE].cut()

A link goes through a TCP proxy for each address that there is: the members of etcd, Postgres, or the node's own API and
peer addresses, which the node then advertises. Who leads is asked of the cluster, by the SDK.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from enum import Enum, auto
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from faults.cluster import SETTLED, Cluster, NodeProcess
from services.postgres import SHARDS
from services.tcp_proxy import Dialect, Direction, Http2, Pieces, TcpProxy

from duecourse import client as sdk
from duecourse.cli.launcher.children import Nursery
from duecourse.cli.launcher.ports import HOST
from duecourse.model import bounds
from duecourse.model.addresses import host_and_port
from duecourse.model.instants import Micros
from duecourse.model.slots import shard_of_slot, slot_of

SESSION: Final = 3 * bounds.SECOND
"""Of the nodes. Shorter ones run out by themselves on a machine that is busy."""
STEADY: Final = "12s"
"""A session for those who want no shard to move by itself: it does not run out on a machine that is busy."""
SETTLES: Final = bounds.SECOND
"""After which shards move to nodes that have come."""
TAKEN_OVER: Final = 4 * SESSION
"""Within which a probe runs after leaders have fallen silent, on a machine that is busy. `failover` measures it."""

_POLL: Final = 20 * bounds.MILLISECOND
_ASK_LIMIT: Final = timedelta(seconds=2)


class Link(Enum):
    """What a node talks to, or who talks to it."""

    ETCD = auto()
    STORE = auto()
    API = auto()
    PEERS = auto()


EVERYTHING: Final = tuple(Link)
Links = Mapping[str, Collection[Link]]


class Proxies:
    """The proxies of one link of one node, which do the same."""

    def __init__(self, proxies: Sequence[TcpProxy]) -> None:
        self.each = proxies

    @property
    def faults(self) -> Counter[str]:
        """What was done, in all."""
        return sum((proxy.faults for proxy in self.each), Counter())

    def cut(self, *directions: Direction) -> None:
        """Let nothing through, and tell nobody."""
        for proxy in self.each:
            proxy.cut(*directions)

    def heal(self) -> None:
        """Let everything through."""
        for proxy in self.each:
            proxy.heal()


class ClusterOfNodes(Cluster):
    """See the module's docstring."""

    def __init__(
        self,
        folder: Path,
        dsn: str,
        nursery: Nursery,
        source: random.Random,
        stack: AsyncExitStack,
        *,
        etcd: Sequence[str],
        nodes: int,
        links: Links,
        settings: Mapping[str, str],
        shards: int = SHARDS,
    ) -> None:
        """Prepare; the stack closes proxies, `etcd` are the members' addresses, the store has so many shards."""
        self.shards = shards
        self.etcd_prefix = f"faults-{source.getrandbits(32):08x}"
        self.links: dict[str, dict[Link, Proxies]] = {}
        self._etcd = tuple(etcd)
        self._stack = stack
        self._wanted_links = links
        meeting = {
            "coordination": "etcd",
            "etcd_endpoints": ",".join(etcd),
            "etcd_prefix": self.etcd_prefix,
            "session": f"{SESSION}us",
            "placement_settles": f"{SETTLES}us",
        }
        super().__init__(folder, dsn, nursery, source, {**meeting, **settings})
        for _ in range(nodes - 1):
            self.add_node()

    async def _start(self) -> None:
        for node in self.nodes:
            await self._link(node, self._wanted_links.get(node.name, ()))
        async with asyncio.TaskGroup() as group:
            for node in self.nodes:
                group.create_task(node.start(), name=node.name)
        self._asking = await self._stack.enter_async_context(sdk.Client([node.address for node in self.nodes]))
        await self.until_led(*self.nodes)

    async def _link(self, node: NodeProcess, links: Collection[Link]) -> None:
        proxies = self.links[node.name] = {}
        for link in links:
            proxies[link] = await self._proxies_of(node, link)
            address = ",".join(proxy.endpoint for proxy in proxies[link].each)
            match link:
                case Link.ETCD:
                    node.settings["etcd_endpoints"] = address
                case Link.STORE:
                    real = urlsplit(self.store.dsn)
                    credentials = real.netloc.rpartition("@")[0]
                    node.settings["postgres_dsn"] = real._replace(netloc=f"{credentials}@{address}").geturl()
                case Link.API:
                    node.settings["advertise"] = address
                case Link.PEERS:
                    node.settings["advertise_peer"] = address

    async def _proxies_of(self, node: NodeProcess, link: Link) -> Proxies:
        dialect: type[Dialect] = Pieces
        match link:
            case Link.ETCD:
                targets = [host_and_port(endpoint) for endpoint in self._etcd]
            case Link.STORE:
                real = urlsplit(self.store.dsn)
                assert real.port is not None
                targets = [(HOST, real.port)]
            case Link.API:
                targets, dialect = [(HOST, node.port)], Http2
            case Link.PEERS:
                targets, dialect = [(HOST, node.peer_port)], Http2
        return Proxies([await self._stack.enter_async_context(TcpProxy(*target, dialect)) for target in targets])

    # Who leads.

    async def picture(self) -> sdk.Cluster:
        """Ask some node how the cluster stands; without patience, since it may be one that is not heard."""
        return await self._asking.cluster(timeout=_ASK_LIMIT)

    async def leads(self, node: NodeProcess) -> set[int]:
        """Return the shards that a node leads, as the cluster tells."""
        return {shard.shard for shard in (await self._asking.cluster()).shards if shard.leader == node.name}

    async def leader_of(self, shard: int) -> NodeProcess:
        """Return the node that leads a shard, as the cluster tells, once one does."""
        began = self.clock.elapsed()
        while True:
            names = {one.shard: one.leader for one in (await self._asking.cluster()).shards}
            for node in self.nodes:
                if node.name == names[shard]:
                    return node
            assert self.clock.elapsed() - began < SETTLED, f"nobody leads shard {shard}"
            await self.clock.sleep(_POLL)

    async def epochs(self) -> dict[int, int]:
        """Return the epoch of each shard, as the store has it."""
        rows = await self.store.fetch("SELECT shard, epoch FROM duecourse.shard")
        return {row["shard"]: row["epoch"] for row in rows}

    async def until_raised(self, shards: Collection[int], above: Mapping[int, int], limit: Micros = SETTLED) -> None:
        """Wait until the epochs of these shards have grown: nodes learn of what ends a term one after the other."""
        began = self.clock.elapsed()
        while True:
            found = await self.epochs()
            kept = [shard for shard in shards if found[shard] <= above[shard]]
            if not kept:
                return
            assert self.clock.elapsed() - began < limit, f"the terms of shards {kept} did not end"
            await self.clock.sleep(_POLL)

    async def until_led(self, *nodes: NodeProcess, limit: Micros = SETTLED) -> Micros:
        """Wait until these nodes, and no others, lead all shards, each its share; returns how long that took."""
        began = self.clock.elapsed()
        names = {node.name for node in nodes}
        seen: object = None
        while True:
            try:
                seen = found = await self.picture()
                if _is_shared_out(found, names):
                    return self.clock.elapsed() - began
            except sdk.DuecourseError as error:
                seen = error
            for node in nodes:
                assert node.child.is_running, f"{node.name} {node.child.how_it_ended()}: {node.end_of_log()}"
            assert self.clock.elapsed() - began < limit, f"{sorted(names)} do not lead all shards: {seen}"
            await self.clock.sleep(_POLL)

    def _probes(self) -> list[str]:
        """Return the id of a task of each shard."""
        return [self.id_in(shard, f"probe-{next(self._names)}") for shard in range(self.shards)]

    def id_in(self, shard: int, prefix: str) -> str:
        """Return an id that begins so and lies in a shard."""
        ids = (f"{prefix}-{number}" for number in itertools.count())
        return next(task_id for task_id in ids if shard_of_slot(slot_of("default", task_id), self.shards) == shard)


def _is_shared_out(found: sdk.Cluster, names: Collection[str]) -> bool:
    led = Counter(shard.leader for shard in found.shards if shard.state is sdk.ShardState.LED)
    have_answered = {node.node_id for node in found.nodes if node.answered}
    share = -(-len(found.shards) // len(names))
    return (
        led.total() == len(found.shards)
        and led.keys() <= have_answered & set(names)
        and set(names) <= have_answered
        and max(led.values()) <= share
    )
