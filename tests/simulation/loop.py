"""An event loop with virtual time, and the processes that share it.

One thread runs everything: a *process* is what dies, stops and goes on together, as an operating system's would, and
every callback belongs to the process in whose context it was made. Which process runs next, and by default which of
its callbacks, is drawn from the seed. Each step takes a little time; when nothing can run, time jumps to the next
timer. So a run is a function of its seed, and minutes pass in a fraction of a second.

- A process that is *paused* keeps what becomes ready and runs it when it goes on, like SIGSTOP and SIGCONT.
- A process that is *dead* runs nothing any more, not even its `finally` blocks, like SIGKILL.
"""

import asyncio
import contextvars
import heapq
import itertools
import random
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from duecourse.model import bounds
from duecourse.model.instants import Micros

_PROCESS: Final[contextvars.ContextVar["Process"]] = contextvars.ContextVar("process")
_LAST_STEPS: Final = 200_000
_FEW_STEPS: Final = 200


class Deadlock(Exception):
    """Nothing can run and nothing is due: somebody waits for ever."""


def wake(waiter: "asyncio.Future[None]") -> None:
    """Let go on what waits, if it still does."""
    if not waiter.done():
        waiter.set_result(None)


def _nothing() -> None:
    pass


class Handle(asyncio.TimerHandle):
    """A callback that is to run: as little as one needs."""

    __slots__ = ("context", "is_cancelled", "when_due")

    def __init__(self, callback: Callable[..., object], args: Any, context: contextvars.Context, due: Micros) -> None:
        self._callback = callback
        self._args = args
        self.context = context
        self.is_cancelled = False
        self.when_due = due

    def cancel(self) -> None:
        """Do not run it, and hold nothing any more: it stays in the queue until its time."""
        self.is_cancelled = True
        self._callback = _nothing
        self._args = ()

    def cancelled(self) -> bool:
        """Tell whether it will not run."""
        return self.is_cancelled

    def when(self) -> float:
        """Return when it is due, in seconds."""
        return self.when_due / bounds.SECOND

    def __repr__(self) -> str:
        return f"<{self._callback!r} due {self.when_due}>"


