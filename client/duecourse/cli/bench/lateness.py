"""`duecourse bench lateness`: how long after `run_at` handlers start, at a given rate.

Tasks are due at instants drawn beforehand (a Poisson process from a fixed seed) and submitted a lead before they are
due, by an open loop that nothing slows down; lateness counts from `run_at` whatever happened to the submission. Tasks
of the warm-up are not measured, but none of them may be early or lost either.
"""

from typing import Final

from duecourse.cli.bench import account, arrivals, laboratory, sending
from duecourse.cli.bench.arrivals import Call
from duecourse.cli.bench.figures import Figures
from duecourse.cli.bench.laboratory import Laboratory
from duecourse.model import bounds
from duecourse.model.instants import Micros

SEED: Final = 20_261_101
_SETTLING: Final = bounds.SECOND
_GATHERED_WITHIN: Final = 20 * bounds.MILLISECOND
_PATIENCE: Final = bounds.DEFAULT_LEASE + 30 * bounds.SECOND


async def measure(lab: Laboratory, *, rate: float, duration: Micros, warm_up: Micros, lead: Micros) -> Figures:
    """Measure at one rate."""
    figures = Figures()
    offsets = arrivals.poisson(rate, warm_up + duration, SEED)
    calls = list(arrivals.gathered(offsets, lab.setup.batch, _GATHERED_WITHIN))
    sender = lab.sender("lateness")
    crew = await lab.hire([sender.queue], len(offsets) * 2 + 1_000)
    await lab.let_in(crew)
    lab.meter.phase(f"{rate:,.0f} tasks/s for {sending.seconds(duration):g} s", len(offsets))
    indexes = sender.reserve(len(offsets))
    begin = lab.clock.elapsed() + _SETTLING
    first = lab.clock.now().latest + _SETTLING + lead

    def due(index: int) -> Micros:
        return first + offsets[index]

    async def send(call: Call) -> None:
        await sender.send(indexes[call.begin : call.end], due)
        lab.meter.at(crew.count)

    before = lab.cpu()
    await sending.open_loop(lab.clock, calls, send, begin=begin)
    remaining = max(0, first + offsets[-1] - lab.clock.now().latest)
    await lab.until_started(crew, sender.acknowledged, remaining + _PATIENCE)
    cpu = laboratory.spent(before, lab.cpu(), len(offsets))
    await lab.dismiss(crew)
    settled = account.settle(
        sender.indexes_acknowledged(), crew.starts(), due, is_measured=lambda index: offsets[index] >= warm_up
    )
    settled.enter(figures)
    if cpu:
        figures.metrics["cpu_us_per_task"] = sum(cpu.values())
        figures.details["CPU us a task"] = cpu
    if sender.refusals:
        figures.details["refused"] = dict(sender.refusals)
    figures.details["measured tasks"] = len(settled.lateness)
    return figures
