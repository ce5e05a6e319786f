"""`LocalCluster`: an embedded Postgres, migrated, an etcd if there is more than one node, and the nodes, as children.

A child that ends by itself is a failure that says what ended and how; the node's log, where it has one, tells why.
A store belongs to a solo node or to a cluster. A folder that one node was run on is given to the cluster when it is run
with several, and the other way round: see `binding`.
"""

import asyncio
import importlib
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, Self

from duecourse.cli import extras
from duecourse.cli.launcher import binding
from duecourse.cli.launcher.children import Child, Nursery
from duecourse.cli.launcher.coordinator import LocalEtcd
from duecourse.cli.launcher.errors import LaunchError
from duecourse.cli.launcher.nodes import LocalNode
from duecourse.cli.launcher.ports import free_port
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import SystemClock

if TYPE_CHECKING:
    from duecourse.client import Cluster
    from duecourse.server.storage.embedded import EmbeddedPostgres

PORT_STEP: Final = 10
"""The second node's ports are so much above the first one's, where those were given."""
_SHARING_LIMIT: Final = bounds.PLACEMENT_SETTLES + 30 * bounds.SECOND
_LOOK_EVERY: Final = 50 * bounds.MILLISECOND


class LocalCluster:
    """Nodes and what they stand on, on this machine.

    As an async context manager they are ready inside, and if there are several, each of them leads its share or has had
    half a minute for that.
    """

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        *,
        store: str = "postgres",
        nodes: int = 1,
        coordination: str | None = None,
        api_port: int = 0,
        admin_port: int = 0,
        settings: Mapping[str, str] | None = None,
        logs: Path | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Take the settings of all nodes, by name, and the folder of their logs: without one, they go where ours go.

        Without a `coordination`, one node is solo, and more agree by etcd.
        """
        self._nursery = nursery
        self._folder = folder
        self._store = store
        self._coordination = coordination or ("solo" if nodes == 1 else "etcd")
        self._settings = dict(settings or {})
        self._tell = tell
        self._clock = SystemClock()
        self._stack = AsyncExitStack()
        self._postgres: EmbeddedPostgres | None = None
        self._etcd: LocalEtcd | None = None
        self.nodes = [
            LocalNode(
                nursery,
                self._clock,
                f"node-{number + 1}",
                api_port + number * PORT_STEP if api_port else free_port(),
                admin_port + number * PORT_STEP if admin_port else free_port(),
                logs / f"node-{number + 1}.log" if logs else None,
            )
            for number in range(nodes)
        ]

    @property
    def address(self) -> str:
        """Where clients and workers reach the nodes: one address, or several separated by commas."""
        return ",".join(node.address for node in self.nodes)

    @property
    def addresses(self) -> list[str]:
        """Where clients and workers reach each node."""
        return [node.address for node in self.nodes]

    @property
    def node(self) -> Child:
        """The first node's process, the latest one."""
        return self.nodes[0].process

    @property
    def postgres_pid(self) -> int | None:
        """The process id of the Postgres server; None if the store is another."""
        if self._postgres is None:
            return None
        return int(self._pid_file.read_text().split("\n", 1)[0])

    @property
    def dsn(self) -> str | None:
        """Where Postgres is; None if the store is another. It holds the password."""
        return None if self._postgres is None else self._postgres.dsn

    @property
    def etcd_pid(self) -> int | None:
        """The process id of the etcd server; None if there is none."""
        return None if self._etcd is None else self._etcd.pid

    @property
    def _pid_file(self) -> Path:
        return self._folder.resolve() / "postgres" / "postmaster.pid"

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self._store == "postgres":
                await self._start_postgres(stack)
            if self._coordination == "etcd":
                await self._start_etcd(stack)
            await self._bind()
            self._tell("starting the node" if len(self.nodes) == 1 else f"starting {len(self.nodes)} nodes")
            stack.push_async_callback(self._stop_nodes)
            for node in self.nodes:
                node.launch(self._node_settings())
            for node in self.nodes:
                await node.ready()
            if len(self.nodes) > 1:
                await self._share_out()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start_node(self, number: int = 0) -> Micros:
        """Start a node again; returns how long it took until it was ready."""
        self._tell(f"starting {self.nodes[number].name}")
        self.nodes[number].launch(self._node_settings())
        return await self.nodes[number].ready()

    def kill_node(self, number: int = 0) -> None:
        """End a node by SIGKILL."""
        self.nodes[number].process.kill()

    def what_ended(self) -> str | None:
        """Tell, for people, what has ended by itself; None if all is well."""
        ends = (self.what_ended_below(), *(node.what_ended() for node in self.nodes))
        return next((ended for ended in ends if ended is not None), None)

    def what_ended_below(self) -> str | None:
        """Tell, for people, what has ended of that without which no node can be; None if all is well."""
        if self._postgres is not None and not self._postgres.is_running:
            return f"Postgres has ended, see {self._folder / 'postgres.log'}"
        return None if self._etcd is None else self._etcd.what_ended()

    async def _share_out(self) -> None:
        """Wait until every node leads its share: the first one to come leads everything until the others have settled.

        Not for ever, since a shard that a node cannot load goes to another. Raises LaunchError if something has ended.
        """
        from duecourse.client import Client, DuecourseError

        settles = bounds.PLACEMENT_SETTLES // bounds.SECOND
        self._tell(f"they serve; waiting until each leads its share of the shards, about {settles} s")
        give_up = self._clock.elapsed() + _SHARING_LIMIT
        async with Client(self.addresses) as client:
            while self._clock.elapsed() < give_up:
                try:
                    if self._is_shared_out(await client.cluster()):
                        return
                except DuecourseError:
                    # If a node has ended, that is told below; else it is asked again.
                    pass
                if (ended := self.what_ended()) is not None:
                    raise LaunchError(ended)
                await self._clock.sleep(_LOOK_EVERY)
        self._tell("not every node leads its share yet: see `duecourse cluster status`")

    def _is_shared_out(self, cluster: "Cluster") -> bool:
        leaders = [shard.leader for shard in cluster.shards if shard.state == "led"]
        led = [leaders.count(node.name) for node in self.nodes]
        return sum(led) == len(cluster.shards) and max(led) <= -(-len(cluster.shards) // len(self.nodes))

    async def _stop_nodes(self) -> None:
        async with asyncio.TaskGroup() as group:
            for node in self.nodes:
                group.create_task(node.stop(), name=f"stop {node.name}")

    async def _start_postgres(self, stack: AsyncExitStack) -> None:
        embedded, migrate = _import_server()
        self._tell("starting Postgres")
        self._postgres = postgres = embedded.EmbeddedPostgres(self._folder, port=free_port())
        who = str(self._pid_file)
        self._nursery.hold(who, signal.SIGINT)
        stack.callback(self._nursery.drop, who)
        try:
            await stack.enter_async_context(postgres)
        except embedded.FolderInUse as error:
            raise LaunchError(f"{error} (--data names another)") from error
        except embedded.EmbeddedPostgresError as error:
            raise LaunchError(str(error)) from error
        self._tell("migrating the store")
        storage = importlib.import_module("duecourse.server.storage")
        try:
            await migrate.migrate(postgres.dsn)
        except (storage.StoreUnavailable, storage.StoreRefused) as error:
            raise LaunchError(f"the store in {self._folder} cannot be used: {error} (--data names another)") from error

    async def _start_etcd(self, stack: AsyncExitStack) -> None:
        self._tell("starting etcd")
        self._etcd = LocalEtcd(self._nursery, self._clock, self._folder)
        stack.push_async_callback(self._etcd.stop)
        await self._etcd.start()

    async def _bind(self) -> None:
        if self._postgres is None:
            return
        if self._etcd is None:
            is_bound = await binding.to_solo(self._postgres.dsn)
        else:
            is_bound = await binding.to_cluster(self._postgres.dsn, self._etcd.endpoint, self._clock)
        if is_bound:
            self._tell(f"the store was run otherwise before: it is {self._coordination}'s now")

    def _node_settings(self) -> dict[str, str]:
        settings = {"store": self._store, "coordination": self._coordination, **self._settings}
        if self._etcd is not None:
            settings["etcd_endpoints"] = self._etcd.endpoint
        if self._postgres is not None:
            settings["postgres_dsn"] = self._postgres.dsn
        return settings


def _import_server() -> tuple[ModuleType, ModuleType]:
    try:
        return (
            importlib.import_module("duecourse.server.storage.embedded"),
            importlib.import_module("duecourse.server.storage.migrate"),
        )
    except ModuleNotFoundError as error:
        raise LaunchError(f"{error.name} is not installed: {extras.how_to_get('server,embedded')}") from error
