"""Lists tasks as they come, page after page, so that a list may be longer than memory."""

import sys
from collections.abc import AsyncIterator, Sequence
from typing import Final

import typer

from duecourse.cli import output, task_view, values
from duecourse.cli.connection import Session
from duecourse.client import Task, TaskFilter, TaskState
from duecourse.model import bounds

_TABLE_ROWS: Final = 1_000


def wanted(queue: str | None, states: Sequence[str], run_at_from: str | None, run_at_before: str | None) -> TaskFilter:
    """Read the filters of the command line."""
    for state in states:
        if state.lower() not in tuple(TaskState):
            raise typer.BadParameter(f"{state!r} is not one of {', '.join(TaskState)}", param_hint="--state")
    try:
        return TaskFilter(
            queue=queue,
            states=frozenset(TaskState(state.lower()) for state in states),
            run_at_from=values.instant(run_at_from) if run_at_from else None,
            run_at_before=values.instant(run_at_before) if run_at_before else None,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--from, --before") from None


def show(session: Session, wanted: TaskFilter, limit: int | None, as_json: bool) -> None:
    """Show the tasks that are wanted, at most `limit`; tell if there are more."""
    room = sys.maxsize if limit is None else limit
    tasks = session.client.list(wanted, page_size=min(room + 1, bounds.MAX_PAGE))
    while True:
        size = min(room + 1, _TABLE_ROWS)
        batch = session.run(_take(tasks, size))
        _show(batch[:room], as_json)
        if len(batch) > room:
            output.tell(f"there are more than {limit}; see them with --limit or --all")
        if len(batch) > room or len(batch) < size:
            return
        room -= len(batch)


async def _take(tasks: AsyncIterator[Task], size: int) -> list[Task]:
    batch: list[Task] = []
    async for task in tasks:
        batch.append(task)
        if len(batch) == size:
            break
    return batch


def _show(tasks: Sequence[Task], as_json: bool) -> None:
    if as_json:
        for task in tasks:
            output.say_json(task_view.as_json(task))
    elif tasks:
        row = task_view.short_row if output.is_terminal() else task_view.row
        output.say_table(task_view.COLUMNS, map(row, tasks))
