"""`duecourse node`: what operators do with one node of a cluster."""

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Final

import typer

from duecourse.cli import connection, exits, output, values
from duecourse.cli.connection import DEFAULT_ADDRESS, Address
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import SystemClock

if TYPE_CHECKING:
    from duecourse.client import Client

app = typer.Typer(name="node", help="Take a node out of a cluster.", no_args_is_help=True, epilog=exits.EPILOG)

_EPILOG: Final = (
    "Exit codes: 0 the node has gone; 1 refused: there is no such node; 2 the command line is wrong; 3 unavailable:"
    " nothing was done, try again; 4 it may or may not have begun, or is not gone yet: asking again is harmless; 5 the"
    " server broke; 130 interrupted: the node goes on draining."
)
_LOOK_EVERY: Final = 500 * bounds.MILLISECOND
_LOOK_LIMIT: Final = timedelta(seconds=2)


@app.callback()
def node() -> None:
    """Take a node out of a cluster."""


@app.command(epilog=_EPILOG)
def drain(
    node_id: Annotated[
        str, typer.Argument(metavar="NODE_ID", help="Its name, as `duecourse cluster status` shows it.")
    ],
    address: Address = DEFAULT_ADDRESS,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="DURATION", help="How long to wait until the node has gone.")
    ] = "60s",
) -> None:
    """Have a node hand its shards over and end, and wait until it has gone.

    It grants nothing more for a shard that it hands over, tells its workers,
    lets running calls end, and ends with exit code 0. Attempts go on: their
    workers report to the new leaders. Any node of the cluster can be asked.
    """
    limit = values.duration("--timeout", timeout)
    with connection.session(address, "default", timeout) as session:
        is_gone = session.run(_drain(session.client, node_id, limit))
    if not is_gone:
        line = f"{node_id} is not gone after {timeout}; it goes on draining: see `duecourse cluster status`"
        raise typer.Exit(exits.fail(line, exits.ExitCode.UNCERTAIN))


async def _drain(client: "Client", node_id: str, limit: Micros) -> bool:
    """Drain it, and tell how it comes along; False if it is not gone after the limit."""
    from duecourse.client import OutcomeUncertain, Unavailable

    clock = SystemClock()
    until = clock.elapsed() + limit
    # Looked at before, since a node that drains may be gone before the next look.
    before_it = await client.cluster()
    answering = before_it.answering_node
    is_last = [node.node_id for node in before_it.nodes] == [node_id]
    await client.drain_node(node_id)
    output.tell(f"{node_id} drains")
    led = -1
    while clock.elapsed() < until:
        try:
            cluster = await client.cluster(timeout=_LOOK_LIMIT)
        except (Unavailable, OutcomeUncertain):
            if is_last:
                output.say(f"{node_id} has gone; it was the last node")
                return True
            if answering == node_id:
                # Nobody but itself was asked, so there is nobody left to tell.
                output.say(f"{node_id} no longer answers; an --address of another node would tell of the rest")
                return True
        else:
            if all(node.node_id != node_id for node in cluster.nodes):
                output.say(f"{node_id} has gone")
                return True
            answering = cluster.answering_node
            before, led = led, sum(shard.leader == node_id for shard in cluster.shards)
            if led != before:
                output.tell(f"{node_id} leads {led} of {len(cluster.shards)} shards")
        await clock.sleep(min(_LOOK_EVERY, max(0, until - clock.elapsed())))
    return False
