"""The operator of a simulated cluster, who does what a node that refuses to start says."""

from typing import TYPE_CHECKING, Final

from simulation.clock import MachineClock
from simulation.nodes import KEYS
from simulation.plan import FaultKind
from simulation.store import Link, SimulatedStore

from duecourse.model import bounds
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.errors import EtcdError
from duecourse.server.leadership import identity
from duecourse.server.storage import StoreUnavailable

if TYPE_CHECKING:
    from simulation.world import World

_REACTION: Final = 3 * bounds.SECOND
_SETBACKS: Final = (FaultKind.ETCD_RESTORED, FaultKind.STORE_FELL_BACK)


class Operator:
    """See the module's docstring. While it `is_at_work` nobody starts nodes."""

    def __init__(self, world: "World") -> None:
        self.is_at_work = False
        self.rebinds = 0
        """How often it has bound the store anew."""
        self._world = world
        self._calls = 0
        self._known_setbacks = 0
        """Of those that it was called for."""

    def call(self) -> None:
        """Have all nodes stopped after a while, the store bound to etcd anew, and nodes started again."""
        if self.is_at_work:
            return
        setbacks = sum(self._world.faults.fired[kind] for kind in _SETBACKS)
        if setbacks == self._known_setbacks:
            self._world.checker.fail("L4", "a node calls for the operator, though neither etcd nor the store went back")
        self._known_setbacks = setbacks
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
        self.rebinds += 1
        world.checker.coverage["store rebound"] += 1
        for node in world.nodes.values():
            node.is_refused = False
        self.is_at_work = False
