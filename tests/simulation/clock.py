"""The clock of one simulated machine: its wall clock may be off, jump and drift, its elapsed time runs almost right."""

from bisect import bisect_right
from typing import Final

from simulation.loop import Process, SimulationLoop, wake

from duecourse.model import bounds
from duecourse.model.instants import Micros, Now

START: Final[Micros] = 1_800_000_000 * bounds.SECOND
"""What every right clock shows when a run begins."""


_CONFIRMED_WITHIN: Final = 2 * bounds.SECOND


class Reference:
    """The store's clock, which all nodes follow: what it shows, and what is to be followed of that.

    A node that has not read it since it was set back does not know of that, and goes on from what it read last.
    """

    def __init__(self, loop: SimulationLoop) -> None:
        self._loop = loop
        self._offset: Micros = 0
        self._followed: list[tuple[Micros, Micros]] = [(0, 0)]
        """Since when, how far it was off and to be followed."""
        self._read_at: dict[Process, Micros] = {}
        self._unclear_since: dict[Process, tuple[Micros, Micros]] = {}
        """Since when it has been unclear to a process, and when that was accepted which is."""
        self._reached: dict[Process, Micros] = {}

    def read(self) -> Micros:
        """Return what it shows."""
        return START + self._loop.now + self._offset

    def was_read(self, process: Process, at: Micros) -> None:
        """Note that a process knows what it showed at a time. Until now it went by what it had read before.

        From what is not to be followed it cannot tell a small step that came before. To one that has not read for a
        while, a step that was accepted meanwhile may be unclear until it was confirmed.
        """
        if self._offset != self._followed[-1][1]:
            return
        self.reached(process)
        before = self._read_at.get(process, 0)
        offsets = [offset for _, offset in self._followed[self._index_at(before) : self._index_at(at) + 1]]
        has_stepped = any(abs(offset - offsets[-1]) > bounds.MAX_OFFSET for offset in offsets)
        is_unclear = has_stepped and at - before > bounds.MAX_OFFSET
        accepted_at = self._followed[-1][0]
        unclear_since, unclear = self._unclear_since.get(process, (at, accepted_at))
        if unclear != accepted_at:
            unclear_since = at
        if is_unclear and at < unclear_since + _CONFIRMED_WITHIN:
            self._unclear_since[process] = unclear_since, accepted_at
            return
        self._unclear_since.pop(process, None)
        self._read_at[process] = at

    def jump(self, by: Micros) -> None:
        """Set it forward or back; a large step is not to be followed."""
        self._offset += by
        if abs(self._offset - self._followed[-1][1]) <= bounds.MAX_OFFSET:
            self.accept()

    def is_steady_since(self, at: Micros) -> bool:
        """Tell whether all nodes have followed it since then, and it has not stepped."""
        since, offset = self._followed[-1]
        return since < at and offset == self._offset

    def mend(self) -> None:
        """Set it right."""
        self.jump(-self._offset)

    def accept(self) -> None:
        """Note that all nodes may follow it from now on."""
        self._followed.append((self._loop.now, self._offset))

    def reached(self, process: Process) -> Micros:
        """Return what a node's cluster clock shows at most; it stands still where it would have to go back."""
        read_at = self._read_at.get(process, 0)
        offset = max(offset for _, offset in self._followed[self._index_at(read_at) :])
        reached = max(self._reached.get(process, 0), START + self._loop.now + offset)
        self._reached[process] = reached
        return reached

    def _index_at(self, at: Micros) -> int:
        return max(0, bisect_right(self._followed, (at, 2**63)) - 1)


class MachineClock:
    """A `Clock` and a `LocalClock`. Like the machine's, it stands still where the wall clock was set back."""

    def __init__(self, loop: SimulationLoop, boot: Micros = 0, drift: float = 0.0) -> None:
        self.offset: Micros = 0
        """How far the wall clock is off."""
        self._loop = loop
        self._boot = boot
        self._rate = 1.0 + drift
        self._last = 0

    def now(self) -> Now:
        """Read the wall clock and the elapsed time."""
        self._last = utc = max(self._last, self.wall())
        return Now(utc, utc, self.elapsed())

    def wall(self) -> Micros:
        """Read the wall clock as it is."""
        return START + self._loop.now + self.offset

    def elapsed(self) -> Micros:
        """Read the elapsed time."""
        return self._boot + int(self._loop.now * self._rate)

    async def sleep(self, duration: Micros) -> None:
        """Sleep in steps of at most a second, until the elapsed time says so."""
        loop = self._loop
        until = self.elapsed() + duration
        while (left := until - self.elapsed()) > 0:
            woken = loop.create_future()
            timer = loop.call_later(min(left, bounds.LONGEST_SLEEP) / bounds.SECOND, wake, woken)
            try:
                await woken
            finally:
                timer.cancel()
