"""A client that writes down what it asks for and what it is told, and then believes neither."""

import itertools
import json
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import grpc

from duecourse import client as sdk
from duecourse.client import requests
from duecourse.model.instants import Micros
from duecourse.timing.clock import SystemClock
from duecourse.v1 import task_service_pb2, task_service_pb2_grpc

_SURELY_NOT = (sdk.Refused, sdk.Unavailable)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Ask:
    """A task that a test wants: what its handler shall do, and when."""

    task_id: str
    run_at: Micros | None = None
    seconds: float = 0
    """How long the handler works."""
    fails: int = 0
    """How many attempts fail before one succeeds."""
    dies: bool = False
    """The handler ends its process."""
    max_attempts: int = 5
    attempt_timeout: timedelta | None = None
    payload_bytes: int = 0
    queue: str = "default"


class RecordingClient:
    """Submits and cancels through the SDK; a status that tells of a fault in the server is raised."""

    def __init__(self, addresses: Sequence[str], folder: Path, name: str, timeout: timedelta) -> None:
        self._address = addresses[0]
        self._client = sdk.Client(addresses, timeout=timeout)
        self._name = name
        self._file = os.open(folder / f"clients-{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._calls = itertools.count(1)
        self._clock = SystemClock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        os.close(self._file)

    async def submit(
        self, *asks: Ask, timeout: timedelta | None = None
    ) -> list[sdk.SubmittedTask | sdk.DuecourseError]:
        """Submit tasks, and return what became of each; what is uncertain is an answer like any other."""
        calls = [self._invoke("submit", ask.task_id, ask.run_at, ask.max_attempts) for ask in asks]
        results: Sequence[sdk.SubmittedTask | sdk.DuecourseError]
        if len(asks) == 1:
            try:
                results = [await self._client.submit(_new_task(asks[0]), timeout=timeout)]
            except sdk.DuecourseError as error:
                results = [error]
        else:
            results = await self._client.submit_many([_new_task(ask) for ask in asks], timeout=timeout)
        for call, result in zip(calls, results, strict=True):
            if isinstance(result, sdk.SubmittedTask):
                self._return(call, "ok", created=result.created, uid=result.uid.hex())
            else:
                self._failed(call, result)
        return list(results)

    async def submit_once(
        self, ask: Ask, deadline: timedelta, channel: grpc.aio.Channel | None = None
    ) -> grpc.StatusCode:
        """Submit a task by one bare call, without the SDK's patience, and return its status.

        It goes to the first node, over a connection of its own unless a channel is given.
        """
        call = self._invoke("submit", ask.task_id, ask.run_at, ask.max_attempts)
        request = task_service_pb2.SubmitTaskRequest()
        requests.write_task(request.task, _new_task(ask))
        async with AsyncExitStack() as stack:
            if channel is None:
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(self._address))
            stub = task_service_pb2_grpc.TaskServiceStub(channel)
            try:
                answer = await stub.SubmitTask(request, timeout=deadline.total_seconds(), wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                self._return(call, "info")
                return error.code()
        self._return(call, "ok", created=answer.submitted.created, uid=answer.submitted.uid.hex())
        return grpc.StatusCode.OK

    async def cancel(self, task_id: str, wait: timedelta | None = None) -> sdk.Cancellation | sdk.DuecourseError:
        """Cancel a task, and return the answer."""
        call = self._invoke("cancel", task_id)
        try:
            answer = await self._client.cancel(task_id, wait=wait)
        except sdk.DuecourseError as error:
            self._failed(call, error)
            return error
        self._return(
            call,
            "ok",
            result=str(answer.result),
            state=str(answer.state),
            earlier_attempt_may_run=answer.earlier_attempt_may_run,
        )
        return answer

    async def get(self, task_id: str) -> sdk.Task:
        """Read a task whole."""
        return await self._client.get(task_id, full=True)

    def _failed(self, call: int, error: sdk.DuecourseError) -> None:
        self._return(call, "fail" if isinstance(error, _SURELY_NOT) else "info")
        if isinstance(error, sdk.ServerFault):
            raise error

    def _invoke(
        self, operation: str, task_id: str, run_at: Micros | None = None, max_attempts: int | None = None
    ) -> int:
        call = next(self._calls)
        about = {"operation": operation, "task_id": task_id, "run_at": run_at, "max_attempts": max_attempts}
        self._write("invoke", call, about)
        return call

    def _return(self, call: int, outcome: str, **answer: Any) -> None:
        self._write("return", call, {"outcome": outcome, **answer})

    def _write(self, kind: str, call: int, rest: dict[str, Any]) -> None:
        line = {"kind": kind, "client": self._name, "call": call, "wall": self._clock.now().latest, **rest}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def _new_task(ask: Ask) -> sdk.NewTask:
    quick = sdk.RetryPolicy(max_attempts=ask.max_attempts, initial_backoff=timedelta(milliseconds=100))
    payload = {"seconds": ask.seconds, "fails": ask.fails, "dies": ask.dies, "rest": "x" * ask.payload_bytes}
    task = sdk.NewTask("work", payload, task_id=ask.task_id, queue=ask.queue, retry_policy=quick)
    task.attempt_timeout = ask.attempt_timeout
    if ask.run_at is not None:
        task.run_at = _EPOCH + timedelta(microseconds=ask.run_at)
    return task
