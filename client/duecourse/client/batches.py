"""Submits many tasks: cuts them into requests, keeps several in flight, and tells what became of each.

Tasks are taken from the caller's iterable only as requests are made of them, so that a million of them need not be in
memory as messages. Where tasks have several leaders, each leader gets requests of its own. What an item's answer calls
worth another try is sent again with the same ids, in a smaller request, until the request's deadline.
"""

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from duecourse.client import errors, requests, tasks
from duecourse.client.retry import Caller, Patience
from duecourse.client.routing import Call, Route, Router
from duecourse.model import bounds, slots
from duecourse.model.instants import Micros
from duecourse.v1 import task_service_pb2

Result = tasks.SubmittedTask | errors.DuecourseError
_ELSEWHERE: Final = ("NO_LEADER", "NOT_SHARD_LEADER", "DRAINING")
"""Another node may know better, or be better off."""
_UNANSWERED: Final = errors.ServerFault("the server left an item of the batch without an answer")


@dataclass(slots=True)
class _Batch:
    """Tasks that travel together. `positions` tells where in the results each one's answer belongs."""

    request: task_service_pb2.SubmitTasksRequest
    task_ids: list[str]
    positions: list[int]
    slot: int | None = None
    """Of one of them; all had the same leader when they were put together. None: it did not matter."""
    room: int = requests.MAX_TASKS_BYTES
    """How many more bytes of payload it takes."""


