"""A cluster as the node that was asked sees it."""

import enum
from dataclasses import dataclass


class ShardState(enum.StrEnum):
    """Where a shard stands."""

    UNLED = "unled"
    LOADING = "loading"
    LED = "led"


@dataclass(frozen=True, slots=True)
class Node:
    """A scheduler process."""

    node_id: str
    address: str
    version: str


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
