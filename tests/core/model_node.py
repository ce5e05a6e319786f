"""A node without time of its own: its shards and matcher, what it has under way, and the server's side of its streams.

`turn` does what the node's loop does. Commits and reads are objects that wait until somebody lets them go on; their
answers come when somebody says so.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from core.model_store import ModelStore, Snapshot
from core.model_worker import LEASE, Assigned, Beat, Down, Stream, Told, Up, Wanted

from duecourse.model import bounds
from duecourse.model.instants import Micros, Now
from duecourse.server.core import callers, errors, events
from duecourse.server.core.effects import Answer, Effects, LaneLoad, Verdict
from duecourse.server.core.lease import Holder
from duecourse.server.core.matcher import Matcher
from duecourse.server.core.shard import Shard, ShardOptions
from duecourse.server.core.task import Epoch, ShardId, TaskKey
from duecourse.server.core.writes import Update, Write

HEAD = 2
HORIZON = 2 * bounds.BUCKET
OPTIONS = ShardOptions("node", LEASE, bounds.DEFAULT_HEARTBEAT, HEAD)


@dataclass(slots=True, eq=False)
class Commit:
    """Writes on their way: applied or not, answered or not."""

    shard: Shard
    writes: list[Write]
    is_sent: bool = False
    answer: events.Committed | None = None


@dataclass(slots=True)
class BucketLoad:
    """Read the waiting tasks of a range."""

    shard: ShardId
    due_from: Micros
    due_before: Micros


Request = TaskKey | events.End | LaneLoad | BucketLoad | None


@dataclass(slots=True, eq=False)
class Read:
    """A read on its way; None asks for the oldest due tasks."""

    shard: Shard
    request: Request
    event: events.Event | None = None
    """What it found, once it has looked."""


class Watcher(Protocol):
    """Who is told what a node says."""

    def answered(self, origin: Any, answer: Answer) -> None: ...

    def judged(self, token: bytes, verdict: Verdict) -> None: ...

    def lost(self, token: bytes) -> None: ...


@dataclass(eq=False)
class Node:
    """See the module's docstring."""

    name: str
    store: ModelStore
    watcher: Watcher
    tokens: Iterator[int]
    shards: dict[ShardId, Shard] = field(default_factory=dict)
    matcher: Matcher = field(default_factory=Matcher)
    streams: dict[int, Stream] = field(default_factory=dict)
    inbox: list[tuple[Shard, events.Event]] = field(default_factory=list)
    pending: defaultdict[Shard, list[Write]] = field(default_factory=lambda: defaultdict(list))
    commits: dict[Shard, Commit] = field(default_factory=dict)
    lost_commits: list[Commit] = field(default_factory=list)
    """Their answer was given up; they may still be applied."""
    reads: list[Read] = field(default_factory=list)
    ended: list[ShardId] = field(default_factory=list)
    """Shards whose term ended and that nobody took since."""
    next_tick: Micros = 0
    is_granting: bool = True

    # The loop.

    def post(self, number: ShardId, event: events.Event) -> None:
        shard = self.shards.get(number)
        if shard is None:
            self._turn_away(number, event)
        else:
            self.inbox.append((shard, event))

    def turn(self, now: Now) -> None:
        out = Effects()
        inbox, self.inbox = self.inbox, []
        for shard, event in inbox:
            if self.shards.get(shard.fence.shard) is shard:
                shard.handle(event, now, out)
            else:
                self._turn_away(shard.fence.shard, event)
        is_due = now.elapsed >= self.next_tick
        if is_due:
            self.next_tick = now.elapsed + bounds.LONGEST_SLEEP // 2
        for shard in self.shards.values():
            next_due = shard.near.next_due()
            next_wait = shard.cancellations.next_wait()
            if (
                is_due
                or (next_due is not None and next_due <= now.earliest)
                or (next_wait is not None and next_wait <= now.elapsed)
            ):
                shard.handle(events.Tick(), now, out)
        self.matcher.add(out.ready)
        self._give_back(out)
        if self.is_granting:
            for task, holder in list(self.matcher.match(now.earliest, 64)):
                token = next(self.tokens).to_bytes(16, "big")
                grant = events.Grant(task, holder, token, LEASE, self.streams[holder.stream_id].last_read)
                self.shards[task.shard].handle(grant, now, out)
        self._give_back(out)
        for shard in self.shards.values():
            shard.collect_loads(out)
        self._carry_out(out)
        for stream in self.streams.values():
            stream.handled = stream.last_read

    def _carry_out(self, out: Effects) -> None:
        for write in out.writes:
            self.pending[self.shards[write.task.shard]].append(write)
        for origin, answer in out.answers:
            self.watcher.answered(origin, answer)
        for assignment in out.assignments:
            lease = assignment.lease
            stream = None if lease.holder is None else self.streams.get(lease.holder.stream_id)
            if stream is None:
                self.post(lease.task.shard, events.Unsent(lease))
                continue
            attempt = lease.task.progress.attempt
            assert attempt is not None
            assert assignment.delivery.payload == lease.task.task_id.encode(), "the payload is another task's"
            stream.assigned += 1
            stream.credit_assigned += 1
            lease.assignment_number = stream.assigned
            stream.ledger[lease.token] = stream.assigned
            stream.down.append(
                Assigned(
                    stream.assigned,
                    assignment.last_read,
                    lease.token,
                    lease.task.key,
                    lease.task.shard,
                    attempt.epoch,
                    attempt.number,
                    assignment.time_left,
                    assignment.start_within,
                )
            )
        for holder, token, verdict in out.verdicts:
            self.watcher.judged(token, verdict)
            self._tell(holder, Told(token, "recorded" if verdict is Verdict.RECORDED else "refused"))
        for holder, token, reason in out.stops:
            self._tell(holder, Told(token, reason))
        for holder, token in out.lost:
            self.watcher.lost(token)
            self._tell(holder, Told(token, "lost"))
        requests: list[tuple[ShardId, Request]] = [*out.task_reads, *out.attempt_reads]
        requests.extend((load.shard, load) for load in out.lane_loads)
        for number, request in requests:
            self.reads.append(Read(self.shards[number], request))

    def _give_back(self, out: Effects) -> None:
        for lane, holder in out.unmatched:
            self.matcher.unmatched(lane, holder)
        out.unmatched = []

    def _turn_away(self, number: ShardId, event: events.Event) -> None:
        out = Effects()
        callers.turn_away(event, errors.NoLeader(number), out)
        for origin, answer in out.answers:
            self.watcher.answered(origin, answer)
        self._give_back(out)

    # Commits.

    def send(self, shard: Shard) -> None:
        """Begin the next transaction of a shard."""
        if shard not in self.commits and self.pending.get(shard):
            self.commits[shard] = Commit(shard, self.pending.pop(shard))

    def apply(self, commit: Commit, now: Now) -> None:
        """Let the store carry a transaction out."""
        if not commit.is_sent:
            commit.is_sent = True
            commit.answer = self.store.commit(commit.shard.fence, commit.writes, now.earliest)

    def answer(self, commit: Commit) -> None:
        """Bring a transaction's answer."""
        assert commit.is_sent
        del self.commits[commit.shard]
        if commit.answer is None:
            self.end(commit.shard, unsent=commit.writes)
        else:
            self.inbox.append((commit.shard, commit.answer))

    def refuse(self, commit: Commit, culprit: int) -> None:
        """Let the store refuse one write for its data; the others are tried again."""
        assert not commit.is_sent
        del self.commits[commit.shard]
        write = commit.writes.pop(culprit % len(commit.writes))
        self.pending[commit.shard] = commit.writes + self.pending.pop(commit.shard, [])
        self.inbox.append((commit.shard, events.WriteRefused(write, "the data")))

    def lose(self, commit: Commit) -> None:
        """Lose a transaction's answer."""
        del self.commits[commit.shard]
        self.lost_commits.append(commit)
        self.end(commit.shard, uncertain=commit.writes)

    # Terms.

    def end(self, shard: Shard, uncertain: Sequence[Write] = (), unsent: Sequence[Write] = ()) -> None:
        """End a term, as `Loop.end` does; its transaction goes on by itself."""
        number = shard.fence.shard
        out = Effects()
        commit = self.commits.pop(shard, None)
        if commit is not None:
            self.lost_commits.append(commit)
            uncertain = commit.writes
        for write in uncertain:
            callers.give_up(write, errors.OutcomeUncertain(), out)
        for write in [*unsent, *self.pending.pop(shard, [])]:
            callers.give_up(write, errors.NoLeader(number), out)
        if self.shards.get(number) is shard:
            del self.shards[number]
            shard.close(out)
            self.ended.append(number)
        for origin, answer in out.answers:
            self.watcher.answered(origin, answer)
        self._give_back(out)

    def begin(self, shard: Shard, held: events.HeldLoaded, buckets: events.BucketsLoaded) -> None:
        """Take a shard in whose term has begun, and tell the workers."""
        number = shard.fence.shard
        self.shards[number] = shard
        for stream in self.streams.values():
            stream.requested += 1
            stream.announced[number] = stream.requested
            stream.down.append(Wanted(stream.requested, {number: shard.fence.epoch}))
        self.inbox.append((shard, held))
        self.inbox.append((shard, buckets))

    def check(self) -> None:
        """Hold the terms against the store."""
        stale = [shard for shard in self.shards.values() if self.store.terms[shard.fence.shard] != shard.fence]
        for shard in stale:
            self.end(shard)
        if not stale:
            for stream in self.streams.values():
                agreed = stream.handled if stream.disagreed_at is None else stream.disagreed_at - 1
                stream.confirmed = min(stream.handled, agreed)

    def beat(self) -> None:
        """Send heartbeats."""
        for stream in self.streams.values():
            stream.down.append(Beat(stream.confirmed))

    # Reads.

    def look(self, read: Read, snapshot: Snapshot, earliest: Micros) -> None:
        """Let a read see the store as it is now."""
        number = read.shard.fence.shard
        request = read.request
        match request:
            case TaskKey():
                read.event = events.TasksRead([(request, snapshot.task(request))])
            case events.End():
                read.event = events.AttemptRead(request, snapshot.attempt(request.key, request.lease_token))
            case LaneLoad():
                tasks, is_end = snapshot.lane(number, request.lane, request.after, request.due_before, request.limit)
                read.event = events.LaneLoaded(request.lane, request.version, tasks, is_end)
            case BucketLoad():
                tasks, cut = snapshot.buckets(number, request.due_from, request.due_before, HEAD)
                read.event = events.BucketsLoaded(tasks, cut, request.due_from)
            case None:
                read.event = events.Audited(snapshot.oldest_due(number, earliest, 4))

    def bring(self, read: Read) -> None:
        """Bring what a read found."""
        assert read.event is not None
        self.reads.remove(read)
        if self.shards.get(read.shard.fence.shard) is read.shard:
            self.inbox.append((read.shard, read.event))

    def advance_horizon(self, now: Now) -> None:
        """Move the horizon, and read what that uncovers."""
        target = (now.latest + HORIZON) // bounds.BUCKET * bounds.BUCKET + bounds.BUCKET
        for number, shard in self.shards.items():
            if shard.near.horizon < target:
                self.reads.append(Read(shard, BucketLoad(number, shard.near.advance(target), target)))

    # Streams.

    def hear(self, stream: Stream, now: Now) -> None:
        """Take in the next message of a worker."""
        message = stream.up.popleft()
        holder = stream.holder
        if not holder.is_open:
            return
        stream.last_read += 1
        match message.what:
            case "hello":
                self._join(stream, message, now)
            case "credit":
                stream.credit_given += max(0, message.credit)
                stream.credit_withdrawn += self.matcher.add_credit(holder, message.credit, {})
            case "started":
                assert message.key is not None
                self._post(message.key, events.Start(message.key, message.token, now.latest))
            case "outcome":
                assert message.end is not None
                stream.ledger.pop(message.token, None)
                if not self._post(message.end.key, message.end):
                    return
                stream.concluded.add(message.token)
            case "beat":
                expected = {token for token, number in stream.ledger.items() if number <= message.last_assignments}
                if expected == set(message.held):
                    holder.renewed_at = now.elapsed
                    stream.disagreed_at = None
                else:
                    stream.disagreed_at = stream.disagreed_at or stream.last_read
                    stream.requested += 1
                    stream.down.append(Wanted(stream.requested, {}))
            case "held":
                self._held(stream, message, now)

    def close(self, stream: Stream, *, is_unsent_known: bool) -> None:
        """End a stream; what is certain not to have left comes back."""
        if not stream.holder.is_open:
            return
        stream.holder.is_open = False
        del self.streams[stream.holder.stream_id]
        self.matcher.unsubscribe(stream.holder)
        if is_unsent_known:
            unsent = {message.token for message in stream.down if isinstance(message, Assigned)}
            stream.down.clear()
            for shard in list(self.shards.values()):
                for token in unsent & shard.leases.by_token.keys():
                    self.inbox.append((shard, events.Unsent(shard.leases.by_token[token])))

    def _join(self, stream: Stream, message: Up, now: Now) -> None:
        holder = stream.holder
        for other in list(self.streams.values()):
            if other.worker is stream.worker:
                self.close(other, is_unsent_known=False)
        holder.renewed_at = now.elapsed
        stream.is_joined = True
        self.streams[holder.stream_id] = stream
        self.matcher.subscribe(holder, frozenset(("q", "r")), frozenset(("t",)))
        terms = {number: shard.fence.epoch for number, shard in self.shards.items()}
        stream.down.append(Wanted(0, terms))
        stream.ledger.update(dict.fromkeys(message.held, 0))
        for shard in self.shards.values():
            leases: dict[bytes, tuple[TaskKey | None, bool]] = dict.fromkeys(message.held, (None, False))
            self.inbox.append((shard, events.Hold(holder, leases, 0, is_complete=False)))

    def _held(self, stream: Stream, message: Up, now: Now) -> None:
        newer = {token: number for token, number in stream.ledger.items() if number > message.last_assignments}
        stream.ledger = newer | {token: stream.ledger.get(token, 0) for token in message.held.keys() - stream.concluded}
        stream.holder.renewed_at = now.elapsed
        stream.disagreed_at = None
        for number, shard in self.shards.items():
            leases: dict[bytes, tuple[TaskKey | None, bool]] = {
                token: (key, has_started)
                for token, (key, has_started) in message.held.items()
                if shard_of(key) == number
            }
            is_complete = stream.announced.get(number, 0) <= message.answers
            if is_complete or leases:
                hold = events.Hold(stream.holder, leases, message.last_assignments, is_complete)
                self.inbox.append((shard, hold))

    def _post(self, key: TaskKey, event: events.Event) -> bool:
        shard = self.shards.get(shard_of(key))
        if shard is None:
            return False
        self.inbox.append((shard, event))
        return True

    def _tell(self, holder: Holder, message: Down) -> None:
        stream = self.streams.get(holder.stream_id)
        if stream is not None:
            if isinstance(message, Told):
                if message.what == "lost":
                    stream.ledger.pop(message.token, None)
                stream.concluded.discard(message.token)
            stream.down.append(message)

    def writes_under_way(self, shard: Shard) -> list[Write]:
        """Return what a shard has asked to write and has no answer to."""
        commit = self.commits.get(shard)
        arriving = [
            event.writes if isinstance(event, events.Committed) else [event.write]
            for other, event in self.inbox
            if other is shard and isinstance(event, events.Committed | events.WriteRefused)
        ]
        return [
            *self.pending.get(shard, []),
            *([] if commit is None else commit.writes),
            *itertools.chain.from_iterable(arriving),
        ]

    def grants_under_way(self, holder: Holder) -> int:
        """Count the grants to a stream that are neither assigned nor given up."""
        shards = {*self.shards.values(), *(shard for shard, _ in self.inbox)}
        writes = itertools.chain.from_iterable(self.writes_under_way(shard) for shard in shards)
        causes = [write.cause for write in writes if isinstance(write, Update)]
        lines = [event for shard in self.shards.values() for line in shard.lines.busy.values() for event in line or ()]
        return sum(isinstance(event, events.Grant) and event.holder is holder for event in [*causes, *lines])


def shard_of(key: TaskKey) -> ShardId:
    """Place a task: by the first letter of its id."""
    return ShardId(0 if key.task_id < "m" else 1)


def epoch_of(shard: Shard) -> Epoch:
    return shard.fence.epoch
