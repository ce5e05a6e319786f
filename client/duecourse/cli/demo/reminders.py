"""The demonstration's worker, a process of its own: `python -m duecourse.cli.demo.reminders ADDRESSES QUEUE FILE`.

The first thing that its handler does is to append one line to the file, in one write.
"""

import asyncio
import os
import sys
from typing import Final

from duecourse.model import bounds
from duecourse.timing.clock import SystemClock
from duecourse.worker import TaskContext, Worker

TASK_TYPE: Final = "reminder"
HANDLER_TIME: Final = 50 * bounds.MILLISECOND
"""How long a reminder takes to deliver, so that some are under way whenever the scheduler dies."""


async def run(addresses: str, queue: str, file: str) -> None:
    """Write down every start until SIGTERM."""
    clock = SystemClock()
    worker = Worker(addresses.split(","), queues=[queue], slots=200)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    async def remind(context: TaskContext) -> None:
        os.write(descriptor, f"{context.task_id} {context.attempt} {clock.now().latest}\n".encode())
        await clock.sleep(HANDLER_TIME)

    worker.register(TASK_TYPE, remind)
    try:
        await worker.run()
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:4]))
