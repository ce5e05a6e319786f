"""Carries out the faults of a plan, each at its time or at the first moment of its kind after it."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from simulation.loop import Process
from simulation.plan import FaultKind, FaultPlan
from simulation.store import Trouble
from simulation.wire import host_of

from duecourse.model import bounds
from duecourse.model.instants import Micros

if TYPE_CHECKING:
    from simulation.world import World

_STORE: Final = {
    FaultKind.STORE_UNREACHABLE: Trouble.UNREACHABLE,
    FaultKind.STORE_REFUSING: Trouble.REFUSING,
    FaultKind.STORE_LOSSY: Trouble.LOSSY,
    FaultKind.STORE_FROZEN: Trouble.FROZEN,
    FaultKind.STORE_SLOW: Trouble.SLOW,
}
_JUMPS: Final = (-8_000, -1_500, -200, -10, 10, 200, 1_500, 8_000)
_PATIENCE: Final = 4 * bounds.SECOND
"""How long a fault waits for its moment; then it strikes without."""


class Faults:
    """See the module's docstring."""

    def __init__(self, world: "World", plans: Sequence[FaultPlan]) -> None:
        self.fired: Counter[str] = Counter()
        self._world = world
        self._plans = plans
        self._armed: dict[str, list[FaultPlan]] = {}
        self._held_back: dict[str, Micros] = {}
        self._is_stopped = False

    def schedule(self) -> None:
        """Let all strike when it is time."""
        for fault in self._plans:
            self._world.loop.after(fault.at, self._come, fault)

    def stop(self) -> None:
        """Let none strike any more."""
        self._is_stopped = True
        self._armed.clear()
        self._held_back.clear()

    def holds_back(self, host: str) -> bool:
        """Tell whether what was ended on a host is not started again yet."""
        return self._held_back.get(host, 0) > self._world.loop.now

    def happened(self, moment: str, process: Process) -> None:
        """Let faults that waited for a moment strike, if it is a process of theirs that goes through it."""
        waiting = self._armed.get(moment)
        if not waiting:
            return
        for fault in list(waiting):
            if self._concerns(fault, process):
                waiting.remove(fault)
                if fault.reaction:
                    self._world.loop.after(fault.reaction, self._strike, fault)
                else:
                    self._strike(fault)

    def _come(self, fault: FaultPlan) -> None:
        if self._is_stopped:
            return
        if fault.moment is None:
            self._strike(fault)
        else:
            self._armed.setdefault(fault.moment, []).append(fault)
            self._world.loop.after(_PATIENCE, self._lose_patience, fault)

    def _lose_patience(self, fault: FaultPlan) -> None:
        waiting = self._armed.get(fault.moment or "", [])
        if fault in waiting:
            waiting.remove(fault)
            self._strike(fault)

    def _concerns(self, fault: FaultPlan, process: Process) -> bool:
        return fault.kind not in _ON_WORKERS or host_of(process) == self._worker(fault)

    def _strike(self, fault: FaultPlan) -> None:
        if self._is_stopped:
            return
        world = self._world
        if _STRIKES[fault.kind](self, fault):
            self.fired[fault.kind] += 1
            world.checker.coverage[f"fault {fault.kind}"] += 1
            world.note("world", f"strikes: {fault.kind} {fault.target} for {fault.duration / bounds.SECOND:.3f} s")

    def _later(self, fault: FaultPlan, act: Callable[[], object]) -> None:
        self._world.loop.after(fault.duration, self._unless_stopped, act)

    def _unless_stopped(self, act: Callable[[], object]) -> None:
        if not self._is_stopped:
            act()

    # Nodes.

    def _crash_node(self, fault: FaultPlan, *, has_notice: bool) -> bool:
        world = self._world
        node = world.nodes[world.active]
        if node.process.is_dead or node.has_ended:
            return False
        world.kill(node.process, has_notice=has_notice)
        self._held_back[world.active] = world.loop.now + min(fault.duration, 5 * bounds.SECOND)
        return True

    def _pause_node(self, fault: FaultPlan) -> bool:
        node = self._world.nodes[self._world.active]
        if not node.is_up:
            return False
        node.process.pause()
        self._later(fault, partial(_resume, node.process))
        return True

    def _replace_node(self, fault: FaultPlan) -> bool:
        world = self._world
        address = world.next_address()
        if world.is_taken(address):
            return False
        world.start_node(address)
        return True

    def _replace_paused_node(self, fault: FaultPlan) -> bool:
        return self._pause_node(fault) and self._replace_node(fault)

    def _drain_node(self, fault: FaultPlan) -> bool:
        node = self._world.nodes[self._world.active]
        if not node.is_up or node.scheduler is None:
            return False
        node.process.context.copy().run(node.stop)
        return True

    # The store.

    def _trouble_store(self, fault: FaultPlan) -> bool:
        world = self._world
        link = world.links[world.active]
        if link.trouble is not Trouble.NONE:
            return False
        link.trouble = _STORE[fault.kind]
        self._later(fault, link.mend)
        return True

    # The network.

    def _cut_streams(self, fault: FaultPlan, *, has_notice: bool) -> bool:
        world = self._world
        return world.network.cut(self._worker(fault), world.active, has_notice=has_notice) > 0

    def _lose_one_way(self, fault: FaultPlan, *, is_up: bool) -> bool:
        world = self._world
        return world.network.lose_one_way(self._worker(fault), world.active, is_up=is_up) > 0

    def _part(self, fault: FaultPlan, host: str) -> bool:
        world = self._world
        weather = world.network.weather
        address = world.active
        paths = [(host, address), (address, host)]
        if fault.target % 3:
            paths = paths[fault.target % 2 :][:1]
        for path in paths:
            weather.block(*path)
            self._later(fault, partial(weather.unblock, *path))
        return True

    def _part_worker(self, fault: FaultPlan) -> bool:
        return self._part(fault, self._worker(fault))

    def _part_client(self, fault: FaultPlan) -> bool:
        return self._part(fault, self._client(fault))

    def _cut_client(self, fault: FaultPlan) -> bool:
        world = self._world
        return world.network.cut(self._client(fault), world.active, has_notice=bool(fault.target % 2)) > 0

    def _slow_network(self, fault: FaultPlan) -> bool:
        weather = self._world.network.weather
        weather.slow_share = 0.3
        weather.longest = 3 * bounds.SECOND
        self._later(fault, weather.calm)
        return True

    # Workers.

    def _crash_worker(self, fault: FaultPlan) -> bool:
        world = self._world
        name = self._worker(fault)
        worker = world.workers[name]
        if worker.process.is_dead or worker.has_ended:
            return False
        world.kill(worker.process, has_notice=bool(fault.target % 2))
        self._held_back[name] = world.loop.now + fault.duration
        return True

    def _pause_worker(self, fault: FaultPlan) -> bool:
        worker = self._world.workers[self._worker(fault)]
        if not worker.is_up:
            return False
        worker.process.pause()
        self._later(fault, partial(_resume, worker.process))
        return True

    def _stop_worker(self, fault: FaultPlan) -> bool:
        world = self._world
        name = self._worker(fault)
        worker = world.workers[name]
        if not worker.is_up or worker.incarnation is None:
            return False
        self._held_back[name] = world.loop.now + fault.duration
        worker.process.context.copy().run(worker.stop)
        return True

    # Clocks.

    def _jump_clock(self, fault: FaultPlan) -> bool:
        world = self._world
        jump = _JUMPS[fault.target % len(_JUMPS)] * bounds.MILLISECOND
        world.nodes[world.active].clock.offset += jump
        return True

    def _worker(self, fault: FaultPlan) -> str:
        return f"worker{fault.target % self._world.plan.setup.workers}"

    def _client(self, fault: FaultPlan) -> str:
        return f"client{fault.target % self._world.plan.setup.clients}"


