"""What a shard asks the store to write. A shard's writes of one commit are applied all or none, under its fence."""

from dataclasses import dataclass
from typing import Any

from duecourse.server.core.task import Attempt, Progress, Submission, Task


@dataclass(slots=True, eq=False)
class Insert:
    """Store a new task, unless its id is taken; then the commit reports what is there."""

    submission: Submission
    task: Task
    origin: Any
    """Whom to answer; not looked into."""


@dataclass(slots=True, eq=False)
class Update:
    """Replace the progress of a task, if it still has the revision before `progress.revision`."""

    task: Task
    progress: Progress
    archive: Attempt | None = None
    """An ended attempt that the new progress no longer holds: append it to the attempt records."""
    result: tuple[bytes, str] | None = None
    """What the handler returned, with its content type: store it with the task."""
    is_grant: bool = False
    """Bring back the task's `Delivery`."""
    cause: Any = None
    """What the shard does once this is committed; not looked into by the store."""


Write = Insert | Update
