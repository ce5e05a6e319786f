"""`duecourse bench pending`: what very many tasks cost that nobody runs yet.

*Beyond the horizon* (the default): they are due hours later. Measured are the node's memory, the larger of that after
their submission and that after a restart, and how long a node that was killed takes until it serves again.

*Due at once* (`--due`): they all become due at one instant. Measured is the node's memory at most from then on, while
a crew drains them for a while, and the lateness of a second queue's tasks meanwhile, which should not notice.
"""

import asyncio
import random
from typing import Final

from duecourse import client as sdk
from duecourse.cli.bench import account, arrivals, sending, usage
from duecourse.cli.bench.arrivals import Call
from duecourse.cli.bench.figures import Figures
from duecourse.cli.bench.laboratory import Crew, Laboratory
from duecourse.cli.bench.sending import Sender
from duecourse.cli.bench.throughput import fill
from duecourse.model import bounds
from duecourse.model.instants import Micros

_NEAREST: Final = 2 * bounds.HOUR
_SPREAD: Final = 10 * bounds.HOUR
_SETTLING: Final = 3 * bounds.SECOND
_SUBMITTED_PER_SECOND: Final = 20_000
_OTHER_RATE: Final = 20.0
_OTHER_FIRST: Final = 1 << 40
_OTHER_LEAD: Final = bounds.SECOND
_PATIENCE: Final = bounds.DEFAULT_LEASE + 30 * bounds.SECOND
_SAMPLE: Final = 1_000
_MEGABYTE: Final = 1_000_000


async def measure_far(lab: Laboratory, *, count: int) -> Figures:
    """Measure tasks beyond the horizon."""
    figures = Figures()
    sender = lab.sender("pending")
    lab.meter.phase(f"submitting {count:,} tasks due in {_NEAREST // bounds.HOUR} hours and later", count)
    base = lab.clock.now().latest + _NEAREST

    async def send(indexes: range) -> None:
        await sender.send(indexes, lambda index: base + index * _SPREAD // count)
        lab.meter.at(sender.count)

    size = lab.setup.batch
    began = lab.clock.elapsed()
    sizes = (min(size, count - begin) for begin in range(0, count, size))
    await sending.closed_loop(lab.setup.in_flight, (send(sender.reserve(each)) for each in sizes))
    figures.details["submitted tasks/s"] = sender.acknowledged / sending.seconds(lab.clock.elapsed() - began)
    await lab.clock.sleep(_SETTLING)
    after_submission = usage.rss_bytes(lab.solo.node.pid)
    figures.details["peak MB during submission"] = usage.peak_rss_bytes(lab.solo.node.pid) / _MEGABYTE
    lab.meter.phase("killing the node and starting it again")
    lab.solo.kill_node()
    figures.metrics["ready_s"] = sending.seconds(await lab.solo.start_node())
    await lab.clock.sleep(_SETTLING)
    after_restart = usage.rss_bytes(lab.solo.node.pid)
    figures.metrics["rss_mb"] = max(after_submission, after_restart) / _MEGABYTE
    figures.details["MB after submission"] = after_submission / _MEGABYTE
    figures.details["MB after restart"] = after_restart / _MEGABYTE
    figures.metrics["lost"] = await _missing(lab, sender)
    return figures


async def _missing(lab: Laboratory, sender: Sender) -> int:
    """Look a sample of the acknowledged tasks up; returns how many are not there as they should be."""
    indexes = list(sender.indexes_acknowledged())
    sample = random.Random(0).sample(indexes, min(_SAMPLE, len(indexes)))
    missing = 0

    async def look_up(index: int) -> None:
        nonlocal missing
        try:
            task = await lab.client.get(sender.task_id(index))
        except sdk.TaskNotFound:
            missing += 1
        else:
            missing += task.state is not sdk.TaskState.PENDING

    lab.meter.phase(f"looking {len(sample):,} of them up")
    await sending.closed_loop(lab.setup.in_flight, map(look_up, sample))
    return missing


async def measure_due(lab: Laboratory, *, count: int, duration: Micros) -> Figures:
    """Measure tasks that are due at once."""
    figures = Figures()
    sender, other = lab.sender("due"), lab.sender("other", first=_OTHER_FIRST)
    crew = await lab.hire([sender.queue, other.queue], count * 2)
    due = lab.clock.now().latest + count * bounds.SECOND // _SUBMITTED_PER_SECOND + _SETTLING
    lab.meter.phase(f"submitting {count:,} tasks due at one instant", count)
    await fill(lab, sender, count, due=due)
    lab.meter.phase("waiting for that instant")
    await lab.until(lambda: lab.clock.now().earliest >= due + _SETTLING, bounds.HOUR)
    lab.meter.phase(f"draining for {sending.seconds(duration):g} s, with another queue's tasks beside", count)
    await lab.let_in(crew)
    memory = _Memory(lab)
    began, started = lab.clock.elapsed(), crew.count
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(memory.watch(), name="memory")
        await _run_other(lab, other, crew, duration, figures)
        watching.cancel()
    peak = usage.peak_rss_bytes(lab.solo.node.pid)
    figures.metrics["rss_mb"] = memory.most / _MEGABYTE
    figures.details["peak MB, submission included"] = max(peak, memory.most) / _MEGABYTE
    figures.details["drained tasks/s"] = (crew.count - started) / sending.seconds(lab.clock.elapsed() - began)
    early = sum(at < due for index, _, at in crew.starts() if index < _OTHER_FIRST)
    figures.metrics["early"] += early
    return figures


class _Memory:
    """Remembers the most memory that the node was seen with."""

    def __init__(self, lab: Laboratory) -> None:
        self._lab = lab
        self.most = 0

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.most = max(self.most, usage.rss_bytes(self._lab.solo.node.pid))
            await self._lab.clock.sleep(100 * bounds.MILLISECOND)


async def _run_other(lab: Laboratory, other: Sender, crew: Crew, duration: Micros, figures: Figures) -> None:
    """Submit the second queue's tasks while the first is drained, and settle their account."""
    calls = list(arrivals.even(_OTHER_RATE, duration, 1))
    indexes = other.reserve(len(calls))
    first, begin = lab.clock.now().latest + _OTHER_LEAD, lab.clock.elapsed()

    def due(index: int) -> Micros:
        return first + calls[index - _OTHER_FIRST].at

    async def send(call: Call) -> None:
        await other.send(indexes[call.begin : call.end], due)
        lab.meter.at(crew.count)

    await sending.open_loop(lab.clock, calls, send, begin=begin)
    last = due(indexes[-1])
    await lab.until(lambda: lab.clock.now().latest >= last + bounds.SECOND, _PATIENCE)

    give_up = last + _PATIENCE
    while True:
        settled = account.settle(other.indexes_acknowledged(), crew.starts(), due)
        if settled.lost == 0 or lab.clock.now().latest >= give_up:
            break
        await lab.clock.sleep(bounds.SECOND)
    settled.enter(figures)