def _resume(process: Process) -> None:
    if process.is_paused and not process.is_dead:
        process.resume()


_ON_WORKERS: Final = (FaultKind.WORKER_CRASH, FaultKind.WORKER_PAUSE)

_STRIKES: Final[dict[FaultKind, Callable[[Faults, FaultPlan], bool]]] = {
    FaultKind.NODE_CRASH: partial(Faults._crash_node, has_notice=True),
    FaultKind.NODE_LOST: partial(Faults._crash_node, has_notice=False),
    FaultKind.NODE_PAUSE: Faults._pause_node,
    FaultKind.NODE_REPLACED: Faults._replace_node,
    FaultKind.NODE_REPLACED_WHILE_PAUSED: Faults._replace_paused_node,
    FaultKind.NODE_DRAIN: Faults._drain_node,
    **dict.fromkeys(_STORE, Faults._trouble_store),
    FaultKind.STREAMS_CUT: partial(Faults._cut_streams, has_notice=True),
    FaultKind.STREAMS_LOST: partial(Faults._cut_streams, has_notice=False),
    FaultKind.STREAMS_DEAF: partial(Faults._lose_one_way, is_up=True),
    FaultKind.STREAMS_MUTE: partial(Faults._lose_one_way, is_up=False),
    FaultKind.WORKER_PARTITION: Faults._part_worker,
    FaultKind.CLIENT_PARTITION: Faults._part_client,
    FaultKind.CLIENT_CUT: Faults._cut_client,
    FaultKind.SLOW_NETWORK: Faults._slow_network,
    FaultKind.WORKER_CRASH: Faults._crash_worker,
    FaultKind.WORKER_PAUSE: Faults._pause_worker,
    FaultKind.WORKER_STOP: Faults._stop_worker,
    FaultKind.CLOCK_JUMP: Faults._jump_clock,
}
