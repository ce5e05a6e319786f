"""`PostgresStore`: the `TaskStore` for production, on Postgres 15 or newer.

Every write is one call of an SQL function at READ COMMITTED, in one round trip: it locks the shard rows FOR SHARE in
shard order, compares epoch and holder, then writes. A raise updates those rows, so it waits for the writes of the term
that it ends, and writes that come later find their term over. The server ends a statement after a second; a commit
without an answer is unknown after five.

Five groups of connections: commits, other writes, reads, the loads of whole shards, so that none starves another, and
one for the clock, whose readings are the better the shorter they take.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.fence import Fence
from duecourse.server.core.task import Attempt, Epoch, ShardId, Task, TaskKey
from duecourse.server.storage import (
    CLOCK_CONFIRMED_EVERY,
    SEQUENCE_BITS,
    ClockRecord,
    CommitAnswer,
    Committed,
    CorruptRecord,
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
    StoreUnavailable,
    TaskPage,
    TaskQuery,
    Unknown,
    codec,
    migrate,
    queries,
    rows,
)
from duecourse.server.storage.commit_call import CommitCall, Queue
from duecourse.server.storage.connections import (
    AnswerLost,
    CallFailed,
    Connections,
    NotSent,
    Row,
    ServerError,
    connect,
    disconnect,
)
from duecourse.server.storage.heads import Heads
from duecourse.server.telemetry import logs

_log = logs.get("storage.postgres")

_WRITES: Final = queries.statements("writes.sql")
_READS: Final = queries.statements("reads.sql")

_WRITE_CONNECTIONS: Final = 2
_READ_CONNECTIONS: Final = 4
_LOAD_CONNECTIONS: Final = 2

_CLOCK_TIMEOUT: Final = bounds.SECOND
_READ_TIMEOUT: Final = 5 * bounds.SECOND
_LOAD_TIMEOUT: Final = 15 * bounds.SECOND
_LIST_SCAN: Final = 10_000
"""How many tasks a listing looks at in one call."""
_KNOWN_QUEUES_LIMIT: Final = 65_536
_SHARDS_IN_LOAD: Final = 16
_ROWS_IN_LOAD: Final = 2_048
"""How many shards' buckets are read at once, and how many rows of each: it bounds how long the server is at it."""
_DATA_CLASSES: Final = frozenset(("21", "22", "23", "54"))
_READ_ONLY: Final = "25006"
_WEAK_COMMITS: Final = frozenset(("off", "local"))

_SETTINGS: Final = {
    "application_name": "duecourse",
    "default_transaction_isolation": "read committed",
    "idle_in_transaction_session_timeout": "1s",
    "jit": "off",
}
_WRITE_SETTINGS: Final = {
    **_SETTINGS,
    "statement_timeout": f"{bounds.STATEMENT_TIMEOUT // bounds.MILLISECOND}ms",
    "lock_timeout": "800ms",
}
# Every read looks rows up; a plan made while the table was small must not go through all of it later.
_READ_SETTINGS: Final = {**_SETTINGS, "statement_timeout": "4s", "enable_seqscan": "off"}
# What is written about the clock may be lost in a crash of the server: it is written again.
_CLOCK_SETTINGS: Final = {**_WRITE_SETTINGS, "synchronous_commit": "off"}
_LOAD_SETTINGS: Final = {**_READ_SETTINGS, "statement_timeout": "12s"}


