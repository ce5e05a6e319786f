"""`TaskStore`: where shards keep their tasks. The contract; `memory` and `postgres` implement it.

Every write carries its fence and is refused by the store, in the same transaction, once the shard's row holds another
epoch or holder. A commit answers, for each shard in it on its own, with one of four:

- `Committed`: applied whole. It reports ids that were taken, revisions that did not match (their updates alone were
  left out), and the deliveries of grants.
- `Stale`: the term is over; nothing was applied. Other shards of the same commit are not affected.
- `Refused`: surely not applied, for a reason of the store (try again later) or of the data (`is_data`: the caller
  splits the batch until the culprit is found).
- `Unknown`: the answer was lost. It may or may not have been applied; the caller ends the term.

No method raises for what a store can run into: `commit` answers, reads and the rest raise `StoreUnavailable` or, where
documented, `StoreRefused`. Reads see everything that was committed before they began.

The due index: rows that have a due time are found by (shard, bucket, lane, due time, sequence), where the bucket is
`due_time // BUCKET`. So one bucket of a shard is one range, and so is one lane in it; however many tasks one lane has,
they do not stand before another lane's.

What the writes must be like, as the core makes them: an `Insert` carries the progress of a new task; an `Update` whose
`is_grant` is set changes the state, the counts and the attempt, and nothing else; other updates keep the identity of
the attempt. Texts contain no zero character, and names no control character: the edge sees to that, and the store
refuses as data what slips through.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.fence import Fence
from duecourse.server.core.task import (
    Attempt,
    Delivery,
    DueKey,
    Epoch,
    Lane,
    ShardId,
    Task,
    TaskKey,
    TaskState,
)
from duecourse.server.core.writes import Insert, Update

SEQUENCE_BITS: Final = 32
CLOCK_CONFIRMED_EVERY: Final[Micros] = bounds.SECOND
"""How old a confirmation of the store's clock is at least when the next is written."""


class StoreUnavailable(Exception):
    """The store did not answer, or cannot serve now; it was surely not a write that is left in doubt."""


class StoreRefused(Exception):
    """The store is not one that this node may use: wrong schema version, no shards; the message says what to do."""


@dataclass(slots=True)
class ShardBatch:
    """The writes of one shard in one commit. No task occurs twice."""

    fence: Fence
    inserts: list[Insert] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Existing:
    """What stands under an id that an insert found taken."""

    uid: bytes
    fingerprint: bytes


@dataclass(slots=True)
class Committed:
    """The shard's writes were applied."""

    taken: dict[int, Existing]
    """By index into `inserts`: the id was taken, nothing was inserted."""
    mismatched: set[int]
    """Indexes into `updates`: the revision did not match (or the row is gone), nothing was updated."""
    deliveries: dict[int, Delivery | Literal[False]]
    """By index into `updates`: the deliveries of the grants that were applied; False: it does not decode."""


@dataclass(frozen=True, slots=True)
class Stale:
    """The shard's row holds another term."""

    epoch: Epoch
    holder: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """Surely not applied."""

    detail: str
    is_data: bool
    """The data is at fault, so that a retry of the same batch will fail again."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The answer was lost."""

    detail: str


CommitAnswer = Committed | Stale | Refused | Unknown


@dataclass(frozen=True, slots=True)
class RaiseRequest:
    """Asks for a new term of a shard.

    `epoch` None takes the row's epoch + 1 (coordination `solo`); a given one must exceed the row's. `only_over` lists
    the holders that the row may have now, None: any.
    """

    shard: ShardId
    holder: bytes
    epoch: Epoch | None = None
    only_over: tuple[bytes, ...] | None = None


@dataclass(frozen=True, slots=True)
class Raised:
    """A term has begun."""

    fence: Fence
    first_sequence: int
    """The term issues sequences from here on, all above those of earlier terms; it has 2^`SEQUENCE_BITS` of them."""
    raises: tuple[Micros, ...]
    """When the last raises were made (this one last), at most 16, oldest first, in cluster time."""


@dataclass(frozen=True, slots=True)
class RaiseRefused:
    """The row is higher, of another coordination, or held by a holder that `only_over` does not list."""

    coordination: str
    epoch: Epoch
    holder: bytes


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A shard as the store keeps it."""

    shard: ShardId
    slot_from: int
    slot_until: int
    coordination: str
    epoch: Epoch
    holder: bytes


@dataclass(frozen=True, slots=True)
class LaneRequest:
    """Asks for the next waiting tasks of one lane in one shard: after a key, due before an instant."""

    shard: ShardId
    lane: Lane
    after: DueKey
    due_before: Micros
    limit: int


@dataclass(frozen=True, slots=True)
class CorruptRecord:
    """A row that does not decode."""

    shard: ShardId
    key: TaskKey
    revision: int
    detail: str


@dataclass(slots=True)
class Loaded:
    """Tasks as they stood in one snapshot."""

    tasks: list[Task]
    corrupt: list[CorruptRecord]


@dataclass(slots=True)
class LoadedBuckets:
    """Waiting tasks of a range of buckets, the first ones of each lane of each shard.

    `cut` names what was left out: per shard and lane, the largest key up to which the tasks are complete. A lane's
    later rows may be in `tasks` too, beyond its cut; they are to be left alone.
    """

    tasks: list[Task]
    corrupt: list[CorruptRecord]
    cut: dict[tuple[ShardId, Lane], DueKey]


@dataclass(slots=True)
class StoredTask:
    """Everything about a task, for a client's read."""

    task: Task
    payload: bytes
    content_type: str
    headers: dict[str, str]
    labels: dict[str, str]
    result: tuple[bytes, str] | None
    attempts: list[Attempt]
    """All of them, the latest included, oldest first. Empty unless asked for."""


