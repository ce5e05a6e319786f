"""Finds the highest load that is sustained: raised until the backlog grows, then narrowed down. Pure but for its probe.

A load is sustained if every task was accepted and the last one was started soon after the last arrival: what is left
over then is bounded, however long it goes on.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros

GROWTH: Final = 1.5
PRECISION: Final = 1.04
SLOWEST: Final = 10.0
_SHORTEST_TAIL: Final = 300 * bounds.MILLISECOND
_TAIL_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one offered load."""

    per_s: float
    """Started, from the first arrival to the last start."""
    refused: int
    tail: Micros
    """From the last arrival, as it was scheduled, to the last start."""
    duration: Micros

    @property
    def is_sustained(self) -> bool:
        """The backlog did not grow."""
        return self.refused == 0 and self.tail <= max(_SHORTEST_TAIL, _TAIL_SHARE * self.duration)


async def highest_sustained(probe: Callable[[float], Awaitable[Trial]], first_rate: float) -> float:
    """Return the highest rate, to within the precision, that a probe sustained; 0 if none did."""
    low, high = 0.0, first_rate
    while (await probe(high)).is_sustained:
        low, high = high, high * GROWTH
    while low == 0.0:
        if high / 2 < SLOWEST:
            return 0.0
        if (await probe(high / 2)).is_sustained:
            low = high / 2
        else:
            high /= 2
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        if (await probe(middle)).is_sustained:
            low = middle
        else:
            high = middle
    return low
