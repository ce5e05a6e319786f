"""`duecourse cluster`: what operators ask a cluster."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duecourse.cli import connection, exits, output
from duecourse.cli.connection import DEFAULT_ADDRESS, DEFAULT_TIMEOUT, Address, Json, Timeout

if TYPE_CHECKING:
    from duecourse.client import Cluster

app = typer.Typer(name="cluster", help="Look at a cluster.", epilog=exits.EPILOG, no_args_is_help=True)


@app.callback()
def cluster() -> None:
    """Look at a cluster."""


@app.command(epilog=exits.EPILOG)
def status(
    show_shards: Annotated[bool, typer.Option("--shards", help="Also every shard by itself.")] = False,
    as_json: Json = False,
    address: Address = DEFAULT_ADDRESS,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> None:
    """Show the nodes and what they lead.

    Exit code 1: a shard has no leader, so that its tasks wait.
    """
    with connection.session(address, "default", timeout) as session:
        cluster = session.run(session.client.cluster())
    unled = sum(not shard.leader for shard in cluster.shards)
    if as_json:
        output.say_json(_as_json(cluster, show_shards))
    else:
        _show(cluster, show_shards)
    if unled:
        raise typer.Exit(exits.fail(f"{unled} of {len(cluster.shards)} shards have no leader; their tasks wait"))


def _show(cluster: "Cluster", show_shards: bool) -> None:
    states = Counter(shard.state for shard in cluster.shards)
    output.say_pairs(
        [
            ("coordination", cluster.coordination),
            ("answered by", cluster.answering_node),
            ("shards", ", ".join(f"{count} {state}" for state, count in sorted(states.items()))),
            ("worker streams", str(cluster.worker_streams)),
        ]
    )
    output.say_table(
        ("node", "address", "version", "leads", "in memory", "leases"),
        [(node.node_id, node.address, node.version, *map(str, _led(cluster, node.node_id))) for node in cluster.nodes],
    )
    if show_shards:
        output.say_table(
            ("shard", "slots", "state", "leader", "epoch", "in memory", "leases"),
            [
                (
                    str(shard.shard),
                    f"{shard.slot_from}-{shard.slot_until - 1}",
                    shard.state,
                    shard.leader,
                    str(shard.epoch),
                    str(shard.tasks_in_memory),
                    str(shard.leases),
                )
                for shard in cluster.shards
            ],
        )


def _led(cluster: "Cluster", node_id: str) -> tuple[int, int, int]:
    """Sum up what a node leads: shards, tasks in memory, leases."""
    led = [shard for shard in cluster.shards if shard.leader == node_id]
    return len(led), sum(shard.tasks_in_memory for shard in led), sum(shard.leases for shard in led)


def _as_json(cluster: "Cluster", show_shards: bool) -> dict[str, Any]:
    nodes = []
    for node in cluster.nodes:
        leads, tasks_in_memory, leases = _led(cluster, node.node_id)
        nodes.append(
            {
                "node_id": node.node_id,
                "address": node.address,
                "version": node.version,
                "shards_led": leads,
                "tasks_in_memory": tasks_in_memory,
                "leases": leases,
            }
        )
    shown: dict[str, Any] = {
        "coordination": cluster.coordination,
        "answering_node": cluster.answering_node,
        "worker_streams": cluster.worker_streams,
        "shard_states": Counter(shard.state for shard in cluster.shards),
        "nodes": nodes,
    }
    if show_shards:
        shown["shards"] = [
            {
                "shard": shard.shard,
                "slot_from": shard.slot_from,
                "slot_until": shard.slot_until,
                "state": shard.state,
                "leader": shard.leader,
                "epoch": shard.epoch,
                "tasks_in_memory": shard.tasks_in_memory,
                "leases": shard.leases,
            }
            for shard in cluster.shards
        ]
    return shown
