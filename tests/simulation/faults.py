"""Carries out the faults of a plan, each at its time or at the first moment of its kind after it.

A fault of nodes, or of their links, that waited for a moment strikes the node that went through it, if it was a node;
else whom its plan says. What would change nothing does not strike and is not counted, and what ends undoes what it did
itself, and nothing that another fault did.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from simulation import etcd_strikes
from simulation.loop import Process
from simulation.plan import FaultKind, FaultPlan
from simulation.store import Trouble

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
_STORE_JUMPS: Final = (-3_600_000, -3_000, -400, -10, 10, 400, 3_000, 3_600_000)
_PATIENCE: Final = 4 * bounds.SECOND
"""How long a fault waits for its moment; then it strikes without."""
_SLOW_SHARE: Final = 0.3
_TAKEN_ANEW: Final = 15 * bounds.SECOND
"""By then the shards of a store that has fallen back were taken again."""


class Faults:
    """See the module's docstring."""

    def __init__(self, world: "World", plans: Sequence[FaultPlan]) -> None:
        self.fired: Counter[str] = Counter()
        self.troubled_until: Micros = 0
        """Up to then, workers or what they need may have been out of reach."""
        self._world = world
        self._plans = plans
        self._armed: dict[str, list[FaultPlan]] = {}
        self._held_back: dict[str, Micros] = {}
        self._is_stopped = False
        self._fell_back_at: Micros = -_TAKEN_ANEW
        self._rebinds_when_restored: int | None = None
        """How often the operator had bound the store anew when etcd was restored last."""
        self._changes_before: int | None = None

    @property
    def changes_of_leader(self) -> int:
        """How often a shard got another leader since the first fault: nodes that join hand shards over without one."""
        before = self._changes_before
        return 0 if before is None else self._world.checker.changes_of_leader - before

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
                    self._world.loop.after(fault.reaction, self._strike, fault, process)
                else:
                    self._strike(fault, process)

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
        """Tell whether a fault strikes as a process goes through its moment: another worker's is not a worker's."""
        host = process.host
        return fault.kind not in _ON_WORKERS or host not in self._world.workers or host == self._worker(fault)

    def _strike(self, fault: FaultPlan, process: Process | None = None) -> None:
        """Let a fault strike; `process` went through the moment that it had waited for."""
        if self._is_stopped:
            return
        world = self._world
        address = self._victim(fault, process)
        if _STRIKES[fault.kind](self, fault, address):
            if self._changes_before is None:
                self._changes_before = world.checker.changes_of_leader
            self.fired[fault.kind] += 1
            if fault.kind not in _ELSEWHERE:
                self.troubled_until = max(self.troubled_until, world.loop.now + fault.duration)
            world.checker.coverage[f"fault {fault.kind}"] += 1
            moment = "" if process is None else f", at {fault.moment!r} of {process}"
            lasting = f"{fault.duration / bounds.SECOND:.3f} s"
            whom = f"{address}/{self._worker(fault)}"
            world.note("world", f"strikes: {fault.kind} on {whom} for {lasting}{moment}")

    def _victim(self, fault: FaultPlan, process: Process | None) -> str:
        """Return the address of the node that a fault strikes, if it strikes a node."""
        for address, node in self._world.nodes.items():
            if node.process is process and not node.is_gone:
                return address
        return self._world.fleet.victim(fault.target)

    def _later(self, fault: FaultPlan, act: Callable[[], object]) -> None:
        self._world.loop.after(fault.duration, self._unless_stopped, act)

    def _unless_stopped(self, act: Callable[[], object]) -> None:
        if not self._is_stopped:
            act()

    # Nodes.

    def _crash_node(self, fault: FaultPlan, address: str, *, has_notice: bool) -> bool:
        world = self._world
        node = world.nodes[address]
        if node.is_gone:
            return False
        world.kill(node.process, has_notice=has_notice)
        self._hold_back(address, min(fault.duration, 5 * bounds.SECOND))
        return True

    def _pause_node(self, fault: FaultPlan, address: str) -> bool:
        node = self._world.nodes[address]
        if not node.is_up:
            return False
        node.process.pause()
        self._later(fault, partial(_resume, node.process))
        return True

    def _join_node(self, fault: FaultPlan, address: str) -> bool:
        return self._world.fleet.join(self._world.fleet.next_address())

    def _replace_paused_node(self, fault: FaultPlan, address: str) -> bool:
        is_up = self._world.nodes[address].is_up
        return is_up and self._join_node(fault, address) and self._pause_node(fault, address)

    def _drain_node(self, fault: FaultPlan, address: str) -> bool:
        node = self._world.nodes[address]
        if not node.is_up or node.is_draining or node.scheduler is None:
            return False
        node.process.context.copy().run(node.stop)
        return True

    def _remove_node(self, fault: FaultPlan, address: str) -> bool:
        if not self._drain_node(fault, address):
            return False
        self._hold_back(address, bounds.SECOND + fault.duration)
        return True

    # The store.

    def _trouble_store(self, fault: FaultPlan, address: str) -> bool:
        return not self._is_gone(address) and self._trouble_link(fault, address, _STORE[fault.kind])

    def _trouble_all_links(self, fault: FaultPlan, address: str) -> bool:
        troubles = list(_STORE.values())
        trouble = troubles[fault.target % len(troubles)]
        well = [one for one, link in self._world.links.items() if link.trouble is Trouble.NONE]
        if all(self._is_gone(one) for one in well):
            return False
        # Also of those that may join meanwhile.
        for one in well:
            self._trouble_link(fault, one, trouble)
        return True

    def _fall_back(self, fault: FaultPlan, address: str) -> bool:
        # If both have forgotten, nobody knows which epochs were given.
        operator = self._world.operator
        is_etcd_behind = operator.is_at_work or operator.rebinds == self._rebinds_when_restored
        if is_etcd_behind or not self._world.copies.fall_back(fault.target):
            return False
        self._fell_back_at = self._world.loop.now
        return True

    def _trouble_link(self, fault: FaultPlan, address: str, trouble: Trouble) -> bool:
        link = self._world.links[address]
        if link.trouble is not Trouble.NONE:
            return False
        link.trouble = trouble
        self._later(fault, link.mend)
        return True

    def _spoil_record(self, fault: FaultPlan, address: str) -> bool:
        checker = self._world.checker
        keys = [record.task.key for record in checker.unfinished()]
        sound = [key for key in keys if not (checker.has_lost(key) or checker.is_spoiled(key))]
        if not sound:
            return False
        key = sound[fault.target % len(sound)]
        self._world.backing.spoil(key)
        checker.spoiled(key)
        return True

    # The network.

    def _cut_streams(self, fault: FaultPlan, address: str, *, has_notice: bool) -> bool:
        return self._world.network.cut(self._worker(fault), address, has_notice=has_notice) > 0

    def _lose_one_way(self, fault: FaultPlan, address: str, *, is_up: bool) -> bool:
        return self._world.network.lose_one_way(self._worker(fault), address, is_up=is_up) > 0

    def _cut_client(self, fault: FaultPlan, address: str) -> bool:
        return self._world.network.cut(self._client(fault), address, has_notice=bool(fault.target % 2)) > 0

    def _part_worker(self, fault: FaultPlan, address: str) -> bool:
        name = self._worker(fault)
        worker = self._world.workers[name]
        return not (worker.process.is_dead or worker.has_ended) and self._part(fault, address, name)

    def _part_client(self, fault: FaultPlan, address: str) -> bool:
        return self._part(fault, address, self._client(fault))

    def _part_nodes(self, fault: FaultPlan, address: str) -> bool:
        others = [other for other in self._world.nodes if other != address]
        other = others[fault.target % len(others)]
        return not self._is_gone(other) and self._part(fault, address, other)

    def _part(self, fault: FaultPlan, address: str, host: str) -> bool:
        """Part a node from a host; one way only, at times."""
        paths = [(host, address), (address, host)]
        if fault.target % 3:
            paths = paths[fault.target % 2 :][:1]
        return not self._is_gone(address) and self._block(fault, paths)

    def _isolate_node(self, fault: FaultPlan, address: str) -> bool:
        world = self._world
        if self._is_gone(address):
            return False
        trouble = Trouble.FROZEN if fault.target % 2 else Trouble.UNREACHABLE
        has_lost_store = self._trouble_link(fault, address, trouble)
        others = [*(other for other in world.nodes if other != address), *world.etcd_hosts()]
        paths = [path for other in others for path in ((address, other), (other, address))]
        return self._block(fault, paths) or has_lost_store

    def _block(self, fault: FaultPlan, paths: Sequence[tuple[str, str]]) -> bool:
        weather = self._world.network.weather
        if not weather.part(paths):
            return False
        self._later(fault, partial(weather.rejoin, paths))
        return True

    def _slow_network(self, fault: FaultPlan, address: str) -> bool:
        weather = self._world.network.weather
        if weather.slow_share == _SLOW_SHARE:
            return False
        weather.slow_share = _SLOW_SHARE
        weather.longest = 3 * bounds.SECOND
        self._later(fault, weather.calm)
        return True

    # Workers.

    def _crash_worker(self, fault: FaultPlan, address: str) -> bool:
        world = self._world
        name = self._worker(fault)
        worker = world.workers[name]
        if worker.process.is_dead or worker.has_ended:
            return False
        world.kill(worker.process, has_notice=bool(fault.target % 2))
        self._hold_back(name, fault.duration)
        return True

    def _pause_worker(self, fault: FaultPlan, address: str) -> bool:
        worker = self._world.workers[self._worker(fault)]
        if not worker.is_up:
            return False
        worker.process.pause()
        self._later(fault, partial(_resume, worker.process))
        return True

    def _stop_worker(self, fault: FaultPlan, address: str) -> bool:
        name = self._worker(fault)
        worker = self._world.workers[name]
        if not worker.is_up or worker.incarnation is None or worker.incarnation._stopping.is_set():
            return False
        self._hold_back(name, fault.duration)
        worker.process.context.copy().run(worker.stop)
        return True

    # Clocks.

    def _jump_clock(self, fault: FaultPlan, address: str) -> bool:
        if self._is_gone(address):
            return False
        self._world.nodes[address].clock.offset += _JUMPS[fault.target % len(_JUMPS)] * bounds.MILLISECOND
        return True

    def _jump_store_clock(self, fault: FaultPlan, address: str) -> bool:
        self._world.checker.reference.jump(_STORE_JUMPS[fault.target % len(_STORE_JUMPS)] * bounds.MILLISECOND)
        return True

    def _jump_all_clocks(self, fault: FaultPlan, address: str) -> bool:
        """Set all wall clocks right, say: the store's is to be followed then."""
        jump = _JUMPS[fault.target % len(_JUMPS)] * bounds.MILLISECOND
        self._world.checker.reference.jump(jump)
        for node in self._world.nodes.values():
            node.clock.offset += jump
        return True

    # Etcd.

    def _restore_etcd(self, fault: FaultPlan, address: str) -> bool:
        operator = self._world.operator
        has_just_fallen_back = self._world.loop.now < self._fell_back_at + _TAKEN_ANEW
        if has_just_fallen_back or operator.is_at_work or not self._world.copies.restore_etcd(fault.target):
            return False
        self._rebinds_when_restored = operator.rebinds
        return True

    def _trouble_etcd(self, fault: FaultPlan, address: str) -> bool:
        lasting = replace(fault, duration=etcd_strikes.shortened(fault))
        return etcd_strikes.STRIKES[fault.kind](self._world, lasting, address, partial(self._later, lasting))

    def _is_gone(self, address: str) -> bool:
        """Tell whether no process is there."""
        node = self._world.nodes.get(address)
        return node is None or node.is_gone

    def _hold_back(self, host: str, duration: Micros) -> None:
        self._held_back[host] = max(self._held_back.get(host, 0), self._world.loop.now + duration)

    def _worker(self, fault: FaultPlan) -> str:
        return f"worker{fault.target % self._world.plan.setup.workers}"

    def _client(self, fault: FaultPlan) -> str:
        return f"client{fault.target % self._world.plan.setup.clients}"


