"""The edge: what clients and workers reach over gRPC, and the little it asks of the node.

Services parse and check what arrives (`convert`), hand it to `Commands` or to the store, and present what comes back
(`present`). Every refusal becomes a status in one place (`status`), and every call is guarded (`calls`): it has a
deadline, it is counted, and whatever happens inside, its caller gets a status that says what to do next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from duecourse.model.instants import Micros
from duecourse.server.core.effects import Cancelled, Submitted
from duecourse.server.core.errors import DomainError
from duecourse.server.core.task import Epoch, ShardId, Submission


class Commands(Protocol):
    """What clients can have done. `shards.commands` implements it."""

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[Submitted | DomainError]:
        """Make tasks durable: one answer each, in order. Raises Overloaded, Draining or StoreFailed for all of them."""
        ...

    async def cancel(
        self,
        namespace: str,
        task_id: str,
        request_id: str,
        fingerprint: bytes,
        expected_revision: int | None,
        wait: Micros,
    ) -> Cancelled:
        """Cancel a task, waiting for the worker's word so long. Raises DomainError."""
        ...


class ShardStanding(StrEnum):
    """Where a shard stands on this node."""

    UNLED = "unled"
    LOADING = "loading"
    LED = "led"


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """A live node."""

    node_id: str
    address: str
    version: str
    ineligible_reason: str = ""
    """Why it is to lead nothing; empty: it is eligible."""
    has_answered: bool = True
    """Whether it has told what follows."""
    wall_clock_offset: Micros = 0
    """Its own wall clock minus the cluster clock."""
    clock_uncertainty: Micros = 0
    """Half the width of the interval in which the cluster clock lies, as it knows it."""
    ready_tasks: int = 0
    oldest_ready_age: Micros = 0
    worker_streams: int = 0
    incarnation: str = ""
    """Names the start of its process."""


@dataclass(frozen=True, slots=True)
class ShardDescription:
    """A shard, as this node sees it."""

    shard: ShardId
    slot_from: int
    slot_until: int
    state: ShardStanding
    leader: str
    """The `node_id` of its leader, empty if none is known."""
    epoch: Epoch
    tasks_in_memory: int
    leases: int


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """The cluster, as this node sees it."""

    coordination: str
    node_id: str
    nodes: Sequence[NodeDescription]
    shards: Sequence[ShardDescription]
    worker_streams: int


class Describe(Protocol):
    """Tells how the cluster looks now."""

    def __call__(self) -> ClusterDescription:
        """Describe it."""
        ...
