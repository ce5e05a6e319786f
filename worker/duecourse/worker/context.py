"""`TaskContext`: what a handler gets. Fields are read from the assignment when they are asked for."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from duecourse.model import bounds
from duecourse.timing.clock import Clock
from duecourse.worker.attempt import Attempt
from duecourse.worker.errors import PayloadNotJson, Stopped
from duecourse.worker.flag import Flag
from duecourse.worker.text import cut

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class TaskContext:
    """One attempt at a task, as its handler sees it. May be used from the handler's thread."""

    __slots__ = ("_assignment", "_attempt", "_clock", "_task", "cancelled", "lease_lost")

    def __init__(self, attempt: Attempt, clock: Clock) -> None:
        self._attempt = attempt
        self._assignment = attempt.assignment
        self._task = attempt.assignment.task
        self._clock = clock
        self.cancelled = Flag()
        """Raised when the handler is asked to stop, for whatever reason."""
        self.lease_lost = Flag()
        """Raised when the attempt is no longer this worker's: another one may run it by now."""

    @property
    def namespace(self) -> str:
        """The namespace that the task lives in."""
        return self._task.namespace

    @property
    def task_id(self) -> str:
        """The submitter's name for the task."""
        return self._task.task_id

    @property
    def task_type(self) -> str:
        """Which handler runs it."""
        return self._task.task_type

    @property
    def queue(self) -> str:
        """The queue that it came through."""
        return self._task.queue

    @property
    def payload(self) -> bytes:
        """What was submitted, byte for byte."""
        return self._task.payload

    @property
    def content_type(self) -> str:
        """The media type of `payload`."""
        return self._task.content_type

    def json(self) -> Any:
        """Decode `payload` as JSON. Raises PayloadNotJson, which fails the task for good unless it is caught."""
        payload = self._task.payload
        if not payload:
            raise PayloadNotJson("the payload is empty, which is not JSON: the task was submitted without one")
        try:
            return json.loads(payload)
        except (ValueError, RecursionError) as error:
            of_type = f" of type {self._task.content_type}" if self._task.content_type else ""
            raise PayloadNotJson(f"the payload, {len(payload)} bytes{of_type}, is not JSON: {error}") from error

    @property
    def headers(self) -> dict[str, str]:
        """What the submitter handed on beside the payload."""
        return dict(self._task.headers)

    @property
    def run_at(self) -> datetime:
        """When the submitter wanted it, UTC."""
        run_at = self._task.run_at
        return _EPOCH + timedelta(seconds=run_at.seconds, microseconds=run_at.nanos // 1_000)

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._assignment.attempt

    @property
    def uid(self) -> UUID:
        """Names the task among all that ever had its id."""
        return UUID(bytes=self._task.uid)

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this task and for no other one: give it to what must not act twice."""
        return str(self.uid)

    @property
    def fencing_token(self) -> int:
        """Grows with every attempt of this task: a destination that remembers the highest can refuse older ones."""
        return self._assignment.fencing_token

    @property
    def deadline(self) -> float | None:
        """How many seconds are left of the attempt's time, 0 if none; None if it has no bound."""
        at = self._attempt.deadline
        return None if at is None else max(0, at - self._clock.elapsed()) / bounds.SECOND

    def heartbeat(self, progress: str) -> None:
        """Say for people how far the handler has come. Costs nothing: the last one goes with the next sign of life."""
        self._attempt.progress = cut(progress, bounds.MAX_PROGRESS_BYTES)

    def raise_if_cancelled(self) -> None:
        """Raise `Stopped` if the handler was asked to stop; for threads, which cannot be interrupted."""
        if self.cancelled:
            reason = self._attempt.stop_reason
            raise Stopped(f"asked to stop: {reason}")
