"""Which nodes there are, and who starts them again: an operator's supervisor, for either kind of cluster."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from simulation.nodes import Node, api_address
from simulation.plan import Leaving
from simulation.store import Trouble

from duecourse.model import bounds
from duecourse.model.instants import Micros

if TYPE_CHECKING:
    from simulation.world import World

ADDRESSES: Final = ("a", "b", "c", "d", "e")
_SOLO_ADDRESSES: Final = ADDRESSES[:3]
_RESTART: Final = bounds.SECOND
"""How long a supervisor waits before it starts what has ended."""


class Fleet(Protocol):
    """See the module's docstring."""

    known: Sequence[str]
    """The addresses that workers and clients are told of."""

    def begin(self) -> None:
        """Start the first nodes."""
        ...

    def victim(self, target: int) -> str:
        """Return the address that a fault strikes."""
        ...

    def next_address(self) -> str:
        """Return where the next node would start."""
        ...

    def join(self, address: str) -> bool:
        """Start a node at an address from now on; False: there is one."""
        ...

    def watch_over(self) -> None:
        """Start again what has ended."""
        ...

    def heal(self) -> None:
        """Mend what is not gone for good."""
        ...

    def sound(self) -> Sequence[Node]:
        """Return the nodes that have to do their work once all is healed."""
        ...


class Succession:
    """One node at a time, each followed by another elsewhere."""

    def __init__(self, world: "World") -> None:
        self.known: Sequence[str] = [api_address(host) for host in _SOLO_ADDRESSES]
        self._world = world
        self._active = ""

    def begin(self) -> None:
        """Start a node."""
        self.join(_SOLO_ADDRESSES[0])

    def victim(self, target: int) -> str:
        """Return the address of the node that was started last."""
        return self._active

    def next_address(self) -> str:
        """Return an address where no node runs, other than the active one's if there is one."""
        index = _SOLO_ADDRESSES.index(self._active)
        order = [*_SOLO_ADDRESSES[index + 1 :], *_SOLO_ADDRESSES[: index + 1]]
        return next((one for one in order if not self._is_taken(one)), self._active)

    def join(self, address: str) -> bool:
        """Start a node; it replaces the active one."""
        if self._is_taken(address):
            return False
        self._active = address
        self._world.start_node(address)
        return True

    def watch_over(self) -> None:
        """Start a node if none runs any more."""
        world = self._world
        node = world.nodes[self._active]
        if node.is_gone and not world.faults.holds_back(self._active):
            running = [one for one in world.nodes.values() if one.is_up]
            if running:
                self._active = running[-1].address
            else:
                self._start(self.next_address())

    def heal(self) -> None:
        """Let go on what was paused, and start a node if none runs."""
        world = self._world
        for node in world.nodes.values():
            if node.process.is_paused and world.plan.setup.leaves_paused:
                world.network.gone(node.process, has_notice=False)
            elif node.process.is_paused:
                node.process.resume()
        if not world.nodes[self._active].is_up:
            self._start(self.next_address())

    def sound(self) -> Sequence[Node]:
        """Return the active node."""
        return [self._world.nodes[self._active]]

    def _start(self, address: str) -> None:
        self._active = address
        self._world.start_node(address)

    def _is_taken(self, address: str) -> bool:
        """Tell whether a process runs at an address, be it paused."""
        node = self._world.nodes.get(address)
        return node is not None and not node.is_gone


class Assembly:
    """Several nodes that meet in etcd. Each comes back where it was; more may join."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._wanted = list(ADDRESSES[: world.plan.setup.nodes])
        self.known: Sequence[str] = [api_address(host) for host in self._wanted]
        self._ended_at: dict[Node, Micros] = {}
        self._broken: set[str] = set()
        """Left so when all else was healed."""

    def begin(self) -> None:
        """Start the first nodes."""
        for address in self._wanted:
            self._world.start_node(address)

    def victim(self, target: int) -> str:
        """Return an address."""
        return self._wanted[target % len(self._wanted)]

    def next_address(self) -> str:
        """Return an address that was not used yet, or else the last one."""
        return ADDRESSES[min(len(self._wanted), len(ADDRESSES) - 1)]

    def join(self, address: str) -> bool:
        """Start one more node, unless the operator has all nodes stopped."""
        if address in self._wanted or self._world.operator.is_at_work:
            return False
        self._wanted.append(address)
        self._world.start_node(address)
        return True

    def watch_over(self) -> None:
        """Start again what has ended, after a while."""
        world = self._world
        if world.operator.is_at_work:
            return
        for address in self._wanted:
            node = world.nodes[address]
            if address in self._broken or not node.is_gone:
                continue
            if node.is_refused:
                world.operator.call()
                return
            ended_at = self._ended_at.setdefault(node, world.loop.now)
            if world.loop.now >= ended_at + _RESTART and not world.faults.holds_back(address):
                del self._ended_at[node]
                world.start_node(address)

    def heal(self) -> None:
        """Let go on what was paused; all but at most one node are well from now on."""
        world = self._world
        self._leave_one(world.plan.setup.leaving)
        for address in self._wanted:
            node = world.nodes[address]
            if node.process.is_paused and address not in self._broken:
                node.process.resume()

    def sound(self) -> Sequence[Node]:
        """Return all but those that were left broken."""
        return [self._world.nodes[address] for address in self._wanted if address not in self._broken]

    def _leave_one(self, leaving: Leaving) -> None:
        """Leave one node broken."""
        world = self._world
        address = self._most_broken(leaving)
        node = world.nodes[address]
        match leaving:
            case Leaving.NOTHING:
                return
            case Leaving.PAUSED:
                node.process.pause()
                world.network.gone(node.process, has_notice=False)
            case Leaving.DEAD:
                world.kill(node.process, has_notice=False)
            case Leaving.WITHOUT_STORE:
                world.links[address].trouble = Trouble.UNREACHABLE
            case Leaving.WITHOUT_ETCD:
                assert world.etcd is not None
                for member in world.etcd.members:
                    world.network.weather.block(address, member.endpoint)
                    world.network.weather.block(member.endpoint, address)
        if node.process.is_paused and leaving not in (Leaving.PAUSED, Leaving.DEAD):
            node.process.resume()
        self._broken.add(address)
        world.checker.coverage[f"node left {leaving}"] += 1
        world.note("world", f"leaves {address} {leaving}")

    def _most_broken(self, leaving: Leaving) -> str:
        """Return who is broken already, if there is one; but a dead node cannot be without anything."""
        nodes = [self._world.nodes[address] for address in self._wanted]
        if leaving is not Leaving.DEAD:
            nodes = [node for node in nodes if not node.is_gone] or [self._world.start_node(self._wanted[0])]
        return min(nodes, key=lambda node: node.is_up).address
