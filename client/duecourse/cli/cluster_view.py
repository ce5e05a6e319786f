"""What is shown of a cluster: for people in tables, for programs as JSON."""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from duecourse.cli import values

if TYPE_CHECKING:
    from duecourse.client import Cluster, Node

NODE_COLUMNS = (
    *("node", "address", "version", "leads", "in memory", "leases"),
    *("standing", "ready", "oldest", "streams", "clock"),
)
SHARD_COLUMNS = ("shard", "slots", "state", "leader", "epoch", "in memory", "leases")
_SOLO: Final = "solo"


def unled(cluster: "Cluster") -> str | None:
    """Say that shards have no leader; None if all have one."""
    count = sum(not shard.leader for shard in cluster.shards)
    return f"{count} of {len(cluster.shards)} shards have no leader; their tasks wait" if count else None


def pairs(cluster: "Cluster") -> list[tuple[str, str]]:
    """Return what there is to say of the whole."""
    states = Counter(shard.state for shard in cluster.shards)
    told = [node for node in cluster.nodes if node.answered]
    count = sum(node.ready_tasks for node in told)
    waiting = f"{count:,} {'task' if count == 1 else 'tasks'}, the oldest for"
    oldest = max((node.oldest_ready_age for node in told), default=timedelta())
    return [
        ("coordination", _coordination(cluster)),
        ("version", _common_version(cluster)),
        ("answered by", cluster.answering_node),
        ("shards", ", ".join(f"{count} {state}" for state, count in sorted(states.items()))),
        ("worker streams", str(worker_streams(cluster))),
        ("due and waiting", f"{waiting} {values.write_age(oldest)}" if oldest else "no tasks" if told else ""),
    ]


def node_rows(cluster: "Cluster", *, is_short: bool = False) -> list[Sequence[str]]:
    """Return the nodes' rows, under `NODE_COLUMNS`; what a node did not tell is left empty.

    Short ones are for a terminal: a version that is common to all is left to `pairs`.
    """
    rows: list[Sequence[str]] = []
    common = is_short and _common_version(cluster)
    for node in cluster.nodes:
        version = "" if common else node.version
        row = [node.node_id, node.address, version, *map(str, led(cluster, node.node_id)), standing(node)]
        if node.answered:
            row += [
                str(node.ready_tasks),
                values.write_age(node.oldest_ready_age),
                str(node.worker_streams),
                _clock(node),
            ]
        else:
            row += [""] * 4
        rows.append(row)
    return rows


def shard_rows(cluster: "Cluster") -> list[Sequence[str]]:
    """Return the shards' rows, under `SHARD_COLUMNS`."""
    return [
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
    ]


def as_object(cluster: "Cluster", *, has_shards: bool) -> dict[str, Any]:
    """Return all of it as what JSON can hold. Of a node that did not answer, what it would have told is null."""
    shown: dict[str, Any] = {
        "coordination": cluster.coordination,
        "answering_node": cluster.answering_node,
        "worker_streams": worker_streams(cluster),
        "shard_states": Counter(shard.state for shard in cluster.shards),
        "nodes": [_node_object(cluster, node) for node in cluster.nodes],
    }
    if has_shards:
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


def led(cluster: "Cluster", node_id: str) -> tuple[int, int, int]:
    """Sum up what a node leads: shards, tasks in memory, leases."""
    shards = [shard for shard in cluster.shards if shard.leader == node_id]
    return len(shards), sum(shard.tasks_in_memory for shard in shards), sum(shard.leases for shard in shards)


def standing(node: "Node") -> str:
    """Say whether a node leads or may lead, and whether it answers."""
    if node.ineligible_reason:
        return node.ineligible_reason if node.answered else f"{node.ineligible_reason}; no answer"
    return "eligible" if node.answered else "no answer"


def worker_streams(cluster: "Cluster") -> int:
    """Count the streams of workers: of all nodes that told, at least of the one that answers."""
    told = sum(node.worker_streams for node in cluster.nodes if node.answered)
    return max(told, cluster.worker_streams)


def _node_object(cluster: "Cluster", node: "Node") -> dict[str, Any]:
    shards, tasks_in_memory, leases = led(cluster, node.node_id)
    told = {
        "ready_tasks": node.ready_tasks,
        "oldest_ready_age_s": node.oldest_ready_age.total_seconds(),
        "worker_streams": node.worker_streams,
        "incarnation": node.incarnation,
        "wall_clock_offset_s": node.wall_clock_offset.total_seconds(),
        "clock_uncertainty_s": node.clock_uncertainty.total_seconds(),
    }
    return {
        "node_id": node.node_id,
        "address": node.address,
        "version": node.version,
        "shards_led": shards,
        "tasks_in_memory": tasks_in_memory,
        "leases": leases,
        "is_eligible": not node.ineligible_reason,
        "ineligible_reason": node.ineligible_reason,
        "answered": node.answered,
        **(told if node.answered else dict.fromkeys(told)),
    }


def _coordination(cluster: "Cluster") -> str:
    """Say by what nodes agree: of several it is named by the id that etcd and the store share."""
    return cluster.coordination if cluster.coordination in ("", _SOLO) else f"etcd, cluster {cluster.coordination}"


def _common_version(cluster: "Cluster") -> str:
    versions = {node.version for node in cluster.nodes}
    return versions.pop() if len(versions) == 1 else ""


def _clock(node: "Node") -> str:
    """Say how far a node's own clock is from the cluster's, and how well it knows that."""
    offset, uncertainty = (
        part / timedelta(milliseconds=1) for part in (node.wall_clock_offset, node.clock_uncertainty)
    )
    return f"{offset:+.1f} ms ±{uncertainty:.1f}"
