"""Worker streams of this node: the protocol state of each, and what the node's loop has for them. No gRPC here.

`Hub` keeps the streams; `WorkerStream` is the server's side of one stream as a machine without I/O: messages of the
worker go in, the loop's effects go in, messages for the worker come out. `rpc.worker_service` moves them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from duecourse.model.instants import Micros
from duecourse.server.core.events import Event
from duecourse.server.core.lease import Holder
from duecourse.server.core.task import Epoch, Lane, ShardId


class Port(Protocol):
    """What streams ask of the node's loop. All calls are made in the loop's thread and return at once."""

    def shard_of(self, namespace: str, task_id: str) -> ShardId:
        """Return the shard that holds a task."""
        ...

    def leads(self, shard: ShardId) -> bool:
        """Tell whether this node leads the shard and has loaded it."""
        ...

    def leader_of(self, shard: ShardId) -> str:
        """Return the address of the node that leads the shard, empty if none is known."""
        ...

    def terms(self) -> Sequence[tuple[ShardId, Epoch]]:
        """Return the terms that this node leads and has loaded."""
        ...

    def post(self, shard: ShardId, event: Event) -> None:
        """Hand an event to a shard; it is dropped if the node does not lead the shard."""
        ...

    def subscribe(self, holder: Holder, queues: frozenset[str], task_types: frozenset[str]) -> None:
        """Make a worker's stream known to the matcher, without credit."""
        ...

    def credit(self, holder: Holder, delta: int, task_type_deltas: Mapping[str, int]) -> int:
        """Change a stream's credit; returns how much of a withdrawal was still unused."""
        ...

    def give_back(self, holder: Holder, lanes: Iterable[Lane]) -> None:
        """Give a stream back the credit of one assignment of each lane, which it had no room for."""
        ...

    def unsubscribe(self, holder: Holder) -> None:
        """Forget a stream and its credit."""
        ...

    def elapsed(self) -> Micros:
        """Read the elapsed time."""
        ...

    def utc(self) -> Micros:
        """Read the cluster clock's latest, for times that are reported."""
        ...
