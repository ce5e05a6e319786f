"""Which handler runs which task type."""

import inspect
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from duecourse.model import bounds
from duecourse.model.names import ALPHABET, is_name
from duecourse.worker.context import TaskContext

AsyncHandler = Callable[[TaskContext], Awaitable[Any]]
PlainHandler = Callable[[TaskContext], Any]


@dataclass(frozen=True, slots=True)
class Handler:
    """What runs a task type: a coroutine function on the event loop, or a plain function in a thread."""

    call: Callable[[TaskContext], Any]
    is_async: bool


class Registry:
    """The handlers of a worker, by task type."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def __len__(self) -> int:
        return len(self._handlers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._handlers)

    def __getitem__(self, task_type: str) -> Handler:
        return self._handlers[task_type]

    def add(self, task_type: str, call: AsyncHandler | PlainHandler) -> None:
        """Let `call` run a task type; refuse a second one for it."""
        if not is_name(task_type):
            raise ValueError(f"task type {task_type!r} is not 1 to {bounds.MAX_NAME_BYTES} characters of {ALPHABET}")
        if task_type in self._handlers:
            raise ValueError(f"task type {task_type!r} has a handler already")
        if len(self._handlers) == bounds.MAX_SUBSCRIBED_TYPES:
            raise ValueError(f"a worker takes at most {bounds.MAX_SUBSCRIBED_TYPES} task types")
        is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
        self._handlers[task_type] = Handler(call, is_async)

    def threaded(self) -> frozenset[str]:
        """Return the task types whose handlers run in threads."""
        return frozenset(task_type for task_type, handler in self._handlers.items() if not handler.is_async)
