"""The bench's worker, a process of its own that runs handlers which do nothing but record when they began.

`python -m duecourse.cli.bench.worker_process ADDRESSES SLOTS RECORDS QUEUE...`: it maps the file of records, waits for
a line on its standard input, connects, and goes on until the next line or the end of input.
"""

import asyncio
import os
import sys
from pathlib import Path

from duecourse.cli.bench.records import TASK_TYPE, Phase, Records
from duecourse.cli.launcher import running
from duecourse.timing.clock import SystemClock
from duecourse.worker import TaskContext, Worker


def main(address: str, slots: str, path: str, *queues: str) -> None:
    """Be a worker."""
    clock = SystemClock()
    records = Records.open(Path(path))
    worker = Worker(address.split(","), queues=queues, slots=int(slots))
    append, now = records.append, clock.now

    async def record(context: TaskContext) -> None:
        append(int(context.task_id.rpartition("-")[2]), context.attempt, now().latest)

    worker.register(TASK_TYPE, record)
    records.phase = Phase.LOADED
    standard_input = sys.stdin.fileno()
    if not os.read(standard_input, 64):
        return

    async def run() -> None:
        asyncio.get_running_loop().add_reader(standard_input, stop)
        await worker.run()

    def stop() -> None:
        asyncio.get_running_loop().remove_reader(standard_input)
        worker.stop()

    with asyncio.Runner(loop_factory=running.loop_factory()) as runner:
        runner.run(run())
    records.ended_at = now().latest
    records.phase = Phase.ENDED


if __name__ == "__main__":
    main(*sys.argv[1:])