@dataclass(frozen=True, slots=True)
class TaskQuery:
    """What to list; None and empty mean all."""

    namespace: str
    queue: str | None
    states: frozenset[TaskState]
    run_at_from: Micros | None
    run_at_before: Micros | None


@dataclass(slots=True)
class TaskPage:
    """Some tasks in the order of their ids, without payloads, results and attempts."""

    tasks: list[StoredTask]
    corrupt: list[CorruptRecord]
    next_after: str | None
    """The id to go on after; None at the end."""


@dataclass(frozen=True, slots=True)
class ClockRecord:
    """What nodes wrote about the store's clock, in its own time; 0 and empty: never."""

    accepted: Micros
    """When a step of it was last accepted, and by whom."""
    accepted_by: str
    confirmed: Micros
    """When a node that follows it last found it as it should be, and which node."""
    confirmed_by: str
    wall_clock_offset: Micros
    """How far that node's wall clock was off then."""


@dataclass(frozen=True, slots=True)
class StoreClock:
    """A reading of the store's clock, with what is recorded about it."""

    time: Micros
    """Cut to whole microseconds."""
    record: ClockRecord


class ReferenceClock(Protocol):
    """The clock that all nodes of a cluster follow: that of their store."""

    async def read_clock(self) -> StoreClock:
        """Read it, in one round trip. Raises StoreUnavailable."""
        ...

    async def accept_clock(self, near: Micros | None, by: str, wall_clock_offset: Micros) -> Micros | None:
        """Have all nodes follow it, if it is within MAX_OFFSET of `near`; None: wherever it is.

        Returns what it showed, None if it was elsewhere. Raises StoreUnavailable.
        """
        ...

    async def confirm_clock(self, near: Micros, by: str, wall_clock_offset: Micros) -> bool:
        """Record that it is as it should be, if it is within MAX_OFFSET of `near` and nobody did so for a while.

        Raises StoreUnavailable.
        """
        ...


class TaskStore(ReferenceClock, Protocol):
    """See the module's docstring."""

    name: str
    """`postgres`, `memory`."""
    is_durable: bool

    async def open(self) -> None:
        """Connect and check the schema. Raises StoreUnavailable or StoreRefused."""
        ...

    async def close(self) -> None:
        """Give everything back. Never raises."""
        ...

    async def shards(self) -> Sequence[ShardRow]:
        """Read the shard rows, by number, in one plain read: how an idle leader checks its terms."""
        ...

    async def raise_epochs(
        self, coordination: str, requests: Sequence[RaiseRequest], at: Micros
    ) -> Mapping[ShardId, Raised | RaiseRefused]:
        """Begin terms, in one transaction of its own.

        Raises StoreUnavailable, also when the answer was lost: raise again.

        A row whose coordination is empty (never led) takes the caller's; otherwise it must be the caller's.
        """
        ...

    async def bind(self, coordination: str, *, is_forced: bool = False) -> Sequence[ShardRow]:
        """Write a coordination into the shard rows that have none, and return all rows as they stand then.

        `is_forced` writes it into all rows and ends all terms: for operators, with all nodes stopped. Epochs stay.
        Raises StoreUnavailable, also when the answer was lost: bind again.
        """
        ...

    async def commit(self, batches: Sequence[ShardBatch]) -> Mapping[ShardId, CommitAnswer]:
        """Write a transaction for several shards, each under its fence. One round trip. Answers for every shard."""
        ...

    async def purge(self, fence: Fence, ended_before: Micros, limit: int) -> int | Stale:
        """Delete up to `limit` tasks of the shard that ended before an instant, with their attempt records."""
        ...

    async def set_aside(self, fence: Fence, record: CorruptRecord, at: Micros) -> bool | Stale:
        """End a task that does not decode: FAILED, record corrupt, leaving what cannot be read as it is."""
        ...

    async def load_held(self, shards: Sequence[ShardId]) -> Loaded:
        """Read all tasks of the shards that are leased or running."""
        ...

    async def load_buckets(
        self, shards: Sequence[ShardId], due_from: Micros, due_before: Micros, head: int
    ) -> LoadedBuckets:
        """Read waiting tasks due in [due_from, due_before), at most `head` a lane of a shard."""
        ...

    async def load_lanes(self, requests: Sequence[LaneRequest]) -> list[Loaded]:
        """Read the next tasks of lanes, in order; fewer, corrupt ones included, than the limit: there are no more."""
        ...

    async def load_tasks(self, keys: Sequence[TaskKey]) -> list[Task | CorruptRecord | None]:
        """Read single tasks, in the order of the keys; None where there is none."""
        ...

    async def load_oldest_due(self, shards: Sequence[ShardId], due_before: Micros, limit: int) -> Loaded:
        """Read up to `limit` of the oldest waiting tasks due before an instant, for each shard."""
        ...

    async def find_attempts(self, wanted: Sequence[tuple[TaskKey, bytes]]) -> list[Attempt | None]:
        """Read attempts, open or ended, by their task and lease token, in that order; None where there is none."""
        ...

    async def read_task(self, key: TaskKey, *, full: bool) -> StoredTask | CorruptRecord | None:
        """Read a task for a client; attempts, payload and result only if `full`."""
        ...

    async def list_tasks(self, query: TaskQuery, after: str, limit: int) -> TaskPage:
        """List tasks whose id comes after `after`, without payloads; looks at a bounded number of rows."""
        ...
