"""A reference that a test owns, a machine beside it, and what passes between them."""

from dataclasses import dataclass, field

from duecourse.model import bounds
from duecourse.model.instants import Micros, Now
from duecourse.server.clock.discipline import Advice, Discipline
from duecourse.server.clock.projection import Reading
from duecourse.server.storage import CLOCK_CONFIRMED_EVERY, ClockRecord

START = 1_800_000_000 * bounds.SECOND
NEVER = ClockRecord(0, "", 0, "", 0)


@dataclass
class World:
    """The reference, the record in its store, and true time, which elapsed time of every machine follows."""

    elapsed: Micros = 1_000 * bounds.SECOND
    ahead: Micros = 0
    """How far the reference has been set forward."""
    record: ClockRecord = NEVER

    @property
    def true(self) -> Micros:
        return START + self.elapsed

    @property
    def reference(self) -> Micros:
        return self.true + self.ahead

    def accept(self, near: Micros | None, by: str, wall_clock_offset: Micros = 0) -> None:
        if near is None or abs(self.reference - near) <= bounds.MAX_OFFSET:
            self.record = ClockRecord(self.reference, by, self.reference, by, wall_clock_offset)

    def confirm(self, near: Micros, by: str, wall_clock_offset: Micros) -> None:
        old = self.record
        is_old = abs(self.reference - old.confirmed) >= CLOCK_CONFIRMED_EVERY
        if is_old and abs(self.reference - near) <= bounds.MAX_OFFSET:
            self.record = ClockRecord(old.accepted, old.accepted_by, self.reference, by, wall_clock_offset)


@dataclass
class Machine:
    """A node, as far as its clock goes."""

    world: World
    name: str = "node"
    wall_ahead: Micros = 0
    others: "list[Machine]" = field(default_factory=list)
    delay: Micros = 100

    def __post_init__(self) -> None:
        self.discipline = Discipline(self.name)

    def wall(self) -> Micros:
        return self.world.true + self.wall_ahead

    def look(self) -> Advice:
        """Read the reference, and do what is advised."""
        sent = self.world.elapsed
        self.world.elapsed += self.delay
        time, record = self.world.reference, self.world.record
        self.world.elapsed += self.delay
        live = [other for other in self.others if other.discipline.is_set]
        offsets = [other.discipline.offset(other.wall(), self.world.elapsed) for other in live]
        reading = Reading(time, sent, self.world.elapsed)
        advice = self.discipline.observe(reading, record, self.wall(), offsets)
        match advice:
            case Advice.ACCEPT:
                self.world.accept(time + 2 * self.delay, self.name, self.wall() - time)
            case Advice.CONFIRM:
                offset = self.discipline.offset(self.wall(), self.world.elapsed)
                self.world.confirm(time, self.name, offset)
        return advice

    def now(self) -> Now:
        return self.discipline.now(self.world.elapsed)


def go_on(*machines: Machine, seconds: float) -> None:
    """Have machines look every quarter of a second, in turn."""
    for _ in range(int(seconds * 4)):
        machines[0].world.elapsed += bounds.SECOND // 4
        for machine in machines:
            machine.look()


def cluster_of(count: int) -> tuple[World, list[Machine]]:
    """Make nodes that have been running for a while."""
    world = World()
    machines = [Machine(world, f"node-{number}") for number in range(count)]
    go_on(machines[0], seconds=1)
    for machine in machines:
        machine.others = [other for other in machines if other is not machine]
    go_on(*machines, seconds=5)
    assert all(machine.discipline.is_set for machine in machines)
    return world, machines
