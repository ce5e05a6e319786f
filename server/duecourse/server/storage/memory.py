"""`MemoryStore`: the contract in its simplest form, for the simulation, for tests, and for trying things out.

Nothing here waits: every method does its work in one step, so that whoever drives it decides what happens in between.
It keeps the promises of `TaskStore` except durability: a restart loses the tasks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from duecourse.model import bounds, slots
from duecourse.model.instants import Micros
from duecourse.server.core.fence import Fence
from duecourse.server.core.task import (
    HELD,
    WAITING,
    Attempt,
    AttemptOutcome,
    Delivery,
    DueKey,
    Epoch,
    FailureReason,
    Lane,
    Progress,
    ShardId,
    Submission,
    Task,
    TaskKey,
    TaskState,
)
from duecourse.server.core.writes import Insert, Update
from duecourse.server.storage import (
    CLOCK_CONFIRMED_EVERY,
    SEQUENCE_BITS,
    ClockRecord,
    CommitAnswer,
    Committed,
    CorruptRecord,
    Existing,
    LaneRequest,
    Loaded,
    LoadedBuckets,
    Raised,
    RaiseRefused,
    RaiseRequest,
    Refused,
    ShardBatch,
    ShardRow,
    Stale,
    StoreClock,
    StoredTask,
    TaskPage,
    TaskQuery,
)
from duecourse.timing.clock import SystemClock

_RAISES_KEPT: Final = 16


@dataclass(slots=True)
class _Shard:
    row: ShardRow
    sequence_block: int = 0
    raises: tuple[Micros, ...] = ()


@dataclass(slots=True)
class _Record:
    """A task as it is kept; `task.progress` is replaced by every update."""

    task: Task
    submission: Submission
    result: tuple[bytes, str] | None = None
    attempts: list[Attempt] = field(default_factory=list)
    is_spoiled: bool = False

    @property
    def progress(self) -> Progress:
        return self.task.progress


class MemoryStore:
    """See the module's docstring."""

    name = "memory"
    is_durable = False

    def __init__(self, shards: int = bounds.DEFAULT_SHARDS, wall: Callable[[], Micros] | None = None) -> None:
        """Prepare so many shards; the store's clock is that of the process, or `wall`."""
        self._shards = {
            ShardId(number): _Shard(
                ShardRow(
                    ShardId(number),
                    slots.first_slot(number, shards),
                    slots.first_slot(number + 1, shards),
                    "",
                    Epoch(0),
                    b"",
                )
            )
            for number in range(shards)
        }
        self._records: dict[TaskKey, _Record] = {}
        self._queues: set[tuple[str, str]] = set()
        self._wall = wall or SystemClock().wall
        self._clock_record = ClockRecord(0, "", 0, "", 0)

    def snapshot(self) -> bytes:
        """Return all that is kept, in a form that is equal if and only if it is."""
        records = [(key, self._records[key]) for key in sorted(self._records)]
        return repr((self._shards, sorted(self._queues), records)).encode()

    def spoil(self, key: TaskKey) -> None:
        """Make a task's record one that does not decode."""
        self._records[key].is_spoiled = True

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing; what was kept stays."""

    async def shards(self) -> Sequence[ShardRow]:
        """Read the shard rows."""
        return [shard.row for shard in self._shards.values()]

    async def raise_epochs(
        self, coordination: str, requests: Sequence[RaiseRequest], at: Micros
    ) -> Mapping[ShardId, Raised | RaiseRefused]:
        """Begin terms."""
        return {request.shard: self._raise(coordination, request, at) for request in requests}

    async def bind(self, coordination: str, *, is_forced: bool = False) -> Sequence[ShardRow]:
        """Write a coordination into rows that have none, or into all."""
        for shard in self._shards.values():
            if is_forced:
                shard.row = replace(shard.row, coordination=coordination, holder=b"")
            elif not shard.row.coordination:
                shard.row = replace(shard.row, coordination=coordination)
        return await self.shards()

    async def commit(self, batches: Sequence[ShardBatch]) -> Mapping[ShardId, CommitAnswer]:
        """Write several shards at once."""
        answers: dict[ShardId, CommitAnswer] = {}
        current: list[ShardBatch] = []
        for batch in batches:
            stale = self._stale(batch.fence)
            if stale is None:
                current.append(batch)
            else:
                answers[batch.fence.shard] = stale
        inserts = [insert for batch in current for insert in batch.inserts]
        if any(map(_is_unfit, inserts)):
            refused = Refused("a text contains a zero character", is_data=True)
            return answers | {batch.fence.shard: refused for batch in current}
        return answers | {batch.fence.shard: self._commit(batch) for batch in current}

    async def purge(self, fence: Fence, ended_before: Micros, limit: int) -> int | Stale:
        """Delete tasks that ended long ago, the longest ended first."""
        stale = self._stale(fence)
        if stale is not None:
            return stale
        ended = sorted(
            (end_time, key)
            for key, record in self._records.items()
            if record.task.shard == fence.shard
            and (end_time := record.progress.end_time) is not None
            and end_time < ended_before
        )
        for _, key in ended[:limit]:
            del self._records[key]
        return len(ended[:limit])

    async def set_aside(self, fence: Fence, record: CorruptRecord, at: Micros) -> bool | Stale:
        """End a task that does not decode; False if it is no longer as it was read."""
        stale = self._stale(fence)
        if stale is not None:
            return stale
        kept = self._records.get(record.key)
        if kept is None or kept.progress.revision != record.revision or kept.progress.end_time is not None:
            return False
        kept.task.progress = replace(
            kept.progress,
            state=TaskState.FAILED,
            due_time=None,
            revision=record.revision + 1,
            end_time=at,
            failure_reason=FailureReason.RECORD_CORRUPT,
        )
        return True

    async def read_clock(self) -> StoreClock:
        """Read the process's clock, and what is recorded about it."""
        return StoreClock(self._wall(), self._clock_record)

    async def accept_clock(self, near: Micros | None, by: str, wall_clock_offset: Micros) -> Micros | None:
        """Have all nodes follow the process's clock."""
        time = self._wall()
        if near is not None and abs(time - near) > bounds.MAX_OFFSET:
            return None
        self._clock_record = ClockRecord(time, by, time, by, wall_clock_offset)
        return time

    async def confirm_clock(self, near: Micros, by: str, wall_clock_offset: Micros) -> bool:
        """Record that the process's clock is as it should be."""
        time, record = self._wall(), self._clock_record
        if abs(time - near) > bounds.MAX_OFFSET or abs(time - record.confirmed) < CLOCK_CONFIRMED_EVERY:
            return False
        self._clock_record = replace(record, confirmed=time, confirmed_by=by, wall_clock_offset=wall_clock_offset)
        return True

    async def load_held(self, shards: Sequence[ShardId]) -> Loaded:
        """Read what is leased or running."""
        return _loaded(record for record in self._of(shards) if record.progress.state in HELD)

    async def load_buckets(
        self, shards: Sequence[ShardId], due_from: Micros, due_before: Micros, head: int
    ) -> LoadedBuckets:
        """Read the first tasks of every lane."""
        lanes: dict[tuple[ShardId, Lane], list[_Record]] = {}
        for record in self._waiting(shards, due_from, due_before):
            lanes.setdefault((record.task.shard, record.task.lane), []).append(record)
        loaded = LoadedBuckets([], [], {})
        for lane, records in lanes.items():
            first = _loaded(records[:head])
            loaded.tasks += first.tasks
            loaded.corrupt += first.corrupt
            if len(records) > head:
                loaded.cut[lane] = _due_key(records[head - 1].task)
        return loaded

    async def load_lanes(self, requests: Sequence[LaneRequest]) -> list[Loaded]:
        """Read on in several lanes."""
        return [
            _loaded(
                [
                    record
                    for record in self._waiting([request.shard], request.after.due_time, request.due_before)
                    if record.task.lane == request.lane and _due_key(record.task) > request.after
                ][: request.limit]
            )
            for request in requests
        ]

    async def load_tasks(self, keys: Sequence[TaskKey]) -> list[Task | CorruptRecord | None]:
        """Read single tasks."""
        return [_decoded(record) if (record := self._records.get(key)) else None for key in keys]

    async def load_oldest_due(self, shards: Sequence[ShardId], due_before: Micros, limit: int) -> Loaded:
        """Read the oldest waiting tasks of each shard."""
        return _loaded(record for shard in shards for record in self._waiting([shard], 0, due_before)[:limit])

    async def find_attempts(self, wanted: Sequence[tuple[TaskKey, bytes]]) -> list[Attempt | None]:
        """Find attempts by their tokens."""
        return [self._attempt(key, lease_token) for key, lease_token in wanted]

    def _attempt(self, key: TaskKey, lease_token: bytes) -> Attempt | None:
        record = self._records.get(key)
        attempts = _all_attempts(record) if record else []
        return next((attempt for attempt in attempts if attempt.lease_token == lease_token), None)

    async def read_task(self, key: TaskKey, *, full: bool) -> StoredTask | CorruptRecord | None:
        """Read a task."""
        record = self._records.get(key)
        return None if record is None else _stored(record, full=full)

    async def list_tasks(self, query: TaskQuery, after: str, limit: int) -> TaskPage:
        """List tasks in the order of their ids."""
        page = TaskPage([], [], None)
        matching = [
            self._records[key]
            for key in sorted(self._records)
            if key.namespace == query.namespace and key.task_id > after and _matches(self._records[key], query)
        ]
        for record in matching[:limit]:
            stored = _stored(record, full=False)
            if isinstance(stored, CorruptRecord):
                page.corrupt.append(stored)
            else:
                page.tasks.append(stored)
        if len(matching) > limit:
            page.next_after = matching[limit - 1].task.task_id
        return page

    def _raise(self, coordination: str, request: RaiseRequest, at: Micros) -> Raised | RaiseRefused:
        shard = self._shards.get(request.shard)
        if shard is None:
            return RaiseRefused("", Epoch(0), b"")
        row = shard.row
        epoch = Epoch(row.epoch + 1) if request.epoch is None else request.epoch
        is_allowed = request.only_over is None or row.holder in request.only_over
        if row.coordination not in ("", coordination) or epoch <= row.epoch or not is_allowed:
            return RaiseRefused(row.coordination, row.epoch, row.holder)
        shard.row = replace(row, coordination=coordination, epoch=epoch, holder=request.holder)
        shard.sequence_block += 1
        shard.raises = (*shard.raises, at)[-_RAISES_KEPT:]
        fence = Fence(request.shard, epoch, request.holder)
        return Raised(fence, shard.sequence_block << SEQUENCE_BITS, shard.raises)

    def _stale(self, fence: Fence) -> Stale | None:
        shard = self._shards.get(fence.shard)
        if shard is None:
            return Stale(Epoch(0), b"")
        row = shard.row
        return None if (row.epoch, row.holder) == (fence.epoch, fence.holder) else Stale(row.epoch, row.holder)

    def _commit(self, batch: ShardBatch) -> Committed:
        committed = Committed({}, set(), {})
        for index, insert in enumerate(batch.inserts):
            task = insert.task
            taken = self._records.get(task.key)
            if taken is not None:
                committed.taken[index] = Existing(taken.task.uid, taken.submission.fingerprint)
                continue
            self._records[task.key] = _Record(_copy(task), insert.submission)
            self._queues.add((task.lane.namespace, task.lane.queue))
        for index, update in enumerate(batch.updates):
            record = self._records.get(update.task.key)
            if record is None or record.progress.revision != update.progress.revision - 1:
                committed.mismatched.add(index)
                continue
            _apply(record, update)
            if update.is_grant:
                submission = record.submission
                committed.deliveries[index] = Delivery(
                    submission.payload, submission.content_type, dict(submission.headers)
                )
        return committed

    def _of(self, shards: Sequence[ShardId]) -> list[_Record]:
        wanted = set(shards)
        return [record for record in self._records.values() if record.task.shard in wanted]

    def _waiting(self, shards: Sequence[ShardId], due_from: Micros, due_before: Micros) -> list[_Record]:
        """Return waiting tasks due in [due_from, due_before), in order."""
        found = [
            (_due_key(record.task), record.task.key, record)
            for record in self._of(shards)
            if record.progress.state in WAITING and due_from <= _due_key(record.task).due_time < due_before
        ]
        return [record for _, _, record in sorted(found, key=lambda entry: entry[:2])]


