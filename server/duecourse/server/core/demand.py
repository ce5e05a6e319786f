"""`Demand`: whom of a pool's streams to tell that tasks wait here for credit, and when to tell it again.

A few streams are told first, twice as many at every further look for as long as something waits: where one task waits
and a thousand workers have nothing to do, not all of them are to move their credit. Who was told is told again when the
number has doubled or halved, now and then in between, and when nothing waits any more.
"""

import itertools
from collections.abc import Collection
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros

MOST: Final = 1_024
"""More than so many are not counted."""
INTERVAL: Final[Micros] = 50 * bounds.MILLISECOND
"""Between two looks."""
INTERVAL_PER_STREAM: Final[Micros] = bounds.MILLISECOND
"""The same, for each stream that was told: a node says no more than a thousand times a second that work waits."""
REPEAT: Final[Micros] = 3 * bounds.SECOND
"""After which a stream is told again, though nothing has changed: workers forget what is not repeated."""
_FIRST: Final = 8


class Demand:
    """See the module's docstring."""

    __slots__ = ("_spread", "_turn", "told")

    def __init__(self) -> None:
        self.told: dict[int, tuple[int, Micros]] = {}
        """By stream: the number that it was told, and when. A stream that is not in it knows of nothing."""
        self._spread = 0
        self._turn = itertools.count()

    def tell(self, waiting: int, streams: Collection[int], now: Micros) -> list[int]:
        """Return the streams that are to be told that so many tasks wait, and count them as told."""
        told = self.told
        if not waiting:
            self._spread = 0
            ended = list(told)
            told.clear()
            return ended
        telling = [stream for stream, (number, at) in told.items() if _is_news(waiting, number) or now - at >= REPEAT]
        untold = [stream for stream in streams if stream not in told]
        if untold:
            self._spread = max(_FIRST, waiting, 2 * self._spread)
            first = next(self._turn) % len(untold)
            telling += (untold[first:] + untold[:first])[: self._spread]
        for stream in telling:
            told[stream] = (waiting, now)
        return telling

    def forget(self, stream: int) -> None:
        """Drop a stream that has ended."""
        self.told.pop(stream, None)


def _is_news(waiting: int, told: int) -> bool:
    return waiting >= 2 * told or 2 * waiting <= told