def _resume(process: Process) -> None:
    if process.is_paused and not process.is_dead:
        process.resume()


_ELSEWHERE: Final = frozenset(
    (
        *etcd_strikes.STRIKES,
        FaultKind.NODE_DRAIN,
        FaultKind.NODE_JOINS,
        FaultKind.NODE_LEAVES,
        FaultKind.CLOCK_JUMP,
        FaultKind.RECORD_SPOILED,
    )
)
"""What moves leaders or concerns one task at most, while workers reach them and they reach the store."""
_ON_WORKERS: Final = (FaultKind.WORKER_CRASH, FaultKind.WORKER_PAUSE)

_STRIKES: Final[dict[FaultKind, Callable[[Faults, FaultPlan, str], bool]]] = {
    FaultKind.NODE_CRASH: partial(Faults._crash_node, has_notice=True),
    FaultKind.NODE_LOST: partial(Faults._crash_node, has_notice=False),
    FaultKind.NODE_PAUSE: Faults._pause_node,
    FaultKind.NODE_REPLACED: Faults._join_node,
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
    FaultKind.STORE_GONE_FOR_ALL: Faults._trouble_all_links,
    FaultKind.NODE_PAIR_PARTITION: Faults._part_nodes,
    FaultKind.NODE_ISOLATED: Faults._isolate_node,
    FaultKind.NODE_JOINS: Faults._join_node,
    FaultKind.NODE_LEAVES: Faults._remove_node,
    FaultKind.ETCD_RESTORED: Faults._restore_etcd,
    FaultKind.STORE_FELL_BACK: Faults._fall_back,
    FaultKind.RECORD_SPOILED: Faults._spoil_record,
    FaultKind.STORE_CLOCK_JUMP: Faults._jump_store_clock,
    FaultKind.ALL_CLOCKS_JUMP: Faults._jump_all_clocks,
    **dict.fromkeys(etcd_strikes.STRIKES, Faults._trouble_etcd),
}
