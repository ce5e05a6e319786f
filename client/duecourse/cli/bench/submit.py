"""`duecourse bench submit`: how fast tasks become durable, in batches and one by one. A closed loop, no worker.

The tasks are due an hour later, so nothing but their acceptance is measured. The first second is a warm-up.
"""

from collections.abc import Awaitable, Iterator
from typing import Final

from duecourse.cli.bench import laboratory, sending
from duecourse.cli.bench.figures import Figures
from duecourse.cli.bench.laboratory import Laboratory
from duecourse.model import bounds
from duecourse.model.instants import Micros

SINGLES_IN_FLIGHT: Final = 64
_WARM_UP: Final = bounds.SECOND
_AHEAD: Final = bounds.HOUR


async def measure(lab: Laboratory, *, duration: Micros, kinds: frozenset[str]) -> Figures:
    """Measure the kinds asked for, `batch` and `single`; the processor time is that of batches if both are."""
    figures = Figures()
    if "single" in kinds:
        await _measure(lab, figures, "single", duration, size=1, in_flight=SINGLES_IN_FLIGHT)
    if "batch" in kinds:
        await _measure(lab, figures, "batch", duration, size=lab.setup.batch, in_flight=lab.setup.in_flight)
    return figures


async def _measure(
    lab: Laboratory, figures: Figures, kind: str, duration: Micros, *, size: int, in_flight: int
) -> None:
    sender = lab.sender(f"submit-{kind}")
    due = lab.clock.now().latest + _AHEAD

    def send(indexes: range) -> Awaitable[None]:
        if kind == "single":
            return sender.send_single(indexes[0], lambda _: due)
        return sender.send(indexes, lambda _: due)

    def sendings(time: Micros) -> Iterator[Awaitable[None]]:
        for _ in sending.until(lab.clock, time):
            yield send(sender.reserve(size))
            lab.meter.at(sender.count)

    lab.meter.phase(f"submitting, {kind}: {size} a call, {in_flight} calls in flight")
    await sending.closed_loop(in_flight, sendings(_WARM_UP))
    warmed_up, before, began = sender.acknowledged, lab.cpu(), lab.clock.elapsed()
    await sending.closed_loop(in_flight, sendings(duration))
    took = lab.clock.elapsed() - began
    acknowledged = sender.acknowledged - warmed_up
    figures.metrics[f"submit_{kind}_per_s"] = acknowledged / sending.seconds(took)
    cpu = laboratory.spent(before, lab.cpu(), acknowledged)
    if cpu:
        figures.metrics["cpu_us_per_task"] = sum(cpu.values())
        figures.details[f"{kind}: CPU us a task"] = cpu
    if sender.refusals:
        figures.details[f"{kind}: refused"] = dict(sender.refusals)