class Submission:
    """One `submit_many`: the tasks that are left, and the results so far."""

    def __init__(self, waiting: Iterable[tasks.NewTask], namespace: str, batch_size: int, router: Router) -> None:
        self._waiting: Iterator[tasks.NewTask] = iter(waiting)
        self._namespace = namespace
        self._batch_size = batch_size
        self._router = router
        self._results: list[Result] = []
        self._begun: dict[str, _Batch] = {}
        """Requests that are being put together, by the address of their leader."""

    async def run(self, caller: Caller, in_flight: int, timeout: Micros) -> list[Result]:
        """Submit everything; return one result a task, in order."""
        async with asyncio.TaskGroup() as group:
            lanes = [group.create_task(self._lane(caller, timeout), name=f"submit-{lane}") for lane in range(in_flight)]
        if any(lane.cancelled() for lane in lanes):
            # Its calls were cancelled with the client. A group takes that for something that was wanted.
            raise asyncio.CancelledError
        return self._results

    async def _lane(self, caller: Caller, timeout: Micros) -> None:
        """Send one request after the other."""
        while (next_batch := self._next_batch()) is not None:
            for batch in self._fitting(next_batch):
                patience = caller.patience(timeout, changes=True)
                unanswered: _Batch | None = batch
                while unanswered is not None:
                    unanswered = await self._send(caller, unanswered, patience)

    def _next_batch(self) -> _Batch | None:
        """Make the next request of as many tasks, or about as many bytes, as one takes; None if nothing is left."""
        return self._next_of_leaders() if self._router.has_several or self._begun else self._next_of_all()

    def _next_of_leaders(self) -> _Batch | None:
        """Put tasks into the requests of their leaders until one is full, or nothing is left but these requests."""
        for task in self._waiting:
            task_id = task.task_id if task.task_id is not None else requests.new_id()
            slot = slots.slot_of(self._namespace, task_id)
            leader = self._router.leader(slot)
            batch = self._begun.get(leader)
            if batch is None:
                request = task_service_pb2.SubmitTasksRequest(namespace=self._namespace)
                batch = self._begun[leader] = _Batch(request, [], [], slot)
            try:
                _, size = requests.write_task(batch.request.tasks.add(), task, task_id)
            except errors.InvalidArgument as refusal:
                del batch.request.tasks[-1]
                refusal.task_id = task.task_id
                self._results.append(refusal)
                continue
            batch.task_ids.append(task_id)
            batch.positions.append(len(self._results))
            self._results.append(_UNANSWERED)
            batch.room -= size
            if batch.room < bounds.MAX_PAYLOAD_BYTES or len(batch.task_ids) >= self._batch_size:
                return self._begun.pop(leader)
        return self._begun.popitem()[1] if self._begun else None

    def _next_of_all(self) -> _Batch | None:
        """Make a request of the next tasks."""
        request = task_service_pb2.SubmitTasksRequest(namespace=self._namespace)
        task_ids: list[str] = []
        positions: list[int] = []
        results, messages, room = self._results, request.tasks, requests.MAX_TASKS_BYTES
        add, write_task = messages.add, requests.write_task
        known = len(results)
        for task in itertools.islice(self._waiting, self._batch_size):
            try:
                task_id, size = write_task(add(), task)
            except errors.InvalidArgument as refusal:
                del messages[-1]
                refusal.task_id = task.task_id
                results.append(refusal)
                continue
            task_ids.append(task_id)
            positions.append(len(results))
            results.append(_UNANSWERED)
            room -= size
            if room < bounds.MAX_PAYLOAD_BYTES:
                break
        return _Batch(request, task_ids, positions) if len(results) > known else None

    def _fitting(self, batch: _Batch) -> Iterator[_Batch]:
        """Cut a request until its parts are small enough to be sent; a task too large for any is refused."""
        if not batch.task_ids:
            return
        if batch.request.ByteSize() <= requests.MAX_TASKS_BYTES:
            yield batch
        elif len(batch.task_ids) > 1:
            middle = len(batch.task_ids) // 2
            yield from self._fitting(self._part(batch, range(middle)))
            yield from self._fitting(self._part(batch, range(middle, len(batch.task_ids))))
        else:
            try:
                requests.check_size(batch.request.tasks[0])
            except errors.InvalidArgument as refusal:
                refusal.task_id = batch.task_ids[0]
                self._results[batch.positions[0]] = refusal
            else:
                yield batch

    def _part(self, batch: _Batch, indexes: Sequence[int]) -> _Batch:
        """Make a smaller request of some of a request's tasks."""
        request = task_service_pb2.SubmitTasksRequest(namespace=self._namespace)
        request.tasks.extend(batch.request.tasks[index] for index in indexes)
        task_ids = [batch.task_ids[index] for index in indexes]
        return _Batch(request, task_ids, [batch.positions[index] for index in indexes], batch.slot)

    async def _send(self, caller: Caller, batch: _Batch, patience: Patience) -> _Batch | None:
        """Send a request and record its answers; return what is to be sent again."""
        asked: list[Route] = []

        def attempt(route: Route, seconds: float) -> Call[task_service_pb2.SubmitTasksResponse]:
            asked.append(route)
            return route.tasks.SubmitTasks(batch.request, timeout=seconds)

        try:
            response = await caller.call(attempt, patience, batch.slot)
        except errors.DuecourseError as failure:
            for position, task_id in zip(batch.positions, batch.task_ids, strict=True):
                self._results[position] = _of_task(failure, task_id)
            return None
        failed = self._record(batch, response)
        if not failed:
            return None
        if any(failure.reason in _ELSEWHERE for _, failure in failed):
            self._router.avoid(asked[-1])
        return await self._retry(batch, failed, patience)

    def _record(
        self, batch: _Batch, response: task_service_pb2.SubmitTasksResponse
    ) -> list[tuple[int, errors.DuecourseError]]:
        """Record the answers; return those worth another try, with their indexes in the batch."""
        results = self._results
        submitted_task = tasks.SubmittedTask
        failed: list[tuple[int, errors.DuecourseError]] = []
        answered = zip(batch.positions, batch.task_ids, response.results, strict=False)
        for index, (position, task_id, result) in enumerate(answered):
            submitted = result.submitted
            uid = submitted.uid
            if uid:
                results[position] = submitted_task(task_id, uid, submitted.created)
            elif result.HasField("error"):
                failure = errors.from_item(result.error)
                failure.task_id = task_id
                results[position] = failure
                if failure.is_worth_retrying:
                    failed.append((index, failure))
        return failed

    async def _retry(
        self, batch: _Batch, failed: list[tuple[int, errors.DuecourseError]], patience: Patience
    ) -> _Batch | None:
        """Wait as the most patient of the failures asks, and gather the items for another request."""
        longest = max((failure for _, failure in failed), key=_wait_asked)
        for _, failure in failed:
            patience.note(failure)
        if not await patience.allows_retry(longest):
            for index, failure in failed:
                self._results[batch.positions[index]] = _of_task(patience.verdict(failure), batch.task_ids[index])
            return None
        return self._part(batch, [index for index, _ in failed])


def _wait_asked(failure: errors.DuecourseError) -> float:
    return failure.retry_after.total_seconds() if failure.retry_after is not None else 0.0


def _of_task(failure: errors.DuecourseError, task_id: str) -> errors.DuecourseError:
    """Make one task's own copy of a failure."""
    own = failure.as_kind(type(failure))
    own.task_id = task_id
    return own
