"""`duecourse task`: submits, reads, lists and cancels tasks."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Final

import typer

from duecourse.cli import connection, exits, output, task_submission, values
from duecourse.cli.connection import DEFAULT_ADDRESS, DEFAULT_TIMEOUT, Address, Json, Namespace, Timeout
from duecourse.model import bounds
from duecourse.timing.clock import SystemClock

if TYPE_CHECKING:
    from duecourse.client import Client, Task

app = typer.Typer(name="task", help="Submit, read, list and cancel tasks.", epilog=exits.EPILOG, no_args_is_help=True)

app.command(epilog=exits.EPILOG)(task_submission.submit)

_LOOK_LIMIT: Final = timedelta(seconds=2)

TaskIdArgument = Annotated[str, typer.Argument(metavar="ID", callback=values.name, help="The task's id.")]


@app.command(epilog=exits.EPILOG)
def get(
    task_id: TaskIdArgument,
    full: Annotated[bool, typer.Option("--full", help="Also its payload, its result and its attempts.")] = False,
    as_json: Json = False,
    address: Address = DEFAULT_ADDRESS,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> None:
    """Show a task."""
    with connection.session(address, namespace, timeout) as session:
        task = session.ask(session.client.get(task_id, full=full))
        why = None if as_json else session.run(_why_it_waits(session.client, task))
    from duecourse.cli import task_view

    if as_json:
        output.say_json(task_view.as_json(task))
        return
    output.say_pairs(task_view.pairs(task))
    if task.attempts:
        row = task_view.short_attempt_row if output.is_terminal() else task_view.attempt_row
        output.say_table(task_view.ATTEMPT_COLUMNS, map(row, task.attempts))
    if why is not None:
        output.tell(why)
    if task_view.has_failures_unseen(task):
        output.tell("what its attempts failed with: `--full` shows them")


async def _why_it_waits(client: "Client", task: "Task") -> str | None:
    """Tell what a task that is due waits for; None if it does not wait, or nobody can tell."""
    from duecourse.cli import cluster_view, task_view
    from duecourse.client import DuecourseError

    if not (overdue := task_view.overdue(task, datetime.fromtimestamp(SystemClock().wall() / bounds.SECOND, UTC))):
        return None
    try:
        cluster = await client.cluster(timeout=_LOOK_LIMIT)
    except DuecourseError:
        return None
    return cluster_view.unled(cluster) or task_view.wanted_worker(
        task, overdue, has_any=cluster_view.worker_streams(cluster) > 0
    )


@app.command("list", epilog=exits.EPILOG)
def list_tasks(
    queue: Annotated[str | None, typer.Option("--queue", "-q", metavar="NAME", help="Only this queue.")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            "-s",
            metavar="STATE",
            help="Only this state: pending, leased, running, retry_wait, succeeded, failed, cancelled. Repeatable.",
        ),
    ] = None,
    run_at_from: Annotated[
        str | None, typer.Option("--from", metavar="INSTANT", help="Only tasks wanted at or after this instant.")
    ] = None,
    run_at_before: Annotated[
        str | None, typer.Option("--before", metavar="INSTANT", help="Only tasks wanted before this instant.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 100,
    show_all: Annotated[bool, typer.Option("--all", help="All, however many they are.")] = False,
    as_json: Json = False,
    address: Address = DEFAULT_ADDRESS,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> None:
    """List tasks, in the order of their ids."""
    from duecourse.cli import task_lists

    wanted = task_lists.wanted(queue, state or [], run_at_from, run_at_before)
    with connection.session(address, namespace, timeout) as session:
        task_lists.show(session, wanted, None if show_all else limit, as_json)


@app.command(epilog=exits.EPILOG)
def cancel(
    task_id: TaskIdArgument,
    wait: Annotated[
        str,
        typer.Option("--wait", metavar="DURATION", help="How long to wait for the word of the worker that has it."),
    ] = "1s",
    revision: Annotated[
        int | None, typer.Option("--revision", help="Only if this is still the task's revision.")
    ] = None,
    as_json: Json = False,
    address: Address = DEFAULT_ADDRESS,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> None:
    """Cancel a task, and tell whether it may have run.

    - prevented: no handler ran or will run.
    - requested: a handler may be running and was asked to stop.
    - already_finished: it had ended before.
    """
    bound = timedelta(microseconds=values.duration("--wait", wait))
    with connection.session(address, namespace, timeout) as session:
        done = session.ask(session.client.cancel(task_id, wait=bound, expected_revision=revision), takes=bound)
    if as_json:
        output.say_json(
            {"result": done.result, "state": done.state, "earlier_attempt_may_run": done.earlier_attempt_may_run}
        )
        return
    output.say_pairs([("result", done.result), ("state", done.state)])
    if done.earlier_attempt_may_run:
        output.tell("an earlier attempt was lost, and its handler may still be running")
