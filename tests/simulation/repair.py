"""The operator of a simulated cluster, who does what a node that refuses to start says."""

from typing import TYPE_CHECKING, Final

from simulation.clock import MachineClock
from simulation.nodes import KEYS
from simulation.store import Link, SimulatedStore

from duecourse.model import bounds
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.errors import EtcdError
from duecourse.server.leadership import identity
from duecourse.server.storage import StoreUnavailable

if TYPE_CHECKING:
    from simulation.world import World

_REACTION: Final = 3 * bounds.SECOND


class Operator:
    """See the module's docstring. While it `is_at_work` nobody starts nodes."""

    def __init__(self, world: "World") -> None:
        self.is_at_work = False
        self._world = world
        self._calls = 0

    def call(self) -> None:
        """Have all nodes stopped after a while, the store bound to etcd anew, and nodes started again."""
        if not self.is_at_work:
            self.is_at_work = True
            self._calls += 1
            self._world.loop.process(f"operator#{self._calls}").spawn(self._rebind(), "rebind")

    async def _rebind(self) -> None:
        world = self._world
        clock = MachineClock(world.loop)
        await clock.sleep(_REACTION)
        for node in world.nodes.values():
            if not node.process.is_dead:
                world.kill(node.process, has_notice=True)
        assert world.etcd is not None
        link = Link("operator")
        store = SimulatedStore(world.backing, link, world.loop.current, world.loop.world.context, world.checker)
        async with EtcdClient(world.etcd.endpoints, clock) as client:
            while True:
                try:
                    await identity.rebind(client, KEYS, store)
                    break
                except (EtcdError, StoreUnavailable):
                    await clock.sleep(bounds.SECOND)
        world.checker.coverage["store rebound"] += 1
        for node in world.nodes.values():
            node.is_refused = False
        self.is_at_work = False
