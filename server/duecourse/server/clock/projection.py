"""`Projection`: where the reference clock stands, by elapsed time, as an interval that surely holds it.

A reading was taken somewhere between the elapsed times at which it was asked for and answered, so it confines the
difference of reference and elapsed time to an interval as wide as the round trip. From then on the interval widens by
`MAX_DRIFT` to either side, since the two clocks need not run at the same rate, until another reading narrows it: the
intersection of all readings is the best that can be known, and one quick reading outweighs many slow ones.

The promise holds as long as the two clocks drift apart by no more than `MAX_DRIFT` and the reference does not step;
`gap` tells that it did.
"""

from dataclasses import dataclass
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros

MAX_DRIFT: Final = 500
"""How far the reference and this machine's elapsed time drift apart at most, in millionths: what NTP slews at most."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the reference showed, and the elapsed times at which it was asked for and answered."""

    time: Micros
    sent: Micros
    received: Micros

    @property
    def width(self) -> Micros:
        """How much it leaves open."""
        return self.received - self.sent


@dataclass(frozen=True, slots=True)
class Projection:
    """The reference minus the elapsed time lies in [lowest, highest] at the elapsed time `at`."""

    lowest: Micros
    highest: Micros
    at: Micros

    @classmethod
    def of(cls, reading: Reading) -> "Projection":
        """Return what a reading tells by itself. All three numbers were cut to whole microseconds, hence 1 and 2."""
        return cls(
            reading.time - reading.received - 1,
            reading.time - reading.sent + 2 + _drift(reading.width),
            reading.received,
        )

    def earliest(self, elapsed: Micros) -> Micros:
        """Return what the reference has reached for sure."""
        return elapsed + self.lowest - _drift(elapsed - self.at)

    def latest(self, elapsed: Micros) -> Micros:
        """Return what the reference has surely not passed."""
        return elapsed + self.highest + _drift(elapsed - self.at)

    def width(self, elapsed: Micros) -> Micros:
        """Return how much is open."""
        return self.latest(elapsed) - self.earliest(elapsed)

    def middle(self, elapsed: Micros) -> Micros:
        """Return the best guess."""
        return (self.earliest(elapsed) + self.latest(elapsed)) // 2

    def later(self, elapsed: Micros) -> "Projection":
        """Return the same, as wide as it is then."""
        drift = _drift(elapsed - self.at)
        return Projection(self.lowest - drift, self.highest + drift, elapsed)

    def gap(self, other: "Projection") -> Micros:
        """Return how far another one of the same instant lies ahead of this one, or behind it; 0: they can agree."""
        assert self.at == other.at, "they are of one instant"
        return max(0, other.lowest - self.highest) - max(0, self.lowest - other.highest)

    def narrowed(self, other: "Projection") -> "Projection":
        """Return what both tell together; they can agree."""
        return Projection(max(self.lowest, other.lowest), min(self.highest, other.highest), self.at)


def _drift(duration: Micros) -> Micros:
    return -(-duration * MAX_DRIFT // bounds.SECOND)
