"""A worker that writes down what its handlers see.

    python -m faults.worker_process ADDRESSES FILE NAME QUEUES SLOTS SLOWNESS

Addresses and queues are separated by commas; what its handlers are asked to do takes SLOWNESS times as long.

The first thing that a handler does is to append a line to the file (see `histories`), in one write, which outlives the
process. What it does then is told by the payload: work for some seconds, fail, or end the process at once.
"""

import asyncio
import json
import os
import sys
from typing import Any

from duecourse.model import bounds
from duecourse.timing.clock import SystemClock
from duecourse.worker import TaskContext, Worker

_SLICE = bounds.SECOND // 2


class History:
    """The file of one worker process."""

    def __init__(self, file: str, worker: str) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._worker = f"{worker}-{os.getpid()}"
        self._clock = SystemClock()

    def write(self, kind: str, context: TaskContext, **rest: Any) -> None:
        """Append an event."""
        now = self._clock.now()
        line = {
            "kind": kind,
            "worker": self._worker,
            "task_id": context.task_id,
            "attempt": context.attempt,
            "fencing_token": context.fencing_token,
            "wall": now.latest,
            "boot": now.elapsed,
            **rest,
        }
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


async def run(addresses: str, file: str, name: str, queues: str, slots: str, slowness: str) -> None:
    """Work until SIGTERM."""
    history = History(file, name)
    clock = SystemClock()
    worker = Worker(addresses.split(","), name=name, queues=queues.split(","), slots=int(slots))

    async def work(context: TaskContext) -> None:
        history.write("start", context)
        asked = context.json()
        if asked["dies"]:
            os._exit(137)
        try:
            await _work(context, history, clock, int(asked["seconds"] * int(slowness) * bounds.SECOND))
        except asyncio.CancelledError:
            history.write("finish", context, outcome="stopped")
            raise
        if context.attempt <= asked["fails"]:
            history.write("finish", context, outcome="failure")
            raise RuntimeError("this attempt was asked to fail")
        history.write("finish", context, outcome="success")

    worker.register("work", work)
    await worker.run()


async def _work(context: TaskContext, history: History, clock: SystemClock, duration: int) -> None:
    until = clock.elapsed() + duration
    while (left := until - clock.elapsed()) > 0:
        await clock.sleep(min(left, _SLICE))
        if left > _SLICE:
            context.heartbeat(f"{left // bounds.MILLISECOND} ms are left")
            history.write("heartbeat", context)


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:7]))