def _apply(record: _Record, update: Update) -> None:
    record.task.progress = update.progress
    if update.result is not None:
        record.result = update.result
    if update.archive is not None:
        record.attempts.append(update.archive)
        returned = [attempt for attempt in record.attempts if attempt.outcome is AttemptOutcome.RETURNED]
        for attempt in returned[: -bounds.MAX_RETURNED_RECORDS]:
            record.attempts.remove(attempt)


def _copy(task: Task) -> Task:
    """Return a task of its own: its reader replaces its progress."""
    return replace(task, is_ready=False)


def _decoded(record: _Record) -> Task | CorruptRecord:
    task = record.task
    if record.is_spoiled:
        return CorruptRecord(task.shard, task.key, record.progress.revision, "spoiled")
    return _copy(task)


def _loaded(records: Iterable[_Record]) -> Loaded:
    loaded = Loaded([], [])
    for record in records:
        decoded = _decoded(record)
        if isinstance(decoded, CorruptRecord):
            loaded.corrupt.append(decoded)
        else:
            loaded.tasks.append(decoded)
    return loaded


def _stored(record: _Record, *, full: bool) -> StoredTask | CorruptRecord:
    task = _decoded(record)
    if isinstance(task, CorruptRecord):
        return task
    submission = record.submission
    return StoredTask(
        task,
        submission.payload if full else b"",
        submission.content_type,
        dict(submission.headers),
        dict(submission.labels),
        record.result if full else None,
        _all_attempts(record) if full else [],
    )


def _all_attempts(record: _Record) -> list[Attempt]:
    latest = record.progress.attempt
    return record.attempts + ([latest] if latest else [])


def _due_key(task: Task) -> DueKey:
    assert task.progress.due_time is not None, "a waiting task has a due time"
    return DueKey(task.progress.due_time, task.sequence)


def _matches(record: _Record, query: TaskQuery) -> bool:
    run_at = record.task.run_at
    return (
        (query.queue is None or record.task.lane.queue == query.queue)
        and (not query.states or record.progress.state in query.states)
        and (query.run_at_from is None or run_at >= query.run_at_from)
        and (query.run_at_before is None or run_at < query.run_at_before)
    )


def _is_unfit(insert: Insert) -> bool:
    """Tell whether Postgres would refuse a task: it keeps no zero character in a text."""
    submission = insert.submission
    texts = (*insert.task.key, *submission.labels, *submission.labels.values())
    lane = insert.task.lane
    return any("\0" in text for text in (*texts, lane.queue, lane.task_type, lane.fairness_key))
