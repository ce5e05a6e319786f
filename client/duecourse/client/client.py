"""`Client`: submits, reads and cancels tasks.

A call that can be repeated safely is repeated by itself until its deadline; all of them can, because submissions go by
their ids and cancellations by their request ids, which are made here, once a call, if the caller gives none. What is
raised is told in `duecourse.client.errors`.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Final, Never, Self

from duecourse.client import answers, batches, errors, requests, tasks
from duecourse.client.cluster import Cluster
from duecourse.client.following import follow
from duecourse.client.retry import Caller
from duecourse.client.routing import Call, Route, Router
from duecourse.model import bounds, slots
from duecourse.model.addresses import several
from duecourse.model.instants import Micros
from duecourse.timing.clock import Clock, SystemClock
from duecourse.v1 import cluster_service_pb2, task_pb2, task_service_pb2

DEFAULT_ADDRESS: Final = f"127.0.0.1:{bounds.API_PORT}"
DEFAULT_TIMEOUT: Final = timedelta(seconds=10)
DEFAULT_BATCH: Final = 500
DEFAULT_IN_FLIGHT: Final = 4
_ALL: Final = tasks.TaskFilter()


class Client:
    """A connection to a cluster, for one namespace; use it as an async context manager, or close it.

    Every method takes a `timeout` for all its tries together, in place of the client's.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        namespace: str = "default",
        timeout: timedelta = DEFAULT_TIMEOUT,
        follows_leaders: bool = True,
        clock: Clock | None = None,
        source: random.Random | None = None,
    ) -> None:
        """Name one or more nodes as `host:port`, in a sequence or with commas; nothing is opened yet.

        Raises ValueError for what is no address.

        With `follows_leaders` it learns from them which other nodes there are, and goes straight to who leads a task;
        without, it knows only the nodes that it was given, and they pass on what others lead.
        """
        self._clock = clock or SystemClock()
        self._source = source or random.Random()
        self._router = Router(several(addresses), self._clock)
        self._namespace = namespace
        self._timeout = timeout
        self._follows_leaders = follows_leaders
        self._following: asyncio.Task[Never] | None = None
        self._caller = Caller(self._router, self._clock, self._source)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls in flight are cancelled, and later ones raise RuntimeError."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.wait((following,))
        await self._router.close()

    async def submit(self, task: tasks.NewTask, *, timeout: timedelta | None = None) -> tasks.SubmittedTask:
        """Submit a task; it is durable once this returns.

        A failure carries the `task_id`: submitting it again with that id is the same submission.
        """
        request = task_service_pb2.SubmitTaskRequest(namespace=self._namespace)
        task_id, _ = requests.write_task(request.task, task)
        requests.check_size(request.task)

        def attempt(route: Route, seconds: float) -> Call[task_service_pb2.SubmitTaskResponse]:
            return route.tasks.SubmitTask(request, timeout=seconds)

        try:
            patience = self._caller.patience(self._micros(timeout), changes=True)
            response = await self._caller.call(attempt, patience, self._slot(task_id))
        except errors.DuecourseError as failure:
            failure.task_id = task_id
            raise
        submitted = response.submitted
        return tasks.SubmittedTask(task_id, submitted.uid, submitted.created)

    async def submit_many(
        self,
        new_tasks: Iterable[tasks.NewTask],
        *,
        batch_size: int = DEFAULT_BATCH,
        in_flight: int = DEFAULT_IN_FLIGHT,
        timeout: timedelta | None = None,
    ) -> list[batches.Result]:
        """Submit tasks in requests of up to `batch_size`, and return what became of each, in order.

        A result is a `SubmittedTask`, or the exception that `submit` would have raised; one bad task does not hurt the
        others. `timeout` is each request's.
        """
        if not 1 <= batch_size <= bounds.MAX_BATCH:
            raise ValueError(f"batch_size is from 1 to {bounds.MAX_BATCH}")
        if in_flight < 1:
            raise ValueError("in_flight is at least 1")
        self._follow()
        submission = batches.Submission(new_tasks, self._namespace, batch_size, self._router)
        return await submission.run(self._caller, in_flight, self._micros(timeout))

    async def get(self, task_id: str, *, full: bool = False, timeout: timedelta | None = None) -> tasks.Task:
        """Read a task; with `full` also its payload, its result and its attempts."""
        self._follow()
        view = task_pb2.TASK_VIEW_FULL if full else task_pb2.TASK_VIEW_BASIC
        request = task_service_pb2.GetTaskRequest(namespace=self._namespace, task_id=task_id, view=view)

        def attempt(route: Route, seconds: float) -> Call[task_service_pb2.GetTaskResponse]:
            return route.tasks.GetTask(request, timeout=seconds)

        try:
            response = await self._caller.call(attempt, self._caller.patience(self._micros(timeout), changes=False))
        except errors.DuecourseError as failure:
            failure.task_id = task_id
            raise
        return answers.task(response.task, full=full)

    async def list_page(
        self,
        wanted: tasks.TaskFilter = _ALL,
        *,
        page_token: str = "",
        page_size: int = bounds.DEFAULT_PAGE,
        timeout: timedelta | None = None,
    ) -> tasks.TaskPage:
        """Read one page of the tasks that are wanted, in the order of their ids."""
        self._follow()
        request = requests.list_tasks(self._namespace, wanted, page_size, page_token)

        def attempt(route: Route, seconds: float) -> Call[task_service_pb2.ListTasksResponse]:
            return route.tasks.ListTasks(request, timeout=seconds)

        response = await self._caller.call(attempt, self._caller.patience(self._micros(timeout), changes=False))
        return answers.page(response)

    async def list(
        self,
        wanted: tasks.TaskFilter = _ALL,
        *,
        page_size: int = bounds.DEFAULT_PAGE,
        timeout: timedelta | None = None,
    ) -> AsyncIterator[tasks.Task]:
        """Read all tasks that are wanted, page after page; `timeout` is each page's."""
        page_token = ""
        while True:
            page = await self.list_page(wanted, page_token=page_token, page_size=page_size, timeout=timeout)
            for task in page.tasks:
                yield task
            page_token = page.next_page_token
            if not page_token:
                return

    async def cancel(
        self,
        task_id: str,
        *,
        expected_revision: int | None = None,
        wait: timedelta | None = None,
        request_id: str | None = None,
        timeout: timedelta | None = None,
    ) -> tasks.Cancellation:
        """Cancel a task, and tell truly whether a handler may have run.

        `wait` bounds how long the server waits for the worker's word, and comes on top of `timeout`. A call that is
        repeated with the same `request_id` gets the first answer.
        """
        request = task_service_pb2.CancelTaskRequest(
            namespace=self._namespace,
            task_id=task_id,
            request_id=request_id or requests.new_id(),
            expected_revision=expected_revision,
        )
        waits: Micros = bounds.DEFAULT_CANCEL_WAIT
        if wait is not None:
            requests.write_duration(request.wait, wait)
            waits = min(_to_micros(wait), bounds.MAX_CANCEL_WAIT)

        def attempt(route: Route, seconds: float) -> Call[task_service_pb2.CancelTaskResponse]:
            return route.tasks.CancelTask(request, timeout=seconds)

        patience = self._caller.patience(
            self._micros(timeout) + waits, changes=True, at_least=waits + bounds.COMMIT_TIMEOUT
        )
        try:
            response = await self._caller.call(attempt, patience, self._slot(task_id))
        except errors.DuecourseError as failure:
            failure.task_id = task_id
            raise
        return answers.cancellation(response)

    async def cluster(self, *, timeout: timedelta | None = None) -> Cluster:
        """Describe the cluster as the node that answers sees it; a seed, while one answers."""
        self._follow()
        request = cluster_service_pb2.GetClusterRequest()

        def attempt(route: Route, seconds: float) -> Call[cluster_service_pb2.GetClusterResponse]:
            return route.cluster.GetCluster(request, timeout=seconds)

        response = await self._caller.call(attempt, self._caller.patience(self._micros(timeout), changes=False))
        return answers.describe_cluster(response)

    async def drain_node(self, node_id: str, *, timeout: timedelta | None = None) -> None:
        """Have a node hand its shards over and end; returns once it has begun. Asking again is harmless."""
        self._follow()
        request = cluster_service_pb2.DrainNodeRequest(node_id=node_id)

        def attempt(route: Route, seconds: float) -> Call[cluster_service_pb2.DrainNodeResponse]:
            return route.cluster.DrainNode(request, timeout=seconds)

        await self._caller.call(attempt, self._caller.patience(self._micros(timeout), changes=True))

    def _slot(self, task_id: str) -> int | None:
        """Return the slot of a task that is to be changed, if it matters."""
        self._follow()
        return slots.slot_of(self._namespace, task_id) if self._router.has_several else None

    def _follow(self) -> None:
        """Begin to follow the cluster, if that was not done yet."""
        if self._follows_leaders and self._following is None:
            # A client need not be a context manager, so there is no group that its task could belong to.
            loop = asyncio.get_running_loop()
            self._following = loop.create_task(follow(self._router, self._clock, self._source), name="follow leaders")

    def _micros(self, timeout: timedelta | None) -> Micros:
        return _to_micros(self._timeout if timeout is None else timeout)


def _to_micros(duration: timedelta) -> Micros:
    return duration // timedelta(microseconds=1)
