"""What a heap of measured durations says: quantiles, medians of repeats, and a histogram for people. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros

_MS: Final = bounds.MILLISECOND
_EDGES: Final[tuple[Micros, ...]] = tuple(
    n * _MS for n in (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000)
)
_BAR: Final = "█"


@dataclass(frozen=True, slots=True)
class Bin:
    """How many durations are at least `low` and, unless it is the last bin, less than `high`."""

    low: Micros
    high: Micros | None
    count: int

    @property
    def label(self) -> str:
        """Its range, for people."""
        if self.high is None:
            return f">= {short(self.low)}"
        return f"{short(self.low)} - {short(self.high)}" if self.low else f"< {short(self.high)}"


class Distribution:
    """Durations in microseconds, sorted once."""

    def __init__(self, durations: Iterable[Micros]) -> None:
        self._sorted = sorted(durations)

    def __len__(self) -> int:
        return len(self._sorted)

    def quantile(self, share: float) -> Micros:
        """Return the smallest duration that at least `share` of all do not exceed: one that was really measured."""
        if not self._sorted:
            raise ValueError("nothing was measured")
        rank = -(-share * len(self._sorted) // 1)
        return self._sorted[min(len(self._sorted), max(1, int(rank))) - 1]

    @property
    def longest(self) -> Micros:
        """The longest duration."""
        return self.quantile(1)

    def bins(self) -> list[Bin]:
        """Count them in bins of round widths, from the first that holds some to the last."""
        edges: list[Micros | None] = [0, *_EDGES, None]
        counts = [0] * (len(edges) - 1)
        at = 0
        for duration in self._sorted:
            while (high := edges[at + 1]) is not None and duration >= high:
                at += 1
            counts[at] += 1
        bins = [Bin(low or 0, high, count) for (low, high), count in zip(pairwise(edges), counts, strict=True)]
        held = [index for index, one in enumerate(bins) if one.count]
        return bins[held[0] : held[-1] + 1] if held else []


def histogram(distribution: Distribution, width: int = 48) -> list[str]:
    """Draw the bins, a line each; a bin that holds anything shows at least a sliver."""
    bins = distribution.bins()
    most = max((one.count for one in bins), default=0)
    return [
        f"{one.label:>16} {one.count:>9,} {_BAR * max(round(one.count / most * width), bool(one.count))}".rstrip()
        for one in bins
    ]


def median(figures: Sequence[float]) -> float:
    """Return the middle one; the mean of the two in the middle if there are two."""
    ordered = sorted(figures)
    if not ordered:
        raise ValueError("nothing was measured")
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def short(duration: Micros) -> str:
    """Write a duration for people, in milliseconds or seconds."""
    if duration >= bounds.SECOND:
        return f"{duration / bounds.SECOND:g} s"
    return f"{duration / _MS:g} ms"
