"""Runs handlers, coroutines as asyncio tasks and plain functions in threads, and hands outcomes over in batches.

Handlers are no children of a task group, on purpose: one that ignores its cancellation must not keep the worker from
ending, and a group costs 1.1 us a handler. None is forgotten all the same: each is in `_runs` until its end is handed
over, whatever it raises, SystemExit included.

A coroutine is asked to stop by cancelling it, a thread only by `TaskContext.cancelled`. What they do then is their own
affair: a handler that returns all the same has succeeded.
"""

import asyncio
import logging
import os
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from duecourse.timing.clock import Clock
from duecourse.worker import results
from duecourse.worker.attempt import Attempt, Failed, Outcome, StopReason
from duecourse.worker.context import TaskContext
from duecourse.worker.errors import NonRetryable, RetryAfter, Stopped
from duecourse.worker.holdings import Action, Start, Stop
from duecourse.worker.registry import Handler, Registry
from duecourse.worker.threads import Threads

_log = logging.getLogger("duecourse.worker")
_EXPECTED = (NonRetryable, RetryAfter, Stopped, asyncio.CancelledError)

Ending = tuple[Attempt, Outcome]


class _Run:
    """A handler at work."""

    __slots__ = ("attempt", "context", "handler", "has_begun", "task")

    def __init__(self, attempt: Attempt, handler: Handler, context: TaskContext) -> None:
        self.attempt = attempt
        self.handler = handler
        self.context = context
        self.has_begun = False
        self.task: asyncio.Task[None] | None = None


class Runner:
    """The handlers of a worker that run now. `deliver` is called on the event loop with what has ended."""

    def __init__(
        self, registry: Registry, clock: Clock, threads: int, deliver: Callable[[Sequence[Ending]], None]
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._deliver = deliver
        self._threads = Threads(threads)
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self._runs: dict[bytes, _Run] = {}
        self._ended: list[Ending] = []
        self._ended_in_threads: deque[Ending] = deque()
        self._is_collecting = False

    def perform(self, actions: Sequence[Action]) -> None:
        """Do what the protocol machine asks for."""
        for action in actions:
            match action:
                case Start(attempts):
                    self._start(attempts)
                case Stop(attempts, reason):
                    self._stop(attempts, reason)

    def close(self) -> None:
        """Cancel what still runs on the event loop, and let idle threads end."""
        for run in self._runs.values():
            run.context.cancelled.set()
            if run.task is not None:
                run.task.cancel()
        self._threads.close()

    def _start(self, attempts: Sequence[Attempt]) -> None:
        registry, clock, create_task = self._registry, self._clock, self._loop.create_task
        for attempt in attempts:
            handler = registry[attempt.task_type]
            run = _Run(attempt, handler, TaskContext(attempt, clock))
            self._runs[attempt.token] = run
            if handler.is_async:
                run.task = create_task(self._run(run))
            else:
                self._threads.submit(partial(self._run_in_thread, run))

    def _stop(self, attempts: Sequence[Attempt], reason: StopReason) -> None:
        for attempt in attempts:
            run = self._runs.get(attempt.token)
            if run is None:
                continue  # It has ended, which is about to be delivered.
            if reason is StopReason.LEASE_LOST:
                run.context.lease_lost.set()
            is_first = not run.context.cancelled
            run.context.cancelled.set()
            # A coroutine that was cancelled before its first step would end without a word.
            if is_first and run.task is not None and run.has_begun:
                run.task.cancel()

    async def _run(self, run: _Run) -> None:
        run.has_begun = True
        attempt = run.attempt
        if attempt.stop_reason is not None:
            self._end(attempt, results.of_stop(attempt.stop_reason))
            return
        try:
            value = await run.handler.call(run.context)
            self._leave_if_forked(None)
            outcome = results.of_value(value)
        except BaseException as error:
            self._leave_if_forked(error)
            if self._loop.is_closed():
                raise  # It was left behind when the worker went, and is now collected.
            self._end(attempt, self._failed(attempt, error))
            if isinstance(error, asyncio.CancelledError) and attempt.stop_reason is None:
                raise
        else:
            self._end(attempt, outcome)

    def _run_in_thread(self, run: _Run) -> None:
        attempt = run.attempt
        try:
            if attempt.stop_reason is not None:
                outcome: Outcome = results.of_stop(attempt.stop_reason)
            else:
                value = run.handler.call(run.context)
                self._leave_if_forked(None)
                outcome = results.of_value(value)
        except BaseException as error:
            self._leave_if_forked(error)
            outcome = self._failed(attempt, error)
        self._ended_in_threads.append((attempt, outcome))
        if self._is_collecting:
            return  # The loop was woken and has not looked yet.
        self._is_collecting = True
        # After the worker has gone the loop may be closed; then nobody asks for the outcome.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._collect)

    def _leave_if_forked(self, error: BaseException | None) -> None:
        """End a child that a handler forked and let run on: a copy of the worker would tear at what both share."""
        if os.getpid() == self._process:
            return
        if error is None or isinstance(error, SystemExit):
            code = 0 if error is None else error.code
            os._exit(code if isinstance(code, int) else int(code is not None))
        traceback.print_exception(error)
        os._exit(1)

    def _failed(self, attempt: Attempt, error: BaseException) -> Failed:
        outcome = results.of_error(error, attempt.stop_reason)
        _log.log(
            logging.INFO if isinstance(error, _EXPECTED) else logging.WARNING,
            "attempt failed",
            extra={
                "task_id": attempt.task_id,
                "task_type": attempt.task_type,
                "attempt": attempt.assignment.attempt,
                "kind": str(outcome.kind),
                "failure": outcome.type,
            },
            exc_info=None if isinstance(error, _EXPECTED) else error,
        )
        return outcome

    def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        if not self._ended:
            # By the next turn of the loop whatever else ends in this one is there too.
            self._loop.call_soon(self._hand_over)
        self._ended.append((attempt, outcome))

    def _collect(self) -> None:
        self._is_collecting = False
        while self._ended_in_threads:
            self._end(*self._ended_in_threads.popleft())

    def _hand_over(self) -> None:
        ended, self._ended = self._ended, []
        for attempt, _ in ended:
            del self._runs[attempt.token]
        self._deliver(ended)