class PostgresStore:
    """See the module's docstring. `open` it before use."""

    name = "postgres"
    is_durable = True

    def __init__(
        self, dsn: str, *, commits: int = bounds.COMMIT_LANES, commit_timeout: Micros = bounds.COMMIT_TIMEOUT
    ) -> None:
        """Prepare for the database at `dsn` and so many commits at a time.

        A commit without an answer for `commit_timeout` is unknown.
        """
        self._dsn = dsn
        self._commits_at_once = commits
        self._commit_timeout = commit_timeout
        self._known_queues: set[Queue] = set()
        self._commits = self._writes = self._reads = self._loads = self._clock = Connections(dsn, 1, 0, {})

    async def open(self) -> None:
        """Connect, check the schema, and have commits wait for the disk even where the server's default does not."""
        try:
            connection = await connect(self._dsn, _SETTINGS)
            try:
                await migrate.check_schema(connection)
                durability = await connection.fetchrow(_READS["durability"])
            finally:
                await disconnect(connection)
        except CallFailed as error:
            raise StoreUnavailable(str(error)) from error
        assert durability is not None, "it has one row"
        synchronous_commit, has_fsync, asynchronous_replicas = durability
        if not has_fsync:
            _log.warning("store_weak", detail="fsync is off: a crash of the machine loses or corrupts tasks")
        if asynchronous_replicas:
            _log.warning(
                "store_weak",
                detail=f"{asynchronous_replicas} replicas are asynchronous: promoting one loses acknowledged tasks",
            )
        forced = {"synchronous_commit": "on"} if synchronous_commit in _WEAK_COMMITS else {}
        writing = {**_WRITE_SETTINGS, **forced}
        self._commits = self._connections(self._commits_at_once, self._commit_timeout, writing)
        self._writes = self._connections(_WRITE_CONNECTIONS, self._commit_timeout, writing)
        self._reads = self._connections(_READ_CONNECTIONS, _READ_TIMEOUT, _READ_SETTINGS)
        self._loads = self._connections(_LOAD_CONNECTIONS, _LOAD_TIMEOUT, _LOAD_SETTINGS)
        self._clock = self._connections(1, _CLOCK_TIMEOUT, _CLOCK_SETTINGS)

    async def close(self) -> None:
        """Give all connections back."""
        for group in self._groups():
            await group.close()

    async def shards(self) -> Sequence[ShardRow]:
        """Read the shard rows."""
        return [
            ShardRow(ShardId(shard), slot_from, slot_until, coordination, Epoch(epoch), holder)
            for shard, slot_from, slot_until, coordination, epoch, holder in await self._read("shards")
        ]

    # Writes.

    async def raise_epochs(
        self, coordination: str, requests: Sequence[RaiseRequest], at: Micros
    ) -> Mapping[ShardId, Raised | RaiseRefused]:
        """Begin terms; waits for commits under the terms that it ends."""
        bound = [request for request in requests if request.only_over is not None]
        over = [(request.shard, holder) for request in bound for holder in request.only_over or ()]
        found = await self._write(
            "raise_epochs",
            coordination,
            [request.shard for request in requests],
            [request.holder for request in requests],
            [request.epoch for request in requests],
            [request.shard for request in bound],
            [shard for shard, _ in over],
            [holder for _, holder in over],
            at,
        )
        answers: dict[ShardId, Raised | RaiseRefused] = {
            request.shard: RaiseRefused("", Epoch(0), b"") for request in requests
        }
        for shard, is_raised, row_coordination, epoch, holder, block, raises in found:
            if is_raised:
                fence = Fence(ShardId(shard), Epoch(epoch), holder)
                answers[fence.shard] = Raised(fence, block << SEQUENCE_BITS, tuple(raises))
            else:
                answers[ShardId(shard)] = RaiseRefused(row_coordination, Epoch(epoch), holder)
        return answers

    async def bind(self, coordination: str, *, is_forced: bool = False) -> Sequence[ShardRow]:
        """Write a coordination into rows that have none, or into all."""
        await self._write("bind", coordination, is_forced)
        return await self.shards()

    async def commit(self, batches: Sequence[ShardBatch]) -> Mapping[ShardId, CommitAnswer]:
        """Write several shards at once; without the stale ones again, as those alone keep it from writing anything."""
        answers: dict[ShardId, CommitAnswer] = {}
        while batches:
            latest = await self._commit(batches)
            answers.update(latest)
            is_any_stale = any(isinstance(answer, Stale) for answer in latest.values())
            batches = [batch for batch in batches if batch.fence.shard not in latest] if is_any_stale else ()
        return answers

    async def _commit(self, batches: Sequence[ShardBatch]) -> Mapping[ShardId, CommitAnswer]:
        """Return an answer for every shard, or only those that are stale, and then nothing was written."""
        call = CommitCall.of(batches, self._known_queues)
        answer: CommitAnswer
        try:
            found = await self._commits.call(call.statement, *call.arguments)
        except ServerError as error:
            self._look_elsewhere_if_read_only(error)
            answer = Refused(str(error), is_data=error.sqlstate[:2] in _DATA_CLASSES)
        except NotSent as error:
            answer = Refused(str(error), is_data=False)
        except AnswerLost as error:
            answer = Unknown(str(error))
        else:
            answers = call.answers(found)
            if any(isinstance(shard_answer, Committed) for shard_answer in answers.values()):
                if len(self._known_queues) > _KNOWN_QUEUES_LIMIT:
                    self._known_queues.clear()
                self._known_queues |= call.queues
            return answers
        return {batch.fence.shard: answer for batch in batches}

    async def purge(self, fence: Fence, ended_before: Micros, limit: int) -> int | Stale:
        """Delete tasks that ended long ago, with their attempts."""
        found = await self._write("purge", fence.shard, fence.epoch, fence.holder, ended_before, limit)
        is_current, epoch, holder, purged = found[0]
        return purged if is_current else _stale(epoch, holder)

    async def set_aside(self, fence: Fence, record: CorruptRecord, at: Micros) -> bool | Stale:
        """End a task that does not decode; False if it is no longer as it was read."""
        key = record.key
        found = await self._write(
            "set_aside", fence.shard, fence.epoch, fence.holder, key.namespace, key.task_id, record.revision, at
        )
        is_current, epoch, holder, is_done = found[0]
        return is_done if is_current else _stale(epoch, holder)

    # The clock.

    async def read_clock(self) -> StoreClock:
        """Read the server's clock, and what is recorded about it."""
        ((time, *record),) = await self._ask(self._clock, _READS["read_clock"])
        return StoreClock(time, ClockRecord(*record))

    async def accept_clock(self, near: Micros | None, by: str, wall_clock_offset: Micros) -> Micros | None:
        """Have all nodes follow the server's clock."""
        statement = _WRITES["accept_clock"]
        ((time,),) = await self._ask(self._clock, statement, near, bounds.MAX_OFFSET, by, wall_clock_offset)
        accepted: Micros | None = time
        return accepted

    async def confirm_clock(self, near: Micros, by: str, wall_clock_offset: Micros) -> bool:
        """Record that the server's clock is as it should be."""
        arguments = (near, bounds.MAX_OFFSET, by, wall_clock_offset, CLOCK_CONFIRMED_EVERY)
        ((is_done,),) = await self._ask(self._clock, _WRITES["confirm_clock"], *arguments)
        return bool(is_done)

    # Reads for the node.

    async def load_held(self, shards: Sequence[ShardId]) -> Loaded:
        """Read what is leased or running; looks at all tasks that may ever have been granted and have not ended."""
        loaded = Loaded([], [])
        for start in range(0, len(shards), _SHARDS_IN_LOAD):
            for row in await self._load("load_held", list(shards[start : start + _SHARDS_IN_LOAD])):
                _add(loaded, row)
        return loaded

    async def load_buckets(
        self, shards: Sequence[ShardId], due_from: Micros, due_before: Micros, head: int
    ) -> LoadedBuckets:
        """Read the first tasks of every lane; skips through the due index from lane to lane."""
        heads = Heads(shards, due_from, head)
        while places := heads.unread(_SHARDS_IN_LOAD):
            heads.add(
                await self._load(
                    "load_buckets",
                    [shard for shard, _ in places],
                    [place.bucket for _, place in places],
                    [place.lane_hash for _, place in places],
                    due_from,
                    due_before,
                    head,
                    _ROWS_IN_LOAD,
                )
            )
        return heads.loaded

    async def load_lanes(self, requests: Sequence[LaneRequest]) -> list[Loaded]:
        """Read on in many lanes at once."""
        lanes = [request.lane for request in requests]
        found = await self._load(
            "load_lanes",
            [request.shard for request in requests],
            [codec.lane_hash(lane) for lane in lanes],
            [lane.namespace for lane in lanes],
            [lane.queue for lane in lanes],
            [lane.task_type for lane in lanes],
            [lane.priority for lane in lanes],
            [lane.fairness_key for lane in lanes],
            [request.after.due_time for request in requests],
            [request.after.sequence for request in requests],
            [request.due_before for request in requests],
            [request.limit for request in requests],
        )
        loaded = [Loaded([], []) for _ in requests]
        for row in found:
            _add(loaded[row[rows.TASK_COLUMNS] - 1], row)
        return loaded

    async def load_tasks(self, keys: Sequence[TaskKey]) -> list[Task | CorruptRecord | None]:
        """Read single tasks."""
        found = await self._read("load_tasks", [key.namespace for key in keys], [key.task_id for key in keys])
        by_key = {TaskKey(row[0], row[1]): rows.task_of(row) for row in found}
        return [by_key.get(key) for key in keys]

    async def load_oldest_due(self, shards: Sequence[ShardId], due_before: Micros, limit: int) -> Loaded:
        """Read the oldest waiting tasks of each shard."""
        return _loaded(await self._load("load_oldest_due", list(shards), due_before, limit))

    async def find_attempts(self, wanted: Sequence[tuple[TaskKey, bytes]]) -> list[Attempt | None]:
        """Find attempts by their tokens; one that does not decode is as good as none."""
        found = await self._read(
            "find_attempts",
            [key.namespace for key, _ in wanted],
            [key.task_id for key, _ in wanted],
            [lease_token for _, lease_token in wanted],
        )
        attempts: list[Attempt | None] = [None] * len(wanted)
        for place, *attempt in found:
            attempts[place - 1] = rows.attempt_of(attempt)
        return attempts

    # Reads for clients.

    async def read_task(self, key: TaskKey, *, full: bool) -> StoredTask | CorruptRecord | None:
        """Read a task and, if `full`, after it its earlier attempts, which a grant meanwhile may have joined."""
        found = await self._read("read_task", key.namespace, key.task_id, full)
        if not found:
            return None
        stored = rows.stored_task_of(found[0])
        if full and isinstance(stored, StoredTask):
            latest = stored.task.progress.attempt
            earlier = _attempts(await self._read("read_attempts", key.namespace, key.task_id))
            if latest is not None:
                stored.attempts = [attempt for attempt in earlier if attempt.number < latest.number] + [latest]
        return stored

    async def list_tasks(self, query: TaskQuery, after: str, limit: int) -> TaskPage:
        """List tasks in the order of their ids."""
        found = await self._read(
            "list_tasks",
            query.namespace,
            after,
            query.queue,
            sorted(query.states),
            query.run_at_from,
            query.run_at_before,
            limit + 1,
            _LIST_SCAN,
        )
        *_, last_scanned, scanned = found[0]
        page = TaskPage([], [], last_scanned if scanned == _LIST_SCAN else None)
        for row in found[:limit]:
            if row[0] is None:
                break
            stored = rows.stored_task_of(row)
            if isinstance(stored, CorruptRecord):
                page.corrupt.append(stored)
            else:
                page.tasks.append(stored)
        if len(found) > limit:
            page.next_after = found[limit - 1][1]
        return page

    def _connections(self, size: int, timeout: Micros, settings: Mapping[str, str]) -> Connections:
        return Connections(self._dsn, size, timeout, settings, self._distrust_idle)

    def _distrust_idle(self) -> None:
        for group in self._groups():
            group.drop_idle()

    def _groups(self) -> tuple[Connections, ...]:
        return self._commits, self._writes, self._reads, self._loads, self._clock

    async def _read(self, statement: str, *arguments: Any) -> Sequence[Row]:
        return await self._ask(self._reads, _READS[statement], *arguments)

    async def _load(self, statement: str, *arguments: Any) -> Sequence[Row]:
        return await self._ask(self._loads, _READS[statement], *arguments)

    async def _write(self, statement: str, *arguments: Any) -> Sequence[Row]:
        return await self._ask(self._writes, _WRITES[statement], *arguments)

    async def _ask(self, group: Connections, statement: str, *arguments: Any) -> Sequence[Row]:
        try:
            return await group.call(statement, *arguments)
        except CallFailed as error:
            if isinstance(error, ServerError):
                self._look_elsewhere_if_read_only(error)
            raise StoreUnavailable(str(error)) from error

    def _look_elsewhere_if_read_only(self, error: ServerError) -> None:
        """Drop all connections to a server that has become a standby: the address may lead to another by now."""
        if error.sqlstate == _READ_ONLY:
            for group in self._groups():
                group.drop()


def _stale(epoch: int | None, holder: bytes | None) -> Stale:
    return Stale(Epoch(epoch or 0), holder or b"")


def _loaded(found: Sequence[Row]) -> Loaded:
    loaded = Loaded([], [])
    for row in found:
        _add(loaded, row)
    return loaded


def _add(loaded: Loaded, row: Row) -> None:
    decoded = rows.task_of(row)
    if isinstance(decoded, CorruptRecord):
        loaded.corrupt.append(decoded)
    else:
        loaded.tasks.append(decoded)


def _attempts(found: Sequence[Row]) -> list[Attempt]:
    """Decode attempts; one that does not decode is left out."""
    attempts = (rows.attempt_of(row) for row in found)
    return [attempt for attempt in attempts if attempt is not None]
