"""`TaskService`: parses requests, has commands carried out by the node, and reads tasks from the store.

A batch has a result for each item: one that is malformed is refused alone, and the rest is submitted. With a `Routing`
the commands of other nodes' shards are carried out there; without one, as it is for a node alone and for what other
nodes send, this node carries out what it leads and refuses the rest.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import uuid_utils
from grpc import aio

from duecourse.model import bounds, slots
from duecourse.model.instants import Micros
from duecourse.server.core import errors
from duecourse.server.core.effects import Submitted
from duecourse.server.core.task import ShardId, Submission, TaskKey, TaskState
from duecourse.server.rpc import Commands, convert, page_token, present
from duecourse.server.rpc.calls import Calls
from duecourse.server.rpc.mutations import Batch, Cancellation, OneSubmission
from duecourse.server.rpc.routing import Routing
from duecourse.server.storage import CorruptRecord, StoredTask, StoreUnavailable, TaskPage, TaskQuery, TaskStore
from duecourse.server.telemetry.metrics import Metrics
from duecourse.v1 import task_pb2, task_service_pb2, task_service_pb2_grpc

PAGE_BYTES: Final = bounds.MAX_REQUEST_BYTES * 3 // 4
_STATES: Final = {number: state for state, number in present.STATES.items()}
_VIEWS: Final = (task_pb2.TASK_VIEW_UNSPECIFIED, task_pb2.TASK_VIEW_BASIC, task_pb2.TASK_VIEW_FULL)
_Context = aio.ServicerContext[Any, Any]


class TaskService(task_service_pb2_grpc.TaskServiceServicer):
    """See the module's docstring."""

    def __init__(
        self,
        commands: Commands,
        store: TaskStore,
        calls: Calls,
        metrics: Metrics,
        *,
        shard_of_slot: Callable[[int], ShardId],
        utc: Callable[[], Micros],
        routing: Routing | None = None,
    ) -> None:
        self._commands = commands
        self._store = store
        self._calls = calls
        self._metrics = metrics
        self._shard_of_slot = shard_of_slot
        self._utc = utc
        self._routing = routing
        self._submissions = convert.Submissions(shard_of_slot)

    async def SubmitTask(  # noqa: N802
        self,
        request: task_service_pb2.SubmitTaskRequest,
        context: aio.ServicerContext[
            task_service_pb2.SubmitTaskRequest, Awaitable[task_service_pb2.SubmitTaskResponse]
        ],
    ) -> task_service_pb2.SubmitTaskResponse:
        """Submit one task."""
        return await self._calls.answer("SubmitTask", context, partial(self._submit, context), request)

    async def SubmitTasks(  # noqa: N802
        self,
        request: task_service_pb2.SubmitTasksRequest,
        context: aio.ServicerContext[
            task_service_pb2.SubmitTasksRequest, Awaitable[task_service_pb2.SubmitTasksResponse]
        ],
    ) -> task_service_pb2.SubmitTasksResponse:
        """Submit tasks."""
        return await self._calls.answer("SubmitTasks", context, partial(self._submit_batch, context), request)

    async def GetTask(  # noqa: N802
        self,
        request: task_service_pb2.GetTaskRequest,
        context: aio.ServicerContext[task_service_pb2.GetTaskRequest, Awaitable[task_service_pb2.GetTaskResponse]],
    ) -> task_service_pb2.GetTaskResponse:
        """Read one task."""
        return await self._calls.answer("GetTask", context, self._get, request)

    async def ListTasks(  # noqa: N802
        self,
        request: task_service_pb2.ListTasksRequest,
        context: aio.ServicerContext[task_service_pb2.ListTasksRequest, Awaitable[task_service_pb2.ListTasksResponse]],
    ) -> task_service_pb2.ListTasksResponse:
        """List tasks."""
        return await self._calls.answer("ListTasks", context, self._list, request)

    async def CancelTask(  # noqa: N802
        self,
        request: task_service_pb2.CancelTaskRequest,
        context: aio.ServicerContext[
            task_service_pb2.CancelTaskRequest, Awaitable[task_service_pb2.CancelTaskResponse]
        ],
    ) -> task_service_pb2.CancelTaskResponse:
        """Cancel a task."""
        return await self._calls.answer("CancelTask", context, partial(self._cancel, context), request)

    async def _submit(
        self, context: _Context, request: task_service_pb2.SubmitTaskRequest
    ) -> task_service_pb2.SubmitTaskResponse:
        try:
            submission = self._submissions.one(request, self._utc())
        except errors.InvalidField:
            self._metrics.tasks_refused += 1
            raise
        if self._routing is None:
            (answer,) = await self._commands.submit((submission,))
        else:
            one = OneSubmission(self._commands, request, submission)
            (answer,) = await self._routing.carry_out(one, context.time_remaining())
        if not isinstance(answer, Submitted):
            try:
                raise answer
            finally:
                del answer  # its traceback refers to this frame
        response = task_service_pb2.SubmitTaskResponse()
        present.submitted(submission.task_id, answer, response.submitted)
        return response

    async def _submit_batch(
        self, context: _Context, request: task_service_pb2.SubmitTasksRequest
    ) -> task_service_pb2.SubmitTasksResponse:
        parsed = self._submissions.batch(request, self._utc())
        submissions = [one for one in parsed if isinstance(one, Submission)]
        self._metrics.tasks_refused += len(parsed) - len(submissions)
        if self._routing is None or not submissions:
            answers = iter(await self._commands.submit(submissions) if submissions else ())
        else:
            indexes: Sequence[int] = range(len(parsed))
            if len(submissions) != len(parsed):
                indexes = [index for index in indexes if isinstance(parsed[index], Submission)]
            batch = Batch(self._commands, request, submissions, indexes)
            answers = iter(await self._routing.carry_out(batch, context.time_remaining()))
        response = task_service_pb2.SubmitTasksResponse()
        add = response.results.add
        for one in parsed:
            if isinstance(one, Submission):
                present.result(one.task_id, next(answers), add())
            else:
                present.result("", one, add())
        return response

    async def _get(self, request: task_service_pb2.GetTaskRequest) -> task_service_pb2.GetTaskResponse:
        key = TaskKey(convert.namespace_of(request.namespace), convert.required_name(request.task_id, "task_id"))
        if request.view not in _VIEWS:
            raise errors.InvalidField("view", "BASIC or FULL is wanted")
        is_full = request.view == task_pb2.TASK_VIEW_FULL
        try:
            found = await self._store.read_task(key, full=is_full)
        except StoreUnavailable as error:
            raise errors.StoreFailed(str(error)) from error
        if found is None:
            raise errors.TaskNotFound(key.task_id)
        if isinstance(found, CorruptRecord):
            raise errors.RecordCorrupt(key.task_id)
        response = task_service_pb2.GetTaskResponse()
        present.stored_task(found, response.task, full=is_full)
        return response

    async def _list(self, request: task_service_pb2.ListTasksRequest) -> task_service_pb2.ListTasksResponse:
        query = _query(request)
        limit = request.page_size or bounds.DEFAULT_PAGE
        if not 1 <= limit <= bounds.MAX_PAGE:
            raise errors.InvalidField("page_size", f"1 to {bounds.MAX_PAGE} is wanted, or 0 for {bounds.DEFAULT_PAGE}")
        after = page_token.read(request.page_token, query) if request.page_token else ""
        try:
            page = await self._store.list_tasks(query, after, limit)
        except StoreUnavailable as error:
            raise errors.StoreFailed(str(error)) from error
        return _page(query, page)

    async def _cancel(
        self, context: _Context, request: task_service_pb2.CancelTaskRequest
    ) -> task_service_pb2.CancelTaskResponse:
        namespace = convert.namespace_of(request.namespace)
        task_id = convert.required_name(request.task_id, "task_id")
        request_id = convert.optional_name(request.request_id, "request_id")
        expected = request.expected_revision if request.HasField("expected_revision") else None
        wait = bounds.DEFAULT_CANCEL_WAIT
        if request.HasField("wait"):
            wait = convert.duration(request.wait, "wait", 0, bounds.MAX_CANCEL_WAIT)
        remaining = context.time_remaining()
        if remaining is not None:
            # The answer should reach a client whose deadline is shorter than its wait.
            wait = min(wait, int(remaining * bounds.SECOND * 0.8))
        elif wait > bounds.DEFAULT_CALL_DEADLINE // 2:
            wait = min(wait, bounds.DEFAULT_CALL_DEADLINE - bounds.SECOND)
        if self._routing is not None and not request_id:
            # What is tried again, here or there, has to be known as the same.
            request_id = request.request_id = str(uuid_utils.uuid7())
        fingerprint = convert.cancel_fingerprint(expected)

        async def cancel() -> task_service_pb2.CancelTaskResponse:
            return present.cancelled(
                await self._commands.cancel(namespace, task_id, request_id, fingerprint, expected, wait)
            )

        if self._routing is None:
            return await cancel()
        shard = self._shard_of_slot(slots.slot_of(namespace, task_id))
        (answer,) = await self._routing.carry_out(Cancellation(shard, request, wait, cancel), remaining)
        if isinstance(answer, errors.DomainError):
            try:
                raise answer
            finally:
                del answer  # its traceback refers to this frame
        assert isinstance(answer, task_service_pb2.CancelTaskResponse), "a cancellation is answered as one"
        return answer


