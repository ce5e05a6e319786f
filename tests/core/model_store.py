"""A store that can be read whole: it checks every transition that is written, and keeps the history of each attempt.

Nothing of the real stores is used, so that it does not share their faults.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core import events
from duecourse.server.core.fence import Fence
from duecourse.server.core.near import due_key
from duecourse.server.core.task import (
    HELD,
    TERMINAL,
    WAITING,
    Attempt,
    AttemptOutcome,
    Delivery,
    DueKey,
    Epoch,
    Lane,
    Progress,
    ShardId,
    Submission,
    Task,
    TaskKey,
    TaskState,
)
from duecourse.server.core.writes import Insert, Update, Write


@dataclass(frozen=True, slots=True)
class Row:
    """A task as it is stored."""

    submission: Submission
    sequence: int
    run_at: Micros
    create_time: Micros
    progress: Progress
    archive: tuple[Attempt, ...] = ()
    result: tuple[bytes, str] | None = None

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        latest = self.progress.attempt
        return self.archive if latest is None else (*self.archive, latest)

    def task(self) -> Task:
        """Read it: a new object each time."""
        of = self.submission
        return Task(
            TaskKey(of.namespace, of.task_id),
            of.shard,
            of.lane,
            of.uid,
            self.sequence,
            self.run_at,
            self.create_time,
            of.policy,
            self.progress,
        )


@dataclass(frozen=True, slots=True)
class Existing:
    """What stands under an id that is taken."""

    uid: bytes
    fingerprint: bytes


class Snapshot:
    """What a read sees that looks at the store at one moment."""

    def __init__(self, rows: Mapping[TaskKey, Row]) -> None:
        self.rows = dict(rows)

    def held(self, shard: ShardId) -> list[Task]:
        return [row.task() for row in self._of(shard) if row.progress.state in HELD]

    def buckets(
        self, shard: ShardId, due_from: Micros, due_before: Micros, head: int
    ) -> tuple[list[Task], dict[Lane, DueKey]]:
        by_bucket: defaultdict[tuple[Lane, int], list[Task]] = defaultdict(list)
        for task in self._waiting(shard, due_before):
            due_time = due_key(task).due_time
            if due_time >= due_from:
                by_bucket[task.lane, due_time // bounds.BUCKET].append(task)
        tasks: list[Task] = []
        cut: dict[Lane, DueKey] = {}
        for (lane, _), rows in by_bucket.items():
            tasks.extend(rows[:head])
            if len(rows) > head:
                last = due_key(rows[head - 1])
                cut[lane] = min(cut.get(lane, last), last)
        return tasks, cut

    def lane(
        self, shard: ShardId, lane: Lane, after: DueKey, due_before: Micros, limit: int
    ) -> tuple[list[Task], bool]:
        rows = [task for task in self._waiting(shard, due_before) if task.lane == lane and due_key(task) > after]
        return rows[:limit], len(rows) < limit

    def oldest_due(self, shard: ShardId, due_before: Micros, limit: int) -> list[Task]:
        return self._waiting(shard, due_before)[:limit]

    def task(self, key: TaskKey) -> Task | None:
        row = self.rows.get(key)
        return None if row is None else row.task()

    def attempt(self, key: TaskKey, token: bytes) -> Attempt | None:
        row = self.rows.get(key)
        attempts = () if row is None else row.attempts
        return next((attempt for attempt in attempts if attempt.lease_token == token), None)

    def _of(self, shard: ShardId) -> Iterator[Row]:
        return (row for row in self.rows.values() if row.submission.shard == shard)

    def _waiting(self, shard: ShardId, due_before: Micros) -> list[Task]:
        tasks = [row.task() for row in self._of(shard) if row.progress.state in WAITING]
        return sorted((task for task in tasks if due_key(task).due_time < due_before), key=due_key)


@dataclass
class ModelStore:
    """See the module's docstring."""

    rows: dict[TaskKey, Row] = field(default_factory=dict)
    terms: dict[ShardId, Fence] = field(default_factory=dict)
    raises: defaultdict[ShardId, list[Micros]] = field(default_factory=lambda: defaultdict(list))
    applied: set[int] = field(default_factory=set)
    """The ids of the writes that were applied, whether or not anybody was told."""
    kept: list[Write] = field(default_factory=list)
    """So that no two writes share an id."""
    tokens: set[bytes] = field(default_factory=set)

    def raise_epoch(self, shard: ShardId, at: Micros) -> tuple[Fence, int, tuple[Micros, ...]]:
        """Begin a term: the fence, the first sequence, and the last raises."""
        before = self.terms.get(shard)
        epoch = Epoch(1 if before is None else before.epoch + 1)
        fence = self.terms[shard] = Fence(shard, epoch, epoch.to_bytes(16, "big"))
        raises = self.raises[shard]
        raises.append(at)
        del raises[:-16]
        return fence, epoch << 32, tuple(raises)

    def commit(self, fence: Fence, writes: Sequence[Write], earliest: Micros) -> events.Committed | None:
        """Apply writes; None: the term is over."""
        if self.terms[fence.shard] != fence:
            return None
        answer = events.Committed(list(writes), {}, set(), {})
        assert len({write.task.key for write in writes}) == len(writes), "two writes to one task in one commit"
        for index, write in enumerate(writes):
            if isinstance(write, Insert):
                self._insert(index, write, answer)
            else:
                self._update(index, write, answer, earliest)
        return answer

    def snapshot(self) -> Snapshot:
        return Snapshot(self.rows)

    def purge(self, key: TaskKey) -> None:
        """Forget a task that has ended."""
        assert self.rows[key].progress.state in TERMINAL
        del self.rows[key]

    def find(self, token: bytes) -> Attempt | None:
        """Find an attempt by its token alone."""
        attempts = (attempt for row in self.rows.values() for attempt in row.attempts)
        return next((attempt for attempt in attempts if attempt.lease_token == token), None)

    def _insert(self, index: int, write: Insert, answer: events.Committed) -> None:
        task = write.task
        row = self.rows.get(task.key)
        if row is not None:
            answer.taken[index] = Existing(row.submission.uid, row.submission.fingerprint)
            return
        self._note(write)
        progress = task.progress
        assert (progress.state, progress.revision, progress.attempt) == (TaskState.PENDING, 1, None)
        sequences = {row.sequence for row in self.rows.values() if row.submission.shard == task.shard}
        assert not sequences or task.sequence > max(sequences), "a sequence below one that was issued"
        self.rows[task.key] = Row(write.submission, task.sequence, task.run_at, task.create_time, progress)

    def _update(self, index: int, write: Update, answer: events.Committed, earliest: Micros) -> None:
        row = self.rows.get(write.task.key)
        if row is None or row.progress.revision != write.progress.revision - 1:
            answer.mismatched.add(index)
            return
        self._note(write)
        archive = row.archive if write.archive is None else (*row.archive, write.archive)
        after = replace(row, progress=write.progress, archive=archive, result=write.result or row.result)
        check_transition(row, after, earliest, is_grant=write.is_grant)
        self.rows[write.task.key] = after
        if write.is_grant:
            attempt = write.progress.attempt
            assert attempt is not None
            assert attempt.lease_token not in self.tokens, "a token was granted twice"
            self.tokens.add(attempt.lease_token)
            of = row.submission
            answer.deliveries[index] = Delivery(of.payload, of.content_type, of.headers)

    def _note(self, write: Write) -> None:
        self.applied.add(id(write))
        self.kept.append(write)


