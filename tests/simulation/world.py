"""A run: a cluster, its clients and workers, and the faults of a plan, from the first moment to a verdict.

*Safety*: faults strike for as long as the plan says, and what must hold is checked all the time. *Liveness*: then all
that is not gone for good is healed, and everything due has to come to its end within bounds, without help.
"""

import gc
import sys
import traceback
from collections import Counter
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from simulation import machine
from simulation.checker import Checker
from simulation.clock import MachineClock
from simulation.copies import Copies
from simulation.etcd import SimulatedEtcd
from simulation.faults import Faults
from simulation.fleets import ADDRESSES, Assembly, Fleet, Succession
from simulation.healing import STEP, Healing
from simulation.history import Violation
from simulation.hosts import Brief, Submitter, Worker, incarnation_of
from simulation.loop import Deadlock, Process, SimulationLoop
from simulation.network import Network
from simulation.nodes import Node
from simulation.plan import SHORTEST, Kind, Plan
from simulation.repair import Operator
from simulation.store import Link, SimulatedStore

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import Progress, Task, TaskKey
from duecourse.server.storage.memory import MemoryStore

_ALARMS: Final = frozenset(("shard_failed", "unexpected_error", "protocol violated", "write_set_aside"))
_CALLS_FOR_OPERATOR: Final = frozenset(("shard_foreign", "store_ahead_of_etcd"))
_REPAIRED_WITHIN: Final = 2 * bounds.MINUTE
_AFTERMATH: Final = 3 * bounds.SECOND
"""How long what a fault has done goes on after it."""


@dataclass(slots=True)
class Result:
    """What came of a run."""

    plan: Plan
    violations: Sequence[Violation]
    coverage: Counter[str]
    steps: int
    digest: int
    simulated: Micros
    tasks: int
    changes_of_leader: int
    fired: Counter[str]
    records: Sequence[tuple[TaskKey, bytes, Progress]] = field(repr=False)
    """Key, uid and last state of every task that the checker still knows of."""
    trace: Sequence[str] = field(repr=False)

    @property
    def counts(self) -> bool:
        """Whether enough went on in it: nodes, workers, tasks, time, faults, and a change of leader."""
        return (
            (self.plan.setup.nodes >= 3 or self.plan.setup.kind is Kind.SOLO)
            and self.plan.setup.workers >= 2
            and self.tasks >= 100
            and self.simulated >= SHORTEST
            and self.fired.total() >= 3
            and self.changes_of_leader >= 1
        )


def run(plan: Plan, *, is_verbose: bool = False) -> Result:
    """Run a plan."""
    _freeze_once()
    gc.disable()
    try:
        return _run(plan, is_verbose=is_verbose)
    finally:
        gc.collect()
        gc.enable()


@cache
def _freeze_once() -> None:
    """Have the collector pass over what is there before any run.

    Nothing of a run is garbage before its end, and then nearly all is, so that it is collected once.
    """
    gc.collect()
    gc.freeze()


def _run(plan: Plan, *, is_verbose: bool) -> Result:
    world = World(plan, is_verbose=is_verbose)
    with machine.replaced(world.network, plan.seed, world.log, is_verbose=is_verbose):
        try:
            world.loop.run(world.live())
        except Deadlock:
            world.checker.fail("L1", "nothing can run any more")
    return world.result()


