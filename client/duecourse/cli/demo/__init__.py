"""`duecourse demo`: the main job, seen working: reminders on time on real Postgres, through a SIGKILL of the scheduler.

The judge is a file that the worker writes, one line for each start of a handler, and not our own API: see `evidence`.
"""

from typing import Annotated

import typer

from duecourse.cli import connection


def demo(
    tasks: Annotated[int, typer.Option(min=1, max=100_000, help="How many reminders are submitted.")] = 2_000,
    seconds: Annotated[int, typer.Option(min=2, max=600, help="Over how long they are due.")] = 20,
    nodes: Annotated[
        int,
        typer.Option(
            min=1, max=9, help="Nodes of the cluster: with more than one, one is killed and the others go on."
        ),
    ] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder.")] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the verdict as one JSON object; progress goes to stderr.")
    ] = False,
) -> None:
    """See it work, in about a minute: reminders, a worker, and the scheduler killed by SIGKILL in the middle.

    Starts Postgres, a node and a worker as child processes in a temporary
    folder, and leaves nothing behind. With --nodes 3 also an etcd, by which the
    nodes that are left take over what the killed one led.

    Exit codes: 0 all promises kept, 1 one was broken, or something did not
    start.
    """
    # The calls that a killed scheduler leaves behind are expected.
    connection.quieten()
    from duecourse.cli.demo import story
    from duecourse.cli.launcher import running

    raise typer.Exit(running.run(story.tell(tasks, seconds, nodes, keep=keep, as_json=json_output)))