class Process:
    """What runs, pauses and dies together."""

    def __init__(self, loop: "SimulationLoop", name: str, number: int) -> None:
        self.name = name
        self.host = name.partition("#")[0]
        """The machine that it runs on: its name up to the number of its start."""
        self.number = number
        self.is_paused = False
        self.is_dead = False
        self.began_at = loop.now
        self.context = contextvars.Context()
        self.context.run(_PROCESS.set, self)
        self.ready: deque[Handle] = deque()
        self.is_runnable = False
        self._loop = loop

    def __repr__(self) -> str:
        return self.name

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str | None = None) -> "asyncio.Task[Any]":
        """Run a coroutine in this process, at the outermost level. What it raises is one of the loop's failures."""
        self._loop.unstarted[coroutine] = None
        return self._loop.create_task(self._outermost(coroutine), name=name, context=self.context.copy())

    async def _outermost(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        # Not left to asyncio: it tells of what nobody fetched only when the task is collected, after the run.
        del self._loop.unstarted[coroutine]
        try:
            return await coroutine
        except Exception as error:
            if not self.is_dead:
                self._loop.call_exception_handler({"message": "nobody handles it", "exception": error})
            raise

    def pause(self) -> None:
        """Let nothing of it run until it is resumed."""
        self.is_paused = True

    def resume(self) -> None:
        """Let it go on."""
        self.is_paused = False
        self._loop.enqueue(self)

    def kill(self) -> None:
        """Let nothing of it run ever again."""
        self.is_dead = True


class SimulationLoop(asyncio.AbstractEventLoop):
    """See the module's docstring. `step` is how long a callback takes."""

    def __init__(self, seed: int, *, step: Micros = 5, is_shuffled: bool = True) -> None:
        self.now: Micros = 0
        """Elapsed since the beginning, for whoever sees everything."""
        self.steps = 0
        self.digest = 0
        """Of all that ran so far: two runs are the same if this is."""
        self.failures: list[str] = []
        """Exceptions that nobody handled."""
        self.unstarted: dict[Coroutine[Any, Any, Any], None] = {}
        """What was spawned and has not begun to run; it never will if its process died before."""
        self._random = random.Random(seed).random
        self._step = step
        self._is_shuffled = is_shuffled
        self._timers: list[tuple[Micros, int, Handle, Process]] = []
        self._order = itertools.count()
        self._task_numbers = itertools.count(1)
        self._runnable: list[Process] = []
        self._processes = itertools.count()
        self._is_ending = False
        self._is_closed = False
        self.world = self.process("world")
        """Who carries messages and works miracles; never pauses, never dies."""

    def process(self, name: str) -> Process:
        """Make a process."""
        return Process(self, name, next(self._processes))

    @property
    def current(self) -> Process:
        """The process that runs now."""
        return _PROCESS.get(self.world)

    def enqueue(self, process: Process) -> None:
        """Let a process run if it has something to run."""
        if process.ready and not process.is_runnable and not process.is_paused and not process.is_dead:
            process.is_runnable = True
            self._runnable.append(process)

    def after(self, delay: Micros, callback: Callable[..., object], *args: Any) -> Handle:
        """Call back in the world, after a delay."""
        when = self.now + delay
        handle = Handle(callback, args, self.world.context, when)
        heapq.heappush(self._timers, (when, next(self._order), handle, self.world))
        return handle

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run the world's coroutine to its end, then end all that is left. Raises Deadlock and what `main` raises."""
        asyncio._set_running_loop(self)
        try:
            task = self.world.spawn(main, "world")
            self._run_until(task.done)
            self._end_all()
            task.result()
        finally:
            asyncio._set_running_loop(None)
            self._is_closed = True

    def _run_until(self, is_over: Callable[[], bool]) -> None:
        """Run step after step. Raises Deadlock. One long function, since all of a run's time goes through it."""
        timers, runnable, draw, step = self._timers, self._runnable, self._random, self._step
        is_shuffled, pop = self._is_shuffled, heapq.heappop
        while not is_over():
            now = self.now
            while timers and timers[0][0] <= now:
                _, _, timer, process = pop(timers)
                if not timer.is_cancelled:
                    process.ready.append(timer)
                    if not process.is_runnable:
                        self.enqueue(process)
            if not runnable:
                if not timers:
                    raise Deadlock
                self.now = timers[0][0]
                continue
            index = int(draw() * len(runnable)) if len(runnable) > 1 else 0
            process = runnable[index]
            ready = process.ready
            if process.is_paused or process.is_dead:
                self._dequeue(index)
                continue
            if is_shuffled and len(ready) > 1:
                ready.rotate(-int(draw() * len(ready)))
            handle = ready.popleft()
            if not handle.is_cancelled:
                self.steps += 1
                self.digest = hash((self.digest, now, process.number))
                try:
                    handle.context.run(handle._callback, *handle._args)
                except Exception as error:
                    self.call_exception_handler({"message": repr(handle), "exception": error})
                self.now = now + step
            if not ready:
                self._dequeue(index)

    def _dequeue(self, index: int) -> None:
        runnable = self._runnable
        runnable[index].is_runnable = False
        last = runnable.pop()
        if index < len(runnable):
            runnable[index] = last

    def _end_all(self) -> None:
        """Cancel what is left, of the dead as well, so that nothing is left for the garbage collector to end."""
        self._is_ending = True
        left = sorted((task for task in asyncio.all_tasks(self)), key=hash)
        for process in {task.process: None for task in left if isinstance(task, _Task)}:
            process.is_dead = process.is_paused = False
            self.enqueue(process)
        for task in left:
            task.cancel()
        before = self.steps
        with suppress(Deadlock):
            while self.steps < before + _LAST_STEPS and asyncio.all_tasks(self):
                until = self.steps + _FEW_STEPS
                self._run_until(lambda: self.steps >= until)  # noqa: B023
        self.steps = before
        for coroutine in self.unstarted:
            coroutine.close()

    # What asyncio asks of a loop.

    def time(self) -> float:
        """Read the elapsed time in seconds."""
        return self.now / bounds.SECOND

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Run a callback as soon as its process gets round to it."""
        if context is None:
            context = contextvars.copy_context()
        process = context.get(_PROCESS, self.world)
        handle = Handle(callback, args, context, self.now)
        process.ready.append(handle)
        # Not by a call of `enqueue`: much of a run's time is spent in passing things on.
        if not (process.is_runnable or process.is_paused or process.is_dead):
            process.is_runnable = True
            self._runnable.append(process)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Run a callback after a delay in seconds."""
        return self._scheduled(self.now + max(0, round(delay * bounds.SECOND)), callback, args, context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Run a callback at a time of this loop in seconds."""
        return self._scheduled(round(when * bounds.SECOND), callback, args, context)

    def create_future(self) -> "asyncio.Future[Any]":
        """Make a future."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coroutine: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> "asyncio.Task[Any]":
        """Run a coroutine, in the process that runs now unless the context says otherwise."""
        return _Task(coroutine, self, name, context, next(self._task_numbers))

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> list[Any]:
        """Look a machine up: each is known by its name."""
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]

    def get_debug(self) -> bool:
        """Be fast."""
        return False

    def is_running(self) -> bool:
        """Tell that it runs."""
        return True

    def is_closed(self) -> bool:
        """Tell whether the run is over."""
        return self._is_closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Note an exception that nobody handled."""
        if self._is_ending:
            return
        error = context.get("exception")
        self.failures.append(f"{self.current}: {context.get('message')}: {error!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: what is cancelled is passed over when its time comes."""

    def _scheduled(
        self, when: Micros, callback: Callable[..., object], args: Any, context: contextvars.Context | None
    ) -> Handle:
        if context is None:
            context = contextvars.copy_context()
        handle = Handle(callback, args, context, when)
        heapq.heappush(self._timers, (when, next(self._order), handle, context.get(_PROCESS, self.world)))
        return handle


class _Task(asyncio.Task[Any]):
    """A task whose hash does not depend on its address: asyncio keeps tasks in sets and walks through them."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        loop: SimulationLoop,
        name: str | None,
        context: contextvars.Context | None,
        number: int,
    ) -> None:
        self._number = number
        self.process = loop.current if context is None else context.get(_PROCESS, loop.world)
        super().__init__(coroutine, loop=loop, name=name or f"task {number}", context=context)

    def __hash__(self) -> int:
        return self._number