def check_transition(before: Row, after: Row, earliest: Micros, *, is_grant: bool) -> None:
    """Hold what is written against the rules that any transition keeps."""
    last = before.progress
    progress = after.progress
    policy = after.submission.policy
    assert last.state not in TERMINAL, "a terminal state is final"
    assert progress.revision == last.revision + 1
    assert progress.round == last.round
    assert progress.attempts_used <= policy.max_attempts, "more attempts than allowed"
    assert (progress.due_time is None) == (progress.state in TERMINAL), "waiting and held tasks have a due time"
    assert (progress.end_time is None) == (progress.state not in TERMINAL)
    assert (progress.failure_reason is None) == (progress.state is not TaskState.FAILED)
    assert progress.earlier_attempt_may_run >= last.earlier_attempt_may_run
    attempts = after.attempts
    assert [attempt.number for attempt in attempts] == list(range(1, progress.attempt_count + 1)), (
        "an attempt is missing"
    )
    is_open = [attempt.outcome is None for attempt in attempts]
    assert not any(is_open[:-1]), "two attempts are open"
    assert (bool(is_open) and is_open[-1]) == (progress.state in HELD), "an attempt is open exactly while it is held"
    used = sum(attempt.outcome is not AttemptOutcome.RETURNED for attempt in attempts)
    assert progress.attempts_used == used, "attempts that were used are counted, and no others"
    tokens = [attempt.fencing_token for attempt in attempts]
    assert tokens == sorted(set(tokens)), "fencing tokens grow"
    assert is_grant == (progress.attempt_count == last.attempt_count + 1)
    if is_grant:
        assert last.state in WAITING
        assert not last.cancel_requested, "a cancelled task is granted again"
        assert last.due_time is not None
        assert earliest >= last.due_time, "granted before its time"
    if last.cancel_requested:
        assert progress.state in HELD | {TaskState.CANCELLED, TaskState.SUCCEEDED}, "cancelled tasks wait no more"
    if last.state is TaskState.RUNNING and progress.attempt is not None:
        assert progress.attempt.outcome is not AttemptOutcome.RETURNED, "returned after it was recorded as running"