def _query(request: task_service_pb2.ListTasksRequest) -> TaskQuery:
    states: set[TaskState] = set()
    for index, number in enumerate(request.states):
        if number not in _STATES:
            raise errors.InvalidField(f"states[{index}]", "a state of TaskState is wanted")
        states.add(_STATES[number])
    return TaskQuery(
        namespace=convert.namespace_of(request.namespace),
        queue=convert.optional_name(request.queue, "queue") or None,
        states=frozenset(states),
        run_at_from=convert.instant(request.run_at_from, "run_at_from") if request.HasField("run_at_from") else None,
        run_at_before=(
            convert.instant(request.run_at_before, "run_at_before") if request.HasField("run_at_before") else None
        ),
    )


def _page(query: TaskQuery, page: TaskPage) -> task_service_pb2.ListTasksResponse:
    """Present a page, cut where it would get larger than a client takes by default."""
    response = task_service_pb2.ListTasksResponse()
    next_after = page.next_after
    room = PAGE_BYTES
    rows: list[StoredTask | CorruptRecord] = [*page.tasks, *page.corrupt]
    if page.corrupt:
        rows.sort(key=_task_id)
    for index, row in enumerate(rows):
        message = response.tasks.add()
        if isinstance(row, CorruptRecord):
            present.corrupt(row, message)
        else:
            present.stored_task(row, message, full=False)
        room -= message.ByteSize()
        if room < 0 and index + 1 < len(rows):
            next_after = message.task_id
            break
    if next_after is not None:
        response.next_page_token = page_token.make(query, next_after)
    return response


def _task_id(row: StoredTask | CorruptRecord) -> str:
    return row.key.task_id if isinstance(row, CorruptRecord) else row.task.task_id
