"""`NodeCommands`: what clients want done, as calls that wait for the answer. Implements `rpc.Commands`.

Admission happens here: what waits to become durable is bounded in number and in bytes, and what comes above that is
refused at once. It counts until it is answered, though its client may have given up long before.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core import errors
from duecourse.server.core.effects import Answer, Cancelled, Submitted
from duecourse.server.core.events import Cancel, Submit
from duecourse.server.core.task import ShardId, Submission, TaskKey
from duecourse.server.shards.lanes import CommitLanes
from duecourse.server.shards.loop import Loop
from duecourse.server.telemetry.metrics import Metrics


class _Call:
    """Some requests that are answered one by one and awaited together."""

    __slots__ = ("answered", "answers", "done", "missing")

    def __init__(self, count: int, answered: Callable[[], None] = lambda: None) -> None:
        """Wait for so many answers; `answered` is called when all are there, whether somebody awaits them or not."""
        self.answers: list[Any] = [None] * count
        self.answered = answered
        self.missing = count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


def resolve(origin: Any, answer: Answer) -> None:
    """Answer the request that an origin stands for; only its first answer counts.

    A shard that broke in the middle of a batch may have answered some of those who are then turned away with it.
    """
    call, index = origin
    if call.answers[index] is not None:
        return
    call.answers[index] = answer
    call.missing -= 1
    if not call.missing:
        call.answered()
        if not call.done.done():
            call.done.set_result(None)


class NodeCommands:
    """See the module's docstring."""

    def __init__(self, loop: Loop, lanes: CommitLanes, metrics: Metrics, max_pending: int) -> None:
        self.is_draining = False
        self._loop = loop
        self._lanes = lanes
        self._metrics = metrics
        self._max_pending = max_pending
        self._pending = 0
        self._pending_bytes = 0

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[Submitted | errors.DomainError]:
        """Make tasks durable: one answer each, in order. Raises Overloaded, Draining or StoreFailed for all of them."""
        size = sum([len(submission.payload) for submission in submissions])
        self._admit(len(submissions), size)

        def answered() -> None:
            self._pending -= len(submissions)
            self._pending_bytes -= size

        call = _Call(len(submissions), answered)
        self._pending += len(submissions)
        self._pending_bytes += size
        by_shard: defaultdict[ShardId, list[tuple[Submission, Any]]] = defaultdict(list)
        for index, submission in enumerate(submissions):
            by_shard[submission.shard].append((submission, (call, index)))
        for shard, entries in by_shard.items():
            self._loop.post(shard, Submit(entries))
        await call.done
        self._count(call.answers)
        return call.answers

    async def cancel(
        self,
        namespace: str,
        task_id: str,
        request_id: str,
        fingerprint: bytes,
        expected_revision: int | None,
        wait: Micros,
    ) -> Cancelled:
        """Cancel a task, waiting for the worker's word so long. Raises DomainError."""
        self._admit(0, 0)
        call = _Call(1)
        shard = self._loop.shard_of(namespace, task_id)
        key = TaskKey(namespace, task_id)
        self._loop.post(shard, Cancel(key, request_id, fingerprint, expected_revision, wait, (call, 0)))
        await call.done
        answer = call.answers[0]
        if isinstance(answer, errors.DomainError):
            try:
                raise answer
            finally:
                del answer, call  # its traceback refers to this frame
        assert isinstance(answer, Cancelled), "a cancellation is answered as one"
        return answer

    def _admit(self, count: int, size: int) -> None:
        if self.is_draining:
            raise errors.Draining
        if self._lanes.is_refused:
            raise errors.StoreFailed("the store refuses writes")
        if self._pending + count > self._max_pending or self._pending_bytes + size > bounds.MAX_PENDING_BYTES:
            self._metrics.admission_refusals["pending_submissions"] += 1
            raise errors.Overloaded("submissions that wait to become durable")

    def _count(self, answers: Sequence[Any]) -> None:
        created = duplicate = 0
        for answer in answers:
            if isinstance(answer, Submitted):
                if answer.created:
                    created += 1
                else:
                    duplicate += 1
        self._metrics.tasks_submitted += created
        self._metrics.tasks_duplicate += duplicate
        self._metrics.tasks_refused += len(answers) - created - duplicate
