"""`duecourse cluster`: what operators ask a cluster."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Final, Never

import typer

from duecourse.cli import clock_acceptance, cluster_view, connection, exits, output
from duecourse.cli.connection import DEFAULT_ADDRESS, DEFAULT_TIMEOUT, Address, Json, Timeout
from duecourse.model import bounds
from duecourse.timing.clock import SystemClock

if TYPE_CHECKING:
    from rich.console import RenderableType

    from duecourse.client import Client, Cluster

app = typer.Typer(name="cluster", help="Look at a cluster.", epilog=exits.EPILOG, no_args_is_help=True)

_LOOK_EVERY: Final = bounds.SECOND
_LOOK_LIMIT: Final = timedelta(seconds=2)
"""A look that takes longer shows that nobody answers, rather than what was."""


@app.callback()
def cluster() -> None:
    """Look at a cluster."""


@app.command(epilog=exits.EPILOG)
def status(
    show_shards: Annotated[bool, typer.Option("--shards", help="Also every shard by itself.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Look again every second, through whatever fails, until Ctrl-C.")
    ] = False,
    as_json: Json = False,
    address: Address = DEFAULT_ADDRESS,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> None:
    """Show the nodes, what they lead, what waits for workers, and their clocks.

    A node that does not answer the one that is asked, or leads nothing for a
    reason of its own, says so under standing. Clock: how far the node's wall
    clock is from the cluster's, by which tasks fire.

    Exit code 1: a shard has no leader, so that its tasks wait. With --watch: 0,
    at Ctrl-C.
    """
    with connection.session(address, "default", timeout) as session:
        if watch:
            with _screen(show_shards=show_shards, as_json=as_json) as show:
                try:
                    session.run(_watch(session.client, show))
                except KeyboardInterrupt:
                    return
        found = session.ask(session.client.cluster())
    if as_json:
        output.say_json(cluster_view.as_object(found, has_shards=show_shards))
    else:
        _say(found, show_shards=show_shards)
    if (unled := cluster_view.unled(found)) is not None:
        raise typer.Exit(exits.fail(unled))


app.command(name="accept-clock", epilog=exits.EPILOG)(clock_acceptance.accept_clock)


_Show = Callable[["Cluster | str"], None]
"""Shows a cluster, or why there is none to be seen."""


async def _watch(client: "Client", show: _Show) -> Never:
    from duecourse.client import DuecourseError

    clock = SystemClock()
    while True:
        began = clock.elapsed()
        try:
            show(await client.cluster(timeout=_LOOK_LIMIT))
        except DuecourseError as failure:
            show(failure.message)
        await clock.sleep(max(0, _LOOK_EVERY - (clock.elapsed() - began)))


@contextmanager
def _screen(*, show_shards: bool, as_json: bool) -> Iterator[_Show]:
    """Open what looks are shown on: redrawn for a person, one block after the other for a pipe."""
    if as_json or not output.is_terminal():

        def say(found: "Cluster | str") -> None:
            if isinstance(found, str):
                output.say_json({"error": found}) if as_json else output.say(f"no answer: {found}")
            elif as_json:
                output.say_json(cluster_view.as_object(found, has_shards=show_shards))
            else:
                _say(found, show_shards=show_shards)
                output.say(cluster_view.unled(found) or "all shards have a leader")
            if not as_json:
                output.say("")
            output.flush()

        yield say
        return
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        yield lambda found: live.update(_drawn(found, show_shards=show_shards), refresh=True)


def _say(found: "Cluster", *, show_shards: bool) -> None:
    output.say_pairs(cluster_view.pairs(found))
    output.say_table(cluster_view.NODE_COLUMNS, cluster_view.node_rows(found, is_short=output.is_terminal()))
    if show_shards:
        output.say_table(cluster_view.SHARD_COLUMNS, cluster_view.shard_rows(found))


def _drawn(found: "Cluster | str", *, show_shards: bool) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    if isinstance(found, str):
        return Text(f"no answer: {output.printable(found)}", style="red")
    parts: list[RenderableType] = [output.grid_of(cluster_view.pairs(found)), ""]
    parts.append(output.table_of(cluster_view.NODE_COLUMNS, cluster_view.node_rows(found, is_short=True)))
    if show_shards:
        parts += ["", output.table_of(cluster_view.SHARD_COLUMNS, cluster_view.shard_rows(found))]
    if (unled := cluster_view.unled(found)) is not None:
        parts += ["", Text(unled, style="red")]
    return Group(*parts)
