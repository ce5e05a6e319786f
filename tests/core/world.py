"""Two nodes, some workers and a store, driven step by step, and what must hold between any two steps.

Nothing happens by itself: time passes when it is told to, messages and answers arrive when they are let. So a test, or
Hypothesis, decides on the order of everything. `settle` stops all faults and runs the world to its end.
"""

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from core.builders import START
from core.model_node import HEAD, HORIZON, OPTIONS, BucketLoad, Node, Read, epoch_of, shard_of
from core.model_store import ModelStore, Row
from core.model_worker import Held, Stream, Up, Worker

from duecourse.model import bounds
from duecourse.model.instants import Micros, Now
from duecourse.server.core import errors, events
from duecourse.server.core.effects import Answer, Cancelled, CancelResult, Submitted, Verdict
from duecourse.server.core.events import OutcomeKind
from duecourse.server.core.near import due_key
from duecourse.server.core.shard import Shard
from duecourse.server.core.task import (
    HELD,
    TERMINAL,
    WAITING,
    AttemptOutcome,
    ShardId,
    Submission,
    TaskKey,
    TaskState,
)
from duecourse.server.core.writes import Insert

UNCERTAINTY: Micros = bounds.MILLISECOND
SHARDS = (ShardId(0), ShardId(1))
_STEP: Micros = bounds.LONGEST_SLEEP // 2


@dataclass(slots=True, eq=False)
class Origin:
    """Who waits for an answer."""

    key: TaskKey
    submission: Submission | None
    answers: list[Answer] = field(default_factory=list)
    insert: Insert | None = None


@dataclass(slots=True, eq=False)
class Taking:
    """A term that has been raised and is being loaded."""

    node: Node
    shard: Shard
    raises: tuple[Micros, ...]
    horizon: Micros
    held: events.HeldLoaded | None = None


