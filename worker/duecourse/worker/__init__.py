"""The SDK for running handlers: make a `Worker`, register functions with it, and await its `run`.

    worker = Worker("localhost:7400")

    @worker.task("reminder.send")
    async def send(context: TaskContext) -> None:
        reminder = context.json()
        await post(reminder, idempotency_key=context.idempotency_key)

    asyncio.run(worker.run())

Execution is at least once: an attempt whose worker vanished runs again. `idempotency_key` and `fencing_token` are what
makes an effect safe against that.
"""

from duecourse.worker.context import TaskContext
from duecourse.worker.errors import NonRetryable, PayloadNotJson, RetryAfter, Stopped
from duecourse.worker.worker import Health, NodeHealth, Worker

__all__ = ["Health", "NodeHealth", "NonRetryable", "PayloadNotJson", "RetryAfter", "Stopped", "TaskContext", "Worker"]