class World:
    """See the module's docstring."""

    def __init__(self, plan: Plan, *, is_verbose: bool) -> None:
        setup = plan.setup
        self.plan = plan
        # What our code asks of a loop is there, the rest of its contract is not.
        self.loop = SimulationLoop(plan.seed, step=setup.step, is_shuffled=setup.is_shuffled)  # type: ignore[abstract]
        self.trace: list[str] = []
        self.checker = Checker(self.loop, self.note if is_verbose else None)
        self.network = Network(self.loop, plan.seed, self.checker)
        self.nodes: dict[str, Node] = {}
        """The latest at each address."""
        self.workers: dict[str, Worker] = {}
        self.links = {address: Link(f"{plan.seed} {address}") for address in ADDRESSES}
        self._healed_at: Micros | None = None
        self.backing = MemoryStore(setup.shards, self.checker.reference.read)
        self._clocks: dict[str, MachineClock] = {}
        self._briefs = {task.task_id: Brief(task) for task in plan.tasks}
        self._starts: Counter[str] = Counter()
        self._clients: list[Submitter] = []
        self.faults = Faults(self, plan.faults)
        self._ended_at: Micros = 0
        self.fleet: Fleet = Succession(self) if setup.kind is Kind.SOLO else Assembly(self)
        self.etcd = (
            SimulatedEtcd(self.network, plan.seed, setup.members, self.checker.happened) if setup.members else None
        )
        self.copies = Copies(self, self.backing)
        self.operator = Operator(self)
        self.checker.attach(
            strike=self.faults.happened,
            is_calm=self._is_calm,
            is_counted_on=lambda token: any(worker.counts_on(token) for worker in self.workers.values()),
            find=self._find,
            retention=setup.retention,
        )

    # What the run is told.

    def note(self, who: str, text: str) -> None:
        """Write a line of the trace."""
        self.trace.append(f"{self.loop.now / bounds.SECOND:11.6f} {who:8} {text}")

    def log(self, level: str, event: MutableMapping[str, Any]) -> None:
        """Take in a log event of whoever runs now."""
        name = str(event.get("event"))
        process = self.loop.current
        # What a store has lost may break a shard that goes on; its term ends, and that mends it.
        is_excused = name == "shard_failed" and event.get("shard") in self.checker.shards_behind
        if name in _ALARMS and not process.is_dead and not is_excused:
            error = event.get("exc_info")
            self.checker.fail("S20", f"{process} logs {name}: {_fields(event)} {_describe(error)}")
        if name in _CALLS_FOR_OPERATOR:
            self.operator.call()
        self.note(process.name, f"log {name} {_fields(event)}")

    # What faults do to it.

    def start_node(self, address: str) -> Node:
        """Start a node at an address, in place of one that has ended there."""
        process = self._process(address)
        store = SimulatedStore(self.backing, self.links[address], process, self.loop.world.context, self.checker)
        node = Node(
            self.plan.setup,
            address,
            process,
            self._clock(address),
            store,
            self.network,
            self.checker,
            self.etcd_hosts(),
        )
        self.nodes[address] = node
        self.note(process.name, "starts")
        process.spawn(node.run(), process.name)
        return node

    def start_worker(self, name: str) -> Worker:
        """Start a worker."""
        process = self._process(name)
        worker = Worker(self.plan.setup, name, self.fleet.known, process, self._clock(name), self._briefs, self.checker)
        self.workers[name] = worker
        self.note(process.name, "starts")
        process.spawn(worker.run(), process.name)
        return worker

    def etcd_hosts(self) -> Sequence[str]:
        """Return the machines that etcd runs on."""
        return [] if self.etcd is None else self.etcd.endpoints

    def kill(self, process: Process, *, has_notice: bool) -> None:
        """End a process as SIGKILL does, or as a power cut does, which nobody notices."""
        process.kill()
        self.network.gone(process, has_notice=has_notice)

    # The run.

    async def live(self) -> None:
        """Live through the plan."""
        setup = self.plan.setup
        clock = MachineClock(self.loop)
        if self.etcd is not None:
            self.etcd.start()
        self.fleet.begin()
        for number in range(setup.workers):
            self.start_worker(f"worker{number}")
        for number in range(setup.clients):
            self._start_client(number)
        self.faults.schedule()
        while (self.loop.now < setup.duration or self.operator.is_at_work) and self.is_sound():
            await clock.sleep(STEP)
            self.copies.take()
            self.watch_over()
            if self.loop.now >= setup.duration:
                self.faults.stop()
                if self.etcd is not None:
                    # The operator needs it.
                    self.etcd.heal()
            if self.loop.now > setup.duration + _REPAIRED_WITHIN:
                self.checker.fail("L4", "the operator has not brought the nodes back")
        if self.is_sound():
            self._heal()
            await Healing(self).watch(clock)
        if self.is_sound():
            self.checker.check_store([record.task for record in self.backing._records.values()])
        self.faults.stop()
        self._ended_at = self.loop.now

    def result(self) -> Result:
        """Sum up."""
        checker = self.checker
        for failure in self.loop.failures:
            checker.fail("S20", failure)
        return Result(
            self.plan,
            checker.violations,
            checker.coverage,
            self.loop.steps,
            self.loop.digest,
            self._ended_at,
            len(checker.stored),
            self.faults.changes_of_leader,
            self.faults.fired,
            [(key, record.task.uid, record.progress) for key, record in checker.records.items()],
            self.trace,
        )

    def is_sound(self) -> bool:
        """Tell whether nothing was broken yet."""
        return not self.checker.violations and not self.loop.failures

    def watch_over(self) -> None:
        """Do what an operator's supervisor does: start again what has ended."""
        for one in self.nodes.values():
            is_missed = one.metrics.audit_misses > one.excused_misses
            # Looked at from step to step: what was counted just before a new term is excused as well.
            if self.checker.was_behind_since(self.loop.now - 2 * STEP):
                one.excused_misses = one.metrics.audit_misses
            elif is_missed:
                self.checker.fail("L1", f"{one.process} had missed a due task that the store holds")
        self.fleet.watch_over()
        setup = self.plan.setup
        for name, worker in self.workers.items():
            worker.check_leases()
            if worker.credit > setup.slots + setup.prefetch:
                self.checker.fail("P9", f"{name} has {worker.credit} credit out")
            if (worker.has_ended or worker.process.is_dead) and not self.faults.holds_back(name):
                self.start_worker(name)

    def _is_calm(self, incarnation: str) -> bool:
        """Tell whether nothing has kept a worker from its leaders for longer than a lease may outlast silence."""
        setup = self.plan.setup
        lasts = max(setup.lease, bounds.SILENT_INTERVALS * setup.heartbeat + bounds.LISTEN_MARGIN) + setup.heartbeat
        since = self.loop.now - lasts - _AFTERMATH
        living = (worker for worker in self.workers.values() if worker.is_up and worker.process.began_at < since)
        is_there = any(incarnation_of(worker.process) == incarnation for worker in living)
        healed_at = 0 if self._healed_at is None else self._healed_at
        return is_there and max(self.faults.troubled_until, healed_at) < since

    def _find(self, key: TaskKey) -> Task | None:
        record = self.backing._records.get(key)
        return None if record is None else record.task

    def _heal(self) -> None:
        self._healed_at = self.loop.now
        self.faults.stop()
        self.note("world", "is healed")
        self.network.weather.clear()
        for link in self.links.values():
            link.mend()
        for clock in self._clocks.values():
            clock.offset = 0
        self.checker.reference.mend()
        if self.etcd is not None:
            self.etcd.heal()
        self.fleet.heal()
        for worker in self.workers.values():
            if worker.process.is_paused:
                worker.process.resume()

    def have_clients_ended(self) -> bool:
        """Tell whether all was asked for and answered."""
        return all(client.has_ended for client in self._clients)

    def _start_client(self, number: int) -> None:
        name = f"client{number}"
        briefs = [brief for brief in self._briefs.values() if brief.plan.client == number]
        process = self._process(name)
        client = Submitter(name, self.fleet.known, process, self._clock(name), briefs, self.checker, self.loop)
        self._clients.append(client)
        process.spawn(client.run(), name)

    def _process(self, host: str) -> Process:
        self._starts[host] += 1
        return self.loop.process(f"{host}#{self._starts[host]}")

    def _clock(self, host: str) -> MachineClock:
        clock = self._clocks.get(host)
        if clock is None:
            number = len(self._clocks)
            drift = (number % 5 - 2) * 50e-6
            clock = self._clocks[host] = MachineClock(self.loop, number * bounds.HOUR, drift)
        return clock


def _fields(event: MutableMapping[str, Any]) -> str:
    hidden = ("event", "component", "exc_info", "level")
    return " ".join(f"{name}={value}" for name, value in event.items() if name not in hidden)


def _describe(error: object) -> str:
    if error is True:
        error = sys.exc_info()[1]
    if not isinstance(error, BaseException):
        return ""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))
    return f"{error!r} at {where}"
