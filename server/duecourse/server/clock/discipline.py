"""`Discipline`: decides which readings of the reference the cluster clock follows. Pure: no I/O, no clock of its own.

The cluster clock is the reference, kept from running backwards: its interval never begins after what the reference has
reached, so that nothing fires early, and where the reference was set back, it stands still until the reference has
caught up. A step of the reference of up to MAX_OFFSET is followed at once; it is not slewed, since a clock that slews
is wrong on purpose for as long as it does.

    not set ──────────────▶ following ◀──────────────▶ alarmed: runs on without it
             accepted or               further than      accepted, or back by itself
             confirmed by others       MAX_OFFSET

A reading further off is followed only once accepted. What counts is the store's record, which all nodes read with each
reading: one that was written since the node's last look, at a time of the reference's that agrees with what the
reference shows now, and that it cannot have shown before it stepped, accepts what it shows. A node has it written when
the wall clocks of more than half of the live nodes lie within MAX_OFFSET of the reference; an operator may. Both are
written only if the reference is, in that very statement, still where it was seen. Until then the clock runs on as if
the reference had not stepped, so that it is hardly less precise. To a node that has not read for longer than the step,
an acceptance may look as if it was of before; there it counts once it was confirmed after the step.

A node that starts has nothing to go on from. Beside others it waits until one of them, which follows the reference,
confirms it: they do so every second. Has the reference stepped between two of its readings, only what was surely
written after the step counts. Alone, it has the reference accepted if its own wall clock agrees with it, as it
is or set right by what it was off when this very node last confirmed the reference; else it waits for an operator.
"""

from collections.abc import Sequence
from enum import Enum, auto

from duecourse.model import bounds
from duecourse.model.instants import Micros, Now
from duecourse.server.clock.projection import Projection, Reading
from duecourse.server.storage import CLOCK_CONFIRMED_EVERY, ClockRecord


class Advice(Enum):
    """What is to be done about the store's record."""

    NOTHING = auto()
    ACCEPT = auto()
    """Have it written that the reference is right where it is."""
    CONFIRM = auto()
    """Have it written that it still is."""


