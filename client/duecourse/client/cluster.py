"""A cluster as the node that was asked sees it."""

import enum
from dataclasses import dataclass
from datetime import timedelta


class ShardState(enum.StrEnum):
    """Where a shard stands."""

    UNLED = "unled"
    LOADING = "loading"
    LED = "led"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A scheduler process."""

    node_id: str
    address: str
    version: str
    ineligible_reason: str = ""
    """Why it leads no shards or is to lose them; empty if it is eligible."""
    answered: bool = False
    """It told what follows by itself, in time; otherwise nothing of it is known."""
    wall_clock_offset: timedelta = timedelta()
    """Its own wall clock minus the cluster clock."""
    clock_uncertainty: timedelta = timedelta()
    """How far off the cluster clock may be, as it knows it."""
    ready_tasks: int = 0
    """How many tasks in its memory are due and wait for a worker."""
    oldest_ready_age: timedelta = timedelta()
    """How long the oldest of them has been due."""
    worker_streams: int = 0
    """How many worker streams are open to it."""
    incarnation: str = ""
    """Names the start of its process: another one after each restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A range of slots, led by one node at a time."""

    shard: int
    slot_from: int
    slot_until: int
    state: ShardState
    leader: str
    """The `node_id` of its leader; empty if none is known."""
    epoch: int
    tasks_in_memory: int
    leases: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What one node says of the whole."""

    coordination: str
    answering_node: str
    nodes: tuple[Node, ...]
    shards: tuple[Shard, ...]
    worker_streams: int
    """How many worker streams are open to the answering node."""
