"""`Lines`: which tasks of a shard are busy, and the events that wait until they are not.

A task is *busy* from when a write of it, or a read of what memory lacks of it, is asked for until the store has
answered; events for it wait in its line. So no event is handled against a state that is about to change, and events for
a task are handled in the order in which they came.
"""

from typing import Any

from duecourse.server.core.effects import Effects
from duecourse.server.core.events import Event, Found
from duecourse.server.core.task import Progress, ShardId, Task, TaskKey
from duecourse.server.core.writes import Update


class Lines:
    """See the module's docstring."""

    __slots__ = ("_shard", "busy", "fresh")

    def __init__(self, shard: ShardId) -> None:
        self.busy: dict[TaskKey, list[Event] | None] = {}
        """The busy tasks, each with its line; None in place of an empty one, as most stay empty."""
        self.fresh: dict[TaskKey, Found] = {}
        """What was just read, while the line that waited for it is handled."""
        self._shard = shard

    def update(self, task: Task, progress: Progress, cause: Any, out: Effects) -> None:
        """Ask for a write of a task."""
        self.busy[task.key] = None
        out.writes.append(Update(task, progress, None, None, False, cause))

    def read(self, key: TaskKey, line: list[Event] | None, out: Effects) -> None:
        """Ask for a read of a task; a line waits for it from the beginning."""
        self.busy[key] = line
        out.task_reads.append((self._shard, key))

    def add(self, key: TaskKey, event: Event) -> None:
        """Put an event into the line of a busy task."""
        line = self.busy[key]
        if line is None:
            self.busy[key] = [event]
        else:
            line.append(event)
