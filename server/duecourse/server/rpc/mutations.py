"""What `routing` carries out: one submission, a batch of them, or a cancellation.

Each is made once, of the request as it was sent: what a repeat needs to be the same (a generated id, the id of a
cancellation) is settled then, and the request itself is what goes to another node. Payloads are copied only where a
batch is split.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.effects import Submitted
from duecourse.server.core.errors import DomainError, OutcomeUncertain
from duecourse.server.core.task import ShardId, Submission
from duecourse.server.rpc import Commands, convert, relay
from duecourse.server.rpc.routing import Send
from duecourse.v1 import task_pb2, task_service_pb2


class OneSubmission:
    """One task. Implements `routing.Mutation`."""

    at_least: Micros = 0

    def __init__(self, commands: Commands, request: task_service_pb2.SubmitTaskRequest, submission: Submission) -> None:
        self.shards: Sequence[ShardId] = (submission.shard,)
        self._commands = commands
        self._request = request
        self._submission = submission

    def size(self) -> int:
        """Return about how many bytes it keeps in memory."""
        return len(self._submission.payload) + bounds.MAX_NAME_BYTES

    async def here(self, items: Sequence[int]) -> Sequence[Submitted | DomainError]:
        """Submit it to this node."""
        return await self._commands.submit((self._submission,))

    async def there(self, items: Sequence[int], send: Send, seconds: float) -> Sequence[Submitted | DomainError]:
        """Submit it to another node."""
        _restore_headers(self._request.task, self._submission)
        response: task_service_pb2.SubmitTaskResponse = await send("SubmitTask", self._request, seconds)
        return (Submitted(response.submitted.uid, response.submitted.created),)


class Batch:
    """Those tasks of a batch that are well-formed. Implements `routing.Mutation`."""

    at_least: Micros = 0

    def __init__(
        self,
        commands: Commands,
        request: task_service_pb2.SubmitTasksRequest,
        submissions: Sequence[Submission],
        indexes: Sequence[int],
    ) -> None:
        """Take a request and its well-formed tasks, with their indexes in it."""
        self.shards: Sequence[ShardId] = [submission.shard for submission in submissions]
        self._commands = commands
        self._request = request
        self._submissions = submissions
        self._indexes = indexes

    def size(self) -> int:
        """Return about how many bytes it keeps in memory."""
        return sum(len(submission.payload) + bounds.MAX_NAME_BYTES for submission in self._submissions)

    async def here(self, items: Sequence[int]) -> Sequence[Submitted | DomainError]:
        """Submit tasks to this node."""
        submissions = self._submissions
        if len(items) != len(submissions):
            submissions = [submissions[item] for item in items]
        return await self._commands.submit(submissions)

    async def there(self, items: Sequence[int], send: Send, seconds: float) -> Sequence[Submitted | DomainError]:
        """Submit tasks to another node."""
        response: task_service_pb2.SubmitTasksResponse = await send("SubmitTasks", self._part(items), seconds)
        answers = [
            self._answer(result, place, self._indexes[item])
            for place, (item, result) in enumerate(zip(items, response.results, strict=False))
        ]
        return [*answers, *[OutcomeUncertain()] * (len(items) - len(answers))]

    def _part(self, items: Sequence[int]) -> task_service_pb2.SubmitTasksRequest:
        """Return the request if all of it goes, else one of some of its tasks."""
        tasks = self._request.tasks
        for item in items:
            _restore_headers(tasks[self._indexes[item]], self._submissions[item])
        if len(items) == len(tasks):
            return self._request
        part = task_service_pb2.SubmitTasksRequest(namespace=self._request.namespace)
        part.tasks.extend([tasks[self._indexes[item]] for item in items])
        return part

    def _answer(self, result: task_service_pb2.SubmitTaskResult, place: int, index: int) -> Submitted | DomainError:
        submitted = result.submitted
        uid = submitted.uid
        if uid:
            return Submitted(uid, submitted.created)
        if not result.HasField("error"):
            return OutcomeUncertain()
        return relay.of_item(result.error, f"tasks[{place}]", f"tasks[{index}]")


class Cancellation:
    """A cancellation; its answer is the response. Implements `routing.Mutation`."""

    def __init__(
        self,
        shard: ShardId,
        request: task_service_pb2.CancelTaskRequest,
        wait: Micros,
        cancel: Callable[[], Awaitable[task_service_pb2.CancelTaskResponse]],
    ) -> None:
        """Take a request that has a request id; `cancel` has this node carry it out."""
        self.shards: Sequence[ShardId] = (shard,)
        self.at_least = wait + bounds.SECOND
        self._request = request
        self._cancel = cancel

    def size(self) -> int:
        """Return about how many bytes it keeps in memory."""
        return 4 * bounds.MAX_NAME_BYTES

    async def here(self, items: Sequence[int]) -> Sequence[Any]:
        """Cancel on this node."""
        return (await self._cancel(),)

    async def there(self, items: Sequence[int], send: Send, seconds: float) -> Sequence[Any]:
        """Have another node cancel."""
        return (await send("CancelTask", self._request, seconds),)


def _restore_headers(task: task_pb2.NewTask, submission: Submission) -> None:
    """Put back what the fingerprint leaves out, and `convert` therefore took out of the message."""
    if submission.headers:
        for key in convert.TRACE_HEADERS:
            if key in submission.headers:
                task.headers[key] = submission.headers[key]
