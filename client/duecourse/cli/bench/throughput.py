"""`duecourse bench throughput`: how many tasks a second go through, as a backlog and as they come.

*Drain*: a backlog of due tasks is submitted while no worker is there; then a crew that has already started connects.
Counted from the first handler's start until the crew has disconnected with every outcome recorded.

*Live*: tasks are submitted, due at once, by an open loop of evenly spaced calls, and run at the same time. The offered
rate is raised until the backlog grows, then narrowed down by short probes (see `search`); the rate found is then
held for the whole duration, and lowered by 5 % until that is sustained too. What is reported is what was started,
from the first scheduled arrival to the last start.
"""

from typing import Final

from duecourse.cli.bench import account, arrivals, laboratory, search, sending
from duecourse.cli.bench.arrivals import Call
from duecourse.cli.bench.figures import Figures
from duecourse.cli.bench.laboratory import Crew, Laboratory
from duecourse.cli.bench.sending import Sender
from duecourse.cli.distribution import Distribution
from duecourse.model import bounds
from duecourse.model.instants import Micros

FIRST_RATE: Final = 4_000.0
PROBE: Final = 3 * bounds.SECOND
_STEP_DOWN: Final = 0.95
_CAPACITY: Final = 20_000_000
_START_LIMIT: Final = 5 * bounds.MINUTE


async def measure(
    lab: Laboratory, *, kinds: frozenset[str], backlog: int, duration: Micros, rate: float | None
) -> Figures:
    """Measure the kinds asked for, `drain` and `live`; the processor time is that of `live` if both are."""
    figures = Figures()
    if "drain" in kinds:
        await _drain(lab, figures, backlog)
    if "live" in kinds:
        await _Live(lab, figures).measure(duration, rate)
    return figures


async def _drain(lab: Laboratory, figures: Figures, backlog: int) -> None:
    sender = lab.sender("drain")
    crew = await lab.hire([sender.queue], backlog * 2)
    lab.meter.phase("submitting the backlog", backlog)
    accepted = lab.clock.now().earliest
    await fill(lab, sender, backlog)
    lab.meter.phase("draining the backlog", backlog)
    before = lab.cpu()
    crew.say(b"go")
    await lab.until_started(crew, sender.acknowledged, _START_LIMIT)
    after = lab.cpu()
    await lab.dismiss(crew)
    settled = account.settle(sender.indexes_acknowledged(), crew.starts(), lambda _: accepted)
    first_start = min(at for _, _, at in crew.starts())
    figures.metrics["drain_per_s"] = crew.count / sending.seconds(crew.ended_at - first_start)
    figures.metrics["early"] = settled.early
    figures.metrics["lost"] = settled.lost
    cpu = laboratory.spent(before, after, crew.count)
    if cpu:
        figures.metrics["cpu_us_per_task"] = sum(cpu.values())
        figures.details["drain: CPU us a task"] = cpu
    if settled.repeats:
        figures.details["drain: repeats"] = settled.repeats


async def fill(lab: Laboratory, sender: Sender, count: int, *, due: Micros | None = None) -> None:
    """Submit so many tasks, due at an instant or at once, as fast as the setup's batches go."""
    run_at = None if due is None else lambda _: due
    chunks = (min(lab.setup.batch, count - begin) for begin in range(0, count, lab.setup.batch))

    async def send(size: int) -> None:
        await sender.send(sender.reserve(size), run_at)
        lab.meter.at(sender.count)

    await sending.closed_loop(lab.setup.in_flight, (send(size) for size in chunks))


class _Live:
    """Submits and runs at the same time, with one crew for all trials."""

    def __init__(self, lab: Laboratory, figures: Figures) -> None:
        self._lab = lab
        self._figures = figures
        self._sender = lab.sender("live")
        self._due: list[Micros] = []

    async def measure(self, duration: Micros, rate: float | None) -> None:
        """Find the rate, unless it is given, and hold it."""
        crew = await self._lab.hire([self._sender.queue], _CAPACITY)
        await self._lab.let_in(crew)
        if rate is None:

            async def probe(tried: float) -> search.Trial:
                return await self._try(crew, tried, PROBE)

            rate = await search.highest_sustained(probe, FIRST_RATE)
            trial = await self._hold(crew, rate, duration)
            while not trial.is_sustained and rate > search.SLOWEST:
                rate *= _STEP_DOWN
                trial = await self._hold(crew, rate, duration)
        else:
            trial = await self._hold(crew, rate, duration)
            if not trial.is_sustained:
                self._figures.details["not sustained"] = f"{rate:,.0f} tasks/s is more than this cluster takes"
        self._figures.metrics["live_per_s"] = trial.per_s
        await self._lab.dismiss(crew)
        settled = account.settle(self._sender.indexes_acknowledged(), crew.starts(), self._due.__getitem__)
        for name, count in (("early", settled.early), ("lost", settled.lost)):
            self._figures.metrics[name] = self._figures.metrics.get(name, 0) + count

    async def _hold(self, crew: Crew, rate: float, duration: Micros) -> search.Trial:
        """Try a rate for the whole duration, and note what it cost."""
        before, begin = self._lab.cpu(), self._sender.count
        trial = await self._try(crew, rate, duration)
        cpu = laboratory.spent(before, self._lab.cpu(), self._sender.count - begin)
        if cpu:
            self._figures.metrics["cpu_us_per_task"] = sum(cpu.values())
            self._figures.details["live: CPU us a task"] = cpu
        delays = Distribution(at - self._due[index] for index, _, at in crew.starts() if index >= begin)
        self._figures.details["live: ms from scheduled submission to start"] = {
            name: delays.quantile(share) / bounds.MILLISECOND for name, share in (("p50", 0.5), ("p99", 0.99))
        }
        return trial

    async def _try(self, crew: Crew, rate: float, duration: Micros) -> search.Trial:
        lab, sender, size = self._lab, self._sender, self._lab.setup.batch
        calls = list(arrivals.even(rate, duration, size))
        lab.meter.phase(f"offering {rate:,.0f} tasks/s for {sending.seconds(duration):g} s", calls[-1].end)
        base, refused = sender.count, sum(sender.refusals.values())
        begin, began = lab.clock.now().latest, lab.clock.elapsed()
        for call in calls:
            self._due.extend([begin + call.at] * size)
        indexes = sender.reserve(calls[-1].end)

        async def send(call: Call) -> None:
            await sender.send(indexes[call.begin : call.end])
            lab.meter.at(crew.count - base)

        await sending.open_loop(lab.clock, calls, send, begin=began)
        await lab.until_started(crew, sender.acknowledged, _START_LIMIT, before=base)
        elapsed = crew.last_start - begin
        return search.Trial(
            per_s=(crew.count - base) / sending.seconds(max(elapsed, duration)),
            refused=sum(sender.refusals.values()) - refused,
            tail=elapsed - calls[-1].at,
            duration=duration,
        )
