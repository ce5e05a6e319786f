"""What the interval promises, whatever the reference, the machine and the way between them do within their bounds."""

from clock.scene import NEVER, START
from hypothesis import given
from hypothesis import strategies as st

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.clock.discipline import Discipline
from duecourse.server.clock.projection import MAX_DRIFT, Reading
from duecourse.server.storage import ClockRecord

MILLION = 1_000_000
DURATION = st.one_of(st.integers(0, 1_000), st.integers(0, 2 * bounds.SECOND), st.integers(0, bounds.HOUR))
PAUSE = st.integers(0, 10 * bounds.SECOND)
DRIFT = st.integers(-MAX_DRIFT, MAX_DRIFT)
LEG = st.tuples(st.integers(0, 200 * bounds.MILLISECOND), DRIFT)
LONGEST_READING = 401 * bounds.MILLISECOND
WALL = st.integers(-bounds.DAY, bounds.DAY)
STEP = st.one_of(st.just(0), st.integers(-bounds.MAX_OFFSET, bounds.MAX_OFFSET), st.integers(-bounds.DAY, bounds.DAY))


class Truth:
    """A reference whose rate differs from the machine's, exactly: times are in millionths of a microsecond."""

    def __init__(self) -> None:
        self._elapsed = 5 * bounds.SECOND * MILLION
        self._reference = START * MILLION

    @property
    def elapsed(self) -> Micros:
        return self._elapsed // MILLION

    @property
    def reference(self) -> Micros:
        return self._reference // MILLION

    def pass_by(self, duration: Micros, drift: int) -> None:
        self._elapsed += duration * MILLION + drift
        self._reference += (duration * MILLION + drift) * (MILLION + drift) // MILLION

    def step(self, by: Micros) -> None:
        """Set the reference forward or back."""
        self._reference += by * MILLION


def started(truth: Truth) -> Discipline:
    """Set a clock by two instantaneous readings."""
    discipline = Discipline("node")
    for record in (NEVER, ClockRecord(truth.reference, "node", truth.reference, "node", 0)):
        discipline.observe(Reading(truth.reference, truth.elapsed, truth.elapsed), record, truth.reference, ())
    assert discipline.is_set
    return discipline


@given(st.lists(st.tuples(DURATION, DRIFT, LEG, LEG, st.booleans()), max_size=30))
def test_the_interval_holds_the_reference_however_it_drifts(
    moves: list[tuple[Micros, int, tuple[Micros, int], tuple[Micros, int], bool]],
) -> None:
    truth = Truth()
    discipline = started(truth)
    last = discipline.now(truth.elapsed)
    for pause, drift, there, back, is_lost in moves:
        truth.pass_by(pause, drift)
        sent = truth.elapsed
        truth.pass_by(*there)
        time = truth.reference
        truth.pass_by(*back)
        if not is_lost:
            discipline.observe(Reading(time, sent, truth.elapsed), NEVER, truth.reference, ())
        now = discipline.now(truth.elapsed)
        assert now.earliest <= truth.reference <= now.latest
        assert now.earliest >= last.earliest
        assert now.latest >= last.latest
        assert discipline.stepped == 0
        last = now


@given(
    st.sampled_from([-bounds.DAY, -bounds.SECOND, bounds.SECOND, bounds.DAY]),
    st.lists(st.tuples(PAUSE, DRIFT, LEG, LEG), max_size=30),
)
def test_a_step_that_is_refused_is_left_out_exactly(
    step: Micros, moves: list[tuple[Micros, int, tuple[Micros, int], tuple[Micros, int]]]
) -> None:
    truth = Truth()
    discipline = started(truth)
    truth.step(step)
    for pause, drift, there, back in moves:
        truth.pass_by(pause, drift)
        sent = truth.elapsed
        truth.pass_by(*there)
        time = truth.reference
        truth.pass_by(*back)
        discipline.observe(Reading(time, sent, truth.elapsed), NEVER, truth.reference - step, ())
        now = discipline.now(truth.elapsed)
        assert now.earliest <= truth.reference - step <= now.latest
        assert discipline.refused is not None


@given(st.lists(st.tuples(DURATION, DRIFT, LEG, LEG, STEP, st.booleans(), WALL), max_size=30))
def test_whatever_steps_it_never_goes_back_and_is_ahead_of_nothing_that_it_follows(
    moves: list[tuple[Micros, int, tuple[Micros, int], tuple[Micros, int], Micros, bool, Micros]],
) -> None:
    truth = Truth()
    discipline = started(truth)
    last = discipline.now(truth.elapsed)
    limit = truth.reference
    record = NEVER
    for pause, drift, there, back, step, is_accepted, wall_off in moves:
        began = truth.elapsed
        truth.pass_by(pause, drift)
        if discipline.refused is None:
            limit = max(limit, truth.reference)
        truth.step(step)
        sent = truth.elapsed
        truth.pass_by(*there)
        time = truth.reference
        if is_accepted:
            record = ClockRecord(time, "operator", time, "operator", 0)
        truth.pass_by(*back)
        discipline.observe(Reading(time, sent, truth.elapsed), record, truth.reference + wall_off, ())
        now = discipline.now(truth.elapsed)
        assert last.earliest <= now.earliest <= now.latest
        assert last.latest <= now.latest
        # What is refused counts by elapsed time; a step back that is smaller than a reading is long cannot be seen.
        limit = max(limit, truth.reference) if discipline.refused is None else limit + truth.elapsed - began
        assert now.earliest <= limit + LONGEST_READING
        last = now