class Discipline:
    """See the module's docstring. `observe` each reading; `now` is the cluster clock."""

    def __init__(self, node_id: str) -> None:
        self.refused: Micros | None = None
        """How far the reference is off where it is not followed: from the projection, or at first from the wall clock;
        None: it is followed."""
        self.stepped: Micros = 0
        """How far the last reading moved the clock, where it did not agree with the projection."""
        self._node_id = node_id
        self._projection: Projection | None = None
        self._seen: Projection | None = None
        """What the last reading told while the clock was not set."""
        self._step: tuple[Micros, Micros] | None = None
        """By how much the reference that is refused has stepped, at least and at most."""
        self._record: ClockRecord | None = None
        self._looked: Micros = 0
        self._unclear: Micros | None = None
        """An acceptance that may have been written before the reference stepped: it counts once a node that follows the
        reference has confirmed it after the step."""
        self._earliest: Micros = 0
        self._latest: Micros = 0

    @property
    def is_set(self) -> bool:
        """Whether there is a cluster clock to go by."""
        return self._projection is not None

    def now(self, elapsed: Micros) -> Now:
        """Return the cluster clock; it never goes back. It has to be set."""
        projection = self._projection
        assert projection is not None, "the cluster clock is set before anybody goes by it"
        self._earliest = max(self._earliest, projection.earliest(elapsed))
        self._latest = max(self._latest, self._earliest, projection.latest(elapsed))
        return Now(self._earliest, self._latest, elapsed)

    def offset(self, wall: Micros, elapsed: Micros) -> Micros:
        """Return how far a wall clock is ahead of the cluster clock; 0 if that is not set."""
        return wall - self._projection.middle(elapsed) if self._projection else 0

    def width(self, elapsed: Micros) -> Micros:
        """Return how much of the reference's time is open; 0 if the clock is not set."""
        return self._projection.width(elapsed) if self._projection else 0

    def observe(self, reading: Reading, record: ClockRecord, wall: Micros, others: Sequence[Micros] | None) -> Advice:
        """Take in a reading, the record that came with it, and what wall clocks say.

        `wall` is that of this node when the reading arrived, `others` are those of the other live nodes, as they are
        ahead of the cluster clock; None: it is not known whether there are any.
        """
        self.stepped = 0
        if reading.width > bounds.MAX_OFFSET:
            return Advice.NOTHING
        known = self._record or record
        is_accepted = record.accepted != known.accepted and self._is_recent(record.accepted, reading)
        is_confirmed = record.confirmed != known.confirmed and self._is_recent(record.confirmed, reading)
        if is_accepted and self._may_precede_step(record.accepted, reading):
            is_accepted, self._unclear = False, record.accepted
        elif is_confirmed and self._unclear == record.accepted:
            is_accepted = not self._may_precede_step(record.confirmed, reading)
        seen = Projection.of(reading)
        if self._projection is None:
            is_vouched_for = (is_accepted and self._vouches(record.accepted, seen)) or (
                is_confirmed and self._vouches(record.confirmed, seen)
            )
            self._record, self._looked, self._seen = record, reading.sent, seen
            is_alone = others is not None and not others
            return self._observe_first(seen, record, wall, is_alone, is_vouched_for)
        self._record, self._looked = record, reading.sent
        projection = self._projection.later(reading.received)
        gap = projection.gap(seen)
        if gap == 0:
            self._follow(projection.narrowed(seen))
        elif is_accepted or abs(gap) <= bounds.MAX_OFFSET:
            self.stepped = gap
            self._follow(seen)
        else:
            self._go_on(projection, seen)
            time, own = seen.middle(reading.received), projection.middle(reading.received)
            self.refused = time - own
            if others is None:
                return Advice.NOTHING
            walls = [wall, *(own + offset for offset in others)]
            agreeing = sum(_agree(one, time) for one in walls)
            return Advice.ACCEPT if 2 * agreeing > len(walls) else Advice.NOTHING
        return Advice.CONFIRM if abs(reading.time - record.confirmed) >= CLOCK_CONFIRMED_EVERY else Advice.NOTHING

    def _observe_first(
        self, seen: Projection, record: ClockRecord, wall: Micros, is_alone: bool, is_vouched_for: bool
    ) -> Advice:
        if is_vouched_for:
            self._follow(seen)
            return Advice.NOTHING
        time = seen.middle(seen.at)
        self.refused = time - wall
        if not is_alone:
            return Advice.NOTHING
        usual = record.wall_clock_offset if record.confirmed_by == self._node_id else 0
        return Advice.ACCEPT if _agree(wall, time) or _agree(wall - usual, time) else Advice.NOTHING

    def _follow(self, projection: Projection) -> None:
        self._projection = projection
        self.refused = self._step = self._unclear = None

    def _go_on(self, projection: Projection, seen: Projection) -> None:
        """Take from a reading that is refused what it tells if the step is left out, which stays what it is."""
        least, most = seen.lowest - projection.highest, seen.highest - projection.lowest
        if self._step is not None and max(least, self._step[0]) <= min(most, self._step[1]):
            least, most = max(least, self._step[0]), min(most, self._step[1])
            without = Projection(seen.lowest - most, seen.highest - least, seen.at)
            self._projection = projection.narrowed(without)
        self._step = least, most

    def _vouches(self, written: Micros, seen: Projection) -> bool:
        """Tell whether a record that is new speaks of what the reference shows now, and not of before it stepped."""
        before = self._seen
        if before is None or abs(before.later(seen.at).gap(seen)) <= bounds.MAX_OFFSET:
            return True
        return not before.earliest(before.at) <= written <= before.latest(seen.at)

    def _is_recent(self, written: Micros, reading: Reading) -> bool:
        """Tell whether it was written after the last look, while the reference ran as it does now."""
        ago = reading.time - written
        return -bounds.MAX_OFFSET <= ago <= reading.received - self._looked + bounds.MAX_OFFSET

    def _may_precede_step(self, written: Micros, reading: Reading) -> bool:
        """Tell whether it may have been written before the reference stepped, if it has, and since the last look.

        After a long time without a look that may be said of any small step.
        """
        projection = self._projection
        if projection is None:
            return False
        return projection.earliest(self._looked) <= written <= projection.latest(reading.received)


def _agree(one: Micros, other: Micros) -> bool:
    return abs(one - other) <= bounds.MAX_OFFSET
