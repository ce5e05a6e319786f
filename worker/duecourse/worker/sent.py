"""When numbered messages were sent, remembered in bounded memory and never as later than they were.

A lease's time counts from when the worker sent the message that the node names. `SentTimes` keeps a sparse ascending
list of (number, time) and answers with the last entry that is not after the number asked for, so that leaving entries
out can only make a lease seem to end earlier. Messages of one `GRAIN` share an entry, and a full list loses every
second one but for the latest: old entries get sparse, and of heartbeats none is lost that a node may yet confirm.
"""

from bisect import bisect_right
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros

GRAIN: Final = 10 * bounds.MILLISECOND
MAX_ENTRIES: Final = 1_024
RECENT: Final = 16


class SentTimes:
    """The times at which messages of one stream were sent; those within a grain of each other share one."""

    __slots__ = ("_grain", "_numbers", "_times")

    def __init__(self, grain: Micros = GRAIN) -> None:
        self._grain = grain
        self._numbers: list[int] = []
        self._times: list[Micros] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def record(self, number: int, at: Micros) -> None:
        """Remember that message `number` is sent now; numbers and times never decrease."""
        times = self._times
        if times and at - times[-1] < self._grain:
            return
        self._numbers.append(number)
        times.append(at)
        if len(times) > MAX_ENTRIES:
            del self._numbers[1:-RECENT:2]
            del times[1:-RECENT:2]

    def floor(self, number: int) -> tuple[int, Micros] | None:
        """Return the last entry at or before `number`; None if there is none."""
        index = bisect_right(self._numbers, number) - 1
        return (self._numbers[index], self._times[index]) if index >= 0 else None
