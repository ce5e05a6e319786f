"""`duecourse worker`: runs the worker that an application defines."""

import asyncio
import importlib
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from duecourse.cli import connection, exits, log_lines, output
from duecourse.cli.launcher import running

if TYPE_CHECKING:
    from duecourse.worker import Worker


def worker(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:ATTRIBUTE", help="Where the duecourse.worker.Worker is, such as app:worker for app.py."
        ),
    ],
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            envvar="DUECOURSE_ADDRESS",
            metavar="HOST:PORT",
            help="Where the nodes are, separated by commas, in place of the worker's own.",
        ),
    ] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue", "-q", metavar="NAME", help="A queue to take from, in place of the worker's. Repeatable."
        ),
    ] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, help="How many handlers run at once, in place of the worker's own.")
    ] = None,
) -> None:
    """Run a worker until it is told to stop.

    SIGTERM or Ctrl-C hands back at once what has not started, and gives what runs its grace; a second one ends it.
    Modules are looked for in the current folder first.
    """
    found = _load(target)
    if address is not None:
        found.addresses = connection.split(address)
    if queue:
        found.queues = tuple(queue)
    if slots is not None:
        found.slots = slots
    connection.quieten()
    log_lines.show()
    types = ", ".join(found.task_types)
    output.tell(f"worker {found.name}: {types} from {', '.join(found.queues)} at {', '.join(found.addresses)}")
    try:
        with asyncio.Runner(loop_factory=running.loop_factory()) as runner:
            runner.run(found.run())
    except ValueError as error:
        raise typer.Exit(exits.fail(str(error))) from None


def _load(target: str) -> "Worker":
    """Import the worker; what is wrong with the target itself ends the command, what the module raises is shown."""
    module_name, separator, attributes = target.partition(":")
    if not (module_name and separator and attributes):
        raise typer.BadParameter(f"{target!r} is not of the form module:attribute", param_hint="MODULE:ATTRIBUTE")
    sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        hint = f" (is {module_name.removesuffix('.py')}:{attributes} meant?)" if module_name.endswith(".py") else ""
        raise typer.BadParameter(
            f"there is no module {error.name} in {os.getcwd()} or among the installed ones{hint}",
            param_hint="MODULE:ATTRIBUTE",
        ) from None
    for name in attributes.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise typer.BadParameter(f"{module_name} has no {attributes}", param_hint="MODULE:ATTRIBUTE") from None
    from duecourse.worker import Worker

    if not isinstance(found, Worker):
        raise typer.BadParameter(
            f"{target} is a {type(found).__name__}, not a duecourse.worker.Worker", param_hint="MODULE:ATTRIBUTE"
        )
    return found
