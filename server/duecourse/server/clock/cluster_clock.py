"""`ClusterClock`: the `Clock` of a node, kept by readings of the store's clock.

Run it, and wait until it `is_set` before anything goes by it. It reads the reference every `READING_INTERVAL`, or a
little more often, in one round trip; while readings fail, it goes on by elapsed time, and its interval widens. What it
finds amiss it says in the log, in metrics, and in `alarms`; none of that makes a node that is running not ready.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Never

from duecourse.model import bounds
from duecourse.model.instants import Micros, Now
from duecourse.server.clock.discipline import Advice, Discipline
from duecourse.server.clock.projection import Reading
from duecourse.server.storage import ReferenceClock, StoreUnavailable
from duecourse.server.telemetry import logs
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing.clock import LocalClock

READING_INTERVAL: Final[Micros] = 250 * bounds.MILLISECOND
_AFTER_SLOW: Final[Micros] = 50 * bounds.MILLISECOND
_WIDTHS_KEPT: Final = 16

_log = logs.get("clock")


class ClusterClock:
    """See the module's docstring. Implements `Clock`."""

    def __init__(
        self,
        reference: ReferenceClock,
        local: LocalClock,
        node_id: str,
        metrics: Metrics,
        others: Callable[[], Sequence[Micros] | None] = tuple,
    ) -> None:
        """Prepare to read.

        `others` tells how far the wall clocks of the other live nodes are ahead of the cluster clock. It has to know
        them before this node becomes one of them; None: it does not know yet.
        """
        self._reference = reference
        self._local = local
        self._node_id = node_id
        self._metrics = metrics
        self._others = others
        self._discipline = Discipline(node_id)
        self._widths: deque[Micros] = deque(maxlen=_WIDTHS_KEPT)
        self._is_missed = False
        self._is_alarmed = False
        self._is_wall_off = False
        metrics.samplers.append(self._sample)

    # The clock.

    def now(self) -> Now:
        """Read the cluster clock. It has to be set."""
        return self._discipline.now(self._local.elapsed())

    def elapsed(self) -> Micros:
        """Read the elapsed time."""
        return self._local.elapsed()

    async def sleep(self, duration: Micros) -> None:
        """Return when `duration` has elapsed."""
        await self._local.sleep(duration)

    # What others are told.

    @property
    def is_set(self) -> bool:
        """Whether there is a cluster clock to go by; from then on there always is."""
        return self._discipline.is_set

    def wall_clock_offset(self) -> Micros:
        """Return how far this machine's wall clock is ahead of the cluster clock."""
        return self._discipline.offset(self._local.wall(), self._local.elapsed())

    def uncertainty(self) -> Micros:
        """Return how far off the cluster clock may be: half the width of its interval."""
        return self._discipline.width(self._local.elapsed()) // 2

    def why_not_set(self) -> str | None:
        """Tell why there is no cluster clock yet; None if there is."""
        if self._discipline.is_set:
            return None
        refused = self._discipline.refused
        if refused is None:
            return "the store's clock has not been read yet"
        if abs(refused) <= bounds.MAX_OFFSET:
            return "no other node has confirmed the store's clock yet"
        return (
            f"the store's clock is {_written(refused)} this machine's: mend the wrong one, or, if the store's clock is"
            " right, run `duecourse cluster accept-clock`"
        )

    def alarms(self) -> list[str]:
        """Tell what is wrong with clocks, for people."""
        found = []
        refused, offset = self._discipline.refused, self.wall_clock_offset()
        if self.is_set and refused is not None:
            found.append(
                f"the store's clock is {_written(refused)} the cluster clock, which does not follow it: mend it, or, if"
                " it is right, run `duecourse cluster accept-clock`"
            )
        if abs(offset) > bounds.MAX_OFFSET:
            found.append(f"this machine's wall clock is {_written(offset)} the cluster clock: mend it")
        return found

    # Keeping it.

    async def run(self) -> Never:
        """Read the reference for ever."""
        is_again = False
        while True:
            try:
                # What was just written counts with the next reading.
                is_again = await self._look() and not is_again
            except StoreUnavailable as error:
                self._missed(error)
                is_again = False
            if not is_again:
                await self._local.sleep(self._pause())

    async def _look(self) -> bool:
        """Take a reading, and do what it asks for; returns whether that changed anything. Raises StoreUnavailable."""
        sent = self._local.elapsed()
        read = await self._reference.read_clock()
        received, wall = self._local.elapsed(), self._local.wall()
        self._widths.append(received - sent)
        advice = self._discipline.observe(Reading(read.time, sent, received), read.record, wall, self._others())
        if self._is_missed:
            self._is_missed = False
            _log.info("clock_read_again")
        self._tell()
        match advice:
            case Advice.ACCEPT:
                near, offset = read.time + received - sent, wall - read.time
                accepted = await self._reference.accept_clock(near, self._node_id, offset)
                if accepted is not None:
                    _log.info("clock_accepted", store_time=accepted, wall_clock_offset=offset)
                return accepted is not None
            case Advice.CONFIRM:
                await self._reference.confirm_clock(read.time, self._node_id, self.wall_clock_offset())
        return False

    def _pause(self) -> Micros:
        """Return when to read again: sooner after a reading that was slow, as on a busy node, for a better one."""
        widths = self._widths
        return _AFTER_SLOW if widths and widths[-1] > 2 * min(widths) else READING_INTERVAL

    def _missed(self, error: StoreUnavailable) -> None:
        self._metrics.clock_readings["failed"] += 1
        if not self._is_missed:
            self._is_missed = True
            _log.warning("clock_not_read", detail=str(error))

    def _tell(self) -> None:
        refused, stepped = self._discipline.refused, self._discipline.stepped
        self._metrics.clock_readings["followed" if refused is None else "refused"] += 1
        if stepped:
            _log.warning("clock_stepped", milliseconds=stepped // bounds.MILLISECOND)
        is_alarmed = refused is not None and (self.is_set or abs(refused) > bounds.MAX_OFFSET)
        if is_alarmed and not self._is_alarmed:
            _log.error("clock_refused", detail=self.why_not_set() or self.alarms()[0])
        self._is_alarmed = is_alarmed
        offset = self.wall_clock_offset()
        is_wall_off = abs(offset) > bounds.MAX_OFFSET
        if is_wall_off and not self._is_wall_off:
            _log.warning("wall_clock_off", milliseconds=offset // bounds.MILLISECOND)
        self._is_wall_off = is_wall_off

    def _sample(self) -> None:
        self._metrics.clock_uncertainty = self.uncertainty()
        self._metrics.wall_clock_offset = self.wall_clock_offset()
        self._metrics.reference_offset = (self._discipline.refused or 0) if self._is_alarmed else 0


def _written(offset: Micros) -> str:
    return f"{abs(offset) / bounds.SECOND:.1f} s {'ahead of' if offset > 0 else 'behind'}"