class World:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.elapsed: Micros = 0
        self.store = ModelStore()
        tokens = itertools.count(1)
        self.nodes = [Node(name, self.store, self, tokens) for name in ("a", "b")]
        self.takings: list[Taking] = []
        self.workers: list[Worker] = []
        self.origins: list[Origin] = []
        self.started: set[tuple[TaskKey, int]] = set()
        self.prevented: set[tuple[TaskKey, int]] = set()
        self.outcomes: dict[bytes, set[bytes]] = defaultdict(set)
        """By token: the digests that were sent."""
        self.liars: set[TaskKey] = set()
        """Tasks of which a worker has not told the truth: nobody can know whether their handlers ran."""
        self._incarnations = itertools.count(1)
        self._stream_ids = itertools.count(1)
        for number in SHARDS:
            self.take(self.nodes[0], number)
            self.finish_takings()

    def now(self) -> Now:
        utc = START + self.elapsed
        return Now(utc - UNCERTAINTY, utc + UNCERTAINTY, self.elapsed)

    # Terms.

    def take(self, node: Node, number: ShardId) -> None:
        """Raise a shard's epoch for a node."""
        now = self.now()
        if number in node.shards:
            node.end(node.shards[number])
        self.takings = [taking for taking in self.takings if taking.shard.fence.shard != number]
        for other in self.nodes:
            if number in other.ended:
                other.ended.remove(number)
        fence, sequence, raises = self.store.raise_epoch(number, now.latest)
        horizon = (now.latest + HORIZON) // bounds.BUCKET * bounds.BUCKET + bounds.BUCKET
        self.takings.append(Taking(node, Shard(fence, sequence, horizon, OPTIONS, now), raises, horizon))

    def load(self, taking: Taking) -> None:
        """Go on with the loading of a shard by one step."""
        number = taking.shard.fence.shard
        snapshot = self.store.snapshot()
        if taking.held is None:
            taking.held = events.HeldLoaded(snapshot.held(number), taking.raises)
            return
        self.takings.remove(taking)
        tasks, cut = snapshot.buckets(number, 0, taking.horizon, HEAD)
        now = self.now()
        shard = Shard(taking.shard.fence, self.store.terms[number].epoch << 32, taking.horizon, OPTIONS, now)
        taking.node.begin(shard, taking.held, events.BucketsLoaded(tasks, cut))

    def finish_takings(self) -> None:
        while self.takings:
            self.load(self.takings[0])

    # Clients.

    def submit(self, node: Node, submission: Submission) -> Origin:
        origin = Origin(TaskKey(submission.namespace, submission.task_id), submission)
        self.origins.append(origin)
        node.post(submission.shard, events.Submit([(submission, origin)]))
        return origin

    def cancel(self, node: Node, key: TaskKey, wait: Micros, request_id: str = "") -> Origin:
        origin = Origin(key, None)
        self.origins.append(origin)
        node.post(shard_of(key), events.Cancel(key, request_id, b"cancel", None, wait, origin))
        return origin

    def answered(self, origin: Origin, answer: Answer) -> None:
        """Hold an answer against what is stored."""
        assert not origin.answers, "answered twice"
        origin.answers.append(answer)
        row = self.store.rows.get(origin.key)
        is_applied = any(
            isinstance(write, Insert) and write.origin is origin and id(write) in self.store.applied
            for write in self.store.kept
        )
        match answer:
            case Submitted():
                assert row is not None, "acknowledged, and not stored"
                assert row.submission.uid == answer.uid
                assert answer.created == is_applied
                if not answer.created:
                    assert origin.submission is not None
                    assert origin.submission.fingerprint == row.submission.fingerprint
            case Cancelled():
                assert row is not None
                self._cancelled(origin.key, row, answer)
            case errors.TaskExists():
                assert row is not None
                assert origin.submission is not None
                assert row.submission.fingerprint != origin.submission.fingerprint
            case errors.TaskNotFound():
                assert row is None
            case errors.NoLeader() | errors.StoreFailed():
                assert not is_applied, "said to be surely not applied"
            case errors.OutcomeUncertain():
                pass
            case _:
                raise AssertionError(f"not expected: {answer}")

    def _cancelled(self, key: TaskKey, row: Row, answer: Cancelled) -> None:
        progress = row.progress
        latest = progress.attempt
        match answer.result:
            case CancelResult.PREVENTED:
                assert progress.state is TaskState.CANCELLED
                if latest is not None and latest.outcome is AttemptOutcome.RETURNED:
                    self.prevented.add((key, latest.number))
                    assert key in self.liars or (key, latest.number) not in self.started, "PREVENTED, but it ran"
            case CancelResult.REQUESTED:
                assert progress.cancel_requested
            case CancelResult.ALREADY_FINISHED:
                assert progress.state in TERMINAL
                assert progress.state is answer.state

    def judged(self, token: bytes, verdict: Verdict) -> None:
        """Hold a verdict against what is stored."""
        attempt = self.store.find(token)
        if verdict is Verdict.RECORDED:
            assert attempt is not None
            assert attempt.outcome is not None
            assert attempt.outcome_digest in self.outcomes[token], "recorded, but not stored"
        elif verdict is Verdict.LEASE_LOST:
            assert attempt is not None
            assert attempt.outcome is not None
        elif attempt is not None:
            keys = [key for key, row in self.store.rows.items() if attempt in row.attempts]
            assert self.liars.intersection(keys), "said to be unknown"

    def lost(self, token: bytes) -> None:
        """Hold what is said of a lease against what is stored."""
        attempt = self.store.find(token)
        assert attempt is None or attempt.outcome is not None, "said to be lost while it is current"

    # Workers.

    def add_worker(self) -> Worker:
        number = next(self._incarnations)
        worker = Worker(f"worker {number}", f"incarnation {number}")
        self.workers.append(worker)
        return worker

    def open(self, worker: Worker, node: Node) -> Stream:
        return worker.open(node, next(self._stream_ids), self.elapsed)

    def start(self, worker: Worker, held: Held) -> None:
        """Let a handler begin; the attempt must be current in the store."""
        assert not held.has_started
        held.has_started = True
        if held.key not in self.liars:
            attempt = self.store.find(held.token)
            assert attempt is not None, "started what was never granted"
            assert attempt.outcome is None, f"started under a lease that is over: {attempt}"
            assert (held.key, held.attempt) not in self.prevented
        self.started.add((held.key, held.attempt))

    def conclude(self, worker: Worker, held: Held, kind: OutcomeKind, digest: bytes) -> None:
        worker.conclude(held, kind, digest)

    def send_outcome(self, worker: Worker, held: Held, stream: Stream, retry_after: Micros | None = None) -> None:
        assert held.outcome is not None
        self.outcomes[held.token].add(held.outcome[1])
        worker.send_outcome(held, stream, self.elapsed, retry_after)

    def crash(self, worker: Worker) -> None:
        """Let a worker vanish with all that it knows; its streams stay open for a while."""
        self.workers.remove(worker)
        for stream in worker.streams.values():
            stream.is_usable = False

    def lie(self, worker: Worker, held: Held, lie: int) -> None:
        """Let a worker say or do what it must not."""
        stream = next((stream for stream in worker.streams.values() if stream.is_usable), None)
        self.liars.add(held.key)
        match lie:
            case 0:
                if not held.has_started:
                    self.start(worker, held)
            case 1:
                self.conclude(worker, held, OutcomeKind.RETURNED, b"returned")
            case 2:
                if stream is not None:
                    key = TaskKey(held.key.namespace, "a" if held.key.task_id != "a" else "b")
                    end = events.End(key, held.token, stream.holder, OutcomeKind.SUCCEEDED, b"wrong key")
                    stream.say(Up("outcome", held.token, key, end), self.elapsed)
                    stream.say(Up("started", held.token, key), self.elapsed)
            case _:
                del worker.held[held.token]

    def is_at_rest(self, key: TaskKey) -> bool:
        """Tell whether nothing of a task is under way, as after its retention."""
        requests = [read.request for node in self.nodes for read in node.reads]
        return (
            all(origin.answers for origin in self.origins if origin.key == key)
            and not any(key in shard.lines.busy for node in self.nodes for shard in node.shards.values())
            and not any(isinstance(request, events.End) and request.key == key for request in requests)
            and not any(node.inbox for node in self.nodes)
            and not any(held.key == key for worker in self.workers for held in worker.held.values())
        )

    def forget(self, key: TaskKey) -> None:
        """Let a task's retention be over."""
        self.store.purge(key)
        self.started = {entry for entry in self.started if entry[0] != key}
        self.prevented = {entry for entry in self.prevented if entry[0] != key}

    def streams(self) -> list[Stream]:
        return [stream for worker in self.workers for stream in worker.streams.values() if stream.is_usable]

    # Time.

    def advance(self, duration: Micros) -> None:
        """Let time pass while everybody runs."""
        while duration > 0:
            step = min(duration, _STEP)
            duration -= step
            self.elapsed += step
            for node in self.nodes:
                node.advance_horizon(self.now())
                node.turn(self.now())

    def freeze(self, duration: Micros) -> None:
        """Let time pass while nobody runs."""
        self.elapsed += duration

    # What must hold.

    def check(self) -> None:
        """Check all that holds between steps."""
        for node in self.nodes:
            for shard in node.shards.values():
                self._check_bounds(shard)
                keys = Counter(write.task.key for write in node.writes_under_way(shard))
                assert all(count == 1 for count in keys.values()), "two writes of a task are under way"
                assert keys.keys() <= shard.lines.busy.keys()
                if self.store.terms[shard.fence.shard] == shard.fence:
                    self._check_memory(node, shard)
            for stream in node.streams.values():
                self._check_credit(node, stream)

    def _check_bounds(self, shard: Shard) -> None:
        near = shard.near
        tasks = set(near.tasks.values())
        in_heads = [task for head in near.heads.values() for task in head.tasks]
        assert len(in_heads) == len(tasks)
        assert set(in_heads) == tasks
        for lane, head in near.heads.items():
            assert len(head.tasks) <= 2 * HEAD
            assert head.tasks or head.cursor is not None, "an empty head stays"
            assert all(task.lane == lane for task in head.tasks)
            assert head.cursor is None or all(due_key(task) <= head.cursor for task in head.tasks)
        assert {lease.task.key: lease for lease in shard.leases.by_token.values()} == shard.leases.by_task
        assert not near.tasks.keys() & shard.leases.by_task.keys()

    def _check_memory(self, node: Node, shard: Shard) -> None:
        """Hold memory against the store: nothing is lost, nothing is made up."""
        loads = [read for read in node.reads if read.shard is shard]
        arriving = [event for other, event in node.inbox if other is shard]
        if any(isinstance(event, events.HeldLoaded | events.BucketsLoaded) for event in arriving):
            return
        for key, row in self.store.rows.items():
            if row.submission.shard != shard.fence.shard or key in shard.lines.busy:
                continue
            progress = row.progress
            if progress.state in HELD:
                assert key in shard.leases.by_task, "a lease is not in memory"
                assert shard.leases.by_task[key].task.progress == progress
                continue
            assert key not in shard.leases.by_task, "a lease is in memory that is over"
            task = shard.near.tasks.get(key)
            if task is not None and task.progress != progress:
                assert task.progress.revision < progress.revision, "memory is ahead of the store"
            if progress.state in WAITING and task is None:
                assert self._is_beyond(shard, row.task(), loads), f"{key} is lost"

    def _is_beyond(self, shard: Shard, task: Any, loads: list[Read]) -> bool:
        """Tell whether a waiting task need not be in memory yet."""
        key = due_key(task)
        head = shard.near.heads.get(task.lane)
        if key.due_time >= shard.near.horizon or (head is not None and head.cursor is not None and key > head.cursor):
            return True
        for read in loads:
            request = read.request
            if isinstance(request, BucketLoad) and request.due_from <= key.due_time < request.due_before:
                return True
        return False

    def _check_credit(self, node: Node, stream: Stream) -> None:
        holder = stream.holder
        known = node.matcher._streams[holder.stream_id].credit
        under_way = node.grants_under_way(holder)
        assert known + under_way + stream.credit_assigned == stream.credit_given - stream.credit_withdrawn

    # The end.

    def settle(self) -> None:
        """Stop all faults, and let everything come to its end: every task terminal, every origin answered."""
        for commit in [commit for node in self.nodes for commit in node.lost_commits]:
            commit.is_sent = True
        worker = self.add_worker()
        streams = [self.open(worker, node) for node in self.nodes]
        # Longer than any attempt may take: a worker that did not tell the truth may have forgotten one.
        for _ in range(900):
            for stream in streams:
                stream.say(Up("credit", credit=4), self.elapsed)
            self._send_again()
            self._run_all()
            if self._is_settled():
                break
            self.advance(bounds.SECOND)
        rows = {key: row.progress for key, row in self.store.rows.items()}
        unfinished = {key: progress for key, progress in rows.items() if progress.state not in TERMINAL}
        assert not unfinished, f"not brought to an end: {unfinished}"
        self.advance(2 * bounds.MAX_CANCEL_WAIT)
        self._run_all()
        self.check()
        unanswered = [origin.key for origin in self.origins if not origin.answers]
        assert not unanswered, f"not answered: {unanswered}"

    def _send_again(self) -> None:
        """Send every outcome that is not answered again, wherever it may be recorded."""
        for worker in self.workers:
            for held in [held for held in worker.held.values() if held.outcome is not None]:
                for stream in worker.streams.values():
                    if stream.is_usable:
                        self.send_outcome(worker, held, stream)

    def _is_settled(self) -> bool:
        return all(row.progress.state in TERMINAL for row in self.store.rows.values())

    def _run_all(self) -> None:
        """Let everybody do what they can at this moment."""
        for _ in range(200):
            did = self._run_once()
            if not did:
                return
        raise AssertionError("it does not come to rest")

    def _run_once(self) -> bool:
        did = False
        for node in self.nodes:
            node.check()
            for number in list(node.ended):
                did = True
                if self.store.terms[number].epoch in {epoch_of(s) for n in self.nodes for s in n.shards.values()}:
                    node.ended.remove(number)
                self.take(node, number)
        self.finish_takings()
        for node in self.nodes:
            did |= self.run_node(node)
            self.check()
        for worker in self.workers:
            did |= self._run_worker(worker)
        return did

    def run_node(self, node: Node) -> bool:
        did = bool(node.inbox)
        for stream in [stream for worker in self.workers for stream in worker.streams.values() if stream.node is node]:
            while stream.up and stream.is_usable:
                node.hear(stream, self.now())
                did = True
        for stream in list(node.streams.values()):
            if not stream.is_usable:
                node.close(stream, is_unsent_known=False)
        node.turn(self.now())
        for shard in list(node.shards.values()):
            node.send(shard)
        for commit in list(node.commits.values()):
            node.apply(commit, self.now())
            node.answer(commit)
            did = True
        snapshot = self.store.snapshot()
        for read in list(node.reads):
            if read.event is None:
                node.look(read, snapshot, self.now().earliest)
            node.bring(read)
            did = True
        node.check()
        return did

    def _run_worker(self, worker: Worker) -> bool:
        did = False
        for stream in worker.streams.values():
            while stream.down and stream.is_usable:
                worker.receive(stream, self.elapsed)
                did = True
            if stream.is_usable and self.elapsed - stream.sent_at[-1] >= bounds.DEFAULT_HEARTBEAT:
                worker.beat(stream, self.elapsed)
                stream.node.beat()
                did = True
        for held in list(worker.held.values()):
            if held.outcome is None:
                if not held.has_started and worker.may_start(held, self.elapsed):
                    self.start(worker, held)
                kind = OutcomeKind.SUCCEEDED if held.has_started else OutcomeKind.RETURNED
                self.conclude(worker, held, kind, kind.encode())
            for stream in worker.streams.values():
                if stream.is_usable and stream.holder.stream_id not in held.sent_on:
                    self.send_outcome(worker, held, stream)
                    did = True
        return did
