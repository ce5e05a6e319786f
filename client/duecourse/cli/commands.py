"""Which commands `duecourse` has.

A command imports what it needs when it runs, so that help and completion answer at once.
"""

import inspect
import re
from typing import Annotated

import typer

from duecourse.cli import bench, clusters, demo, dev, exits, nodes, output, servers, stores, tasks, workers


def flowing(text: str) -> str:
    """Join the lines of each paragraph, which are as short as our source, but for those that begin an item of a list.

    What shows the text breaks it where the terminal ends.
    """
    return re.sub(r"(?<!\n)\n(?![\n-])", " ", text)


app = typer.Typer(
    name="duecourse",
    help="Duecourse, a durable delayed task scheduler: on time to the millisecond, never lost, and provably so.",
    epilog=exits.EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(tasks.app)
app.add_typer(clusters.app)
app.add_typer(nodes.app)
app.add_typer(stores.app)
app.add_typer(bench.app)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)(servers.server)
app.command(epilog=exits.EPILOG)(workers.worker)
app.command(epilog=exits.EPILOG)(dev.dev)
app.command()(demo.demo)
for _several in (app, tasks.app, clusters.app, nodes.app, stores.app, bench.app):
    for _one in _several.registered_commands:
        _one.help = flowing(_one.help or inspect.getdoc(_one.callback) or "")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        output.say(metadata.version("duecourse"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
