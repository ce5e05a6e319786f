"""Workers and their streams, as far as the core can tell them from real ones. No time passes by itself here.

A stream is two lines of messages, and what the server knows of it. An honest worker keeps the rules of the protocol; a
worker that lies (`liars` of the world) starts what it should not, and says what is not so.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.events import End, OutcomeKind
from duecourse.server.core.lease import Holder
from duecourse.server.core.task import Epoch, ShardId, TaskKey

LEASE: Micros = bounds.MIN_LEASE


@dataclass(slots=True)
class Assigned:
    """Down: a lease. Up: nothing like it."""

    number: int
    last_read: int
    token: bytes
    key: TaskKey
    shard: ShardId
    epoch: Epoch
    attempt: int
    time_left: Micros
    start_within: Micros | None


@dataclass(slots=True)
class Beat:
    """Down: the number of the message that had been read when the terms were last confirmed."""

    last_read: int


@dataclass(slots=True)
class Wanted:
    """Down: asks for what is held; with terms, it tells that they have begun. Request 0: welcome."""

    request: int
    terms: dict[ShardId, Epoch]


@dataclass(slots=True)
class Told:
    """Down: a token's verdict, stop or loss."""

    token: bytes
    what: str


Down = Assigned | Beat | Wanted | Told


@dataclass(slots=True)
class Up:
    """A worker's message."""

    what: str
    token: bytes = b""
    key: TaskKey | None = None
    end: End | None = None
    answers: int = 0
    last_assignments: int = 0
    held: dict[bytes, tuple[TaskKey, bool]] = field(default_factory=dict)
    credit: int = 0


@dataclass(slots=True, eq=False)
class Stream:
    """One stream of a worker to a node."""

    holder: Holder
    worker: "Worker"
    node: Any
    down: deque[Down] = field(default_factory=deque)
    up: deque[Up] = field(default_factory=deque)
    sent_at: list[Micros] = field(default_factory=lambda: [0])
    """By the number of a worker's message: when it was sent."""
    renewals: list[int] = field(default_factory=list)
    """The numbers of those messages that renew: heartbeats and lists of what is held."""
    # What the worker knows.
    received: int = 0
    is_usable: bool = True
    # What the server knows.
    is_joined: bool = False
    last_read: int = 0
    handled: int = 0
    """The number of the last message whose effects are on their way."""
    disagreed_at: int | None = None
    """The number of the heartbeat since which it says that it holds something else."""
    assigned: int = 0
    requested: int = 0
    announced: dict[ShardId, int] = field(default_factory=dict)
    ledger: dict[bytes, int] = field(default_factory=dict)
    concluded: set[bytes] = field(default_factory=set)
    confirmed: int = 0
    credit_given: int = 0
    credit_withdrawn: int = 0
    credit_assigned: int = 0

    def say(self, message: Up, now: Micros) -> None:
        """Send a worker's message."""
        self.up.append(message)
        if message.what in ("beat", "held"):
            self.renewals.append(len(self.sent_at))
        self.sent_at.append(now)


@dataclass(slots=True, eq=False)
class Held:
    """An attempt as its worker knows it."""

    token: bytes
    key: TaskKey
    shard: ShardId
    epoch: Epoch
    attempt: int
    since: dict[int, int]
    """By stream on which it came or was listed: the number of the message from which renewals count."""
    deadline: Micros
    start_by: Micros
    has_started: bool = False
    is_stop_asked: bool = False
    outcome: tuple[OutcomeKind, bytes] | None = None
    sent_on: set[int] = field(default_factory=set)
    """The streams on which the outcome was sent."""


@dataclass(slots=True, eq=False)
class Worker:
    """One incarnation of a worker."""

    name: str
    incarnation: str
    streams: dict[str, Stream] = field(default_factory=dict)
    """By node."""
    held: dict[bytes, Held] = field(default_factory=dict)
    floors: dict[ShardId, tuple[Epoch, Stream]] = field(default_factory=dict)
    """By shard: the highest epoch that was heard of, and the stream to its leader; lower ones are refused."""

    def open(self, node: Any, stream_id: int, now: Micros) -> Stream:
        """Give up the stream to a node, if there is one, and open another."""
        older = self.streams.get(node.name)
        if older is not None:
            older.is_usable = False
            older.down.clear()
        holder = Holder(stream_id, "default", self.name, self.incarnation, now)
        stream = self.streams[node.name] = Stream(holder, self, node)
        stream.say(Up("hello", held=self._listed()), now)
        return stream

    def receive(self, stream: Stream, now: Micros) -> None:
        """Take in the next message of a node."""
        self._return_late(now)
        message = stream.down.popleft()
        match message:
            case Assigned():
                self._assigned(stream, message, now)
            case Beat():
                renewal = max((number for number in stream.renewals if number <= message.last_read), default=0)
                for held in self.held.values():
                    since = held.since.get(stream.holder.stream_id)
                    leads = held.shard in self.floors and self.floors[held.shard][1] is stream
                    if leads and since is not None and renewal >= since:
                        held.deadline = max(held.deadline, stream.sent_at[renewal] + LEASE)
            case Wanted():
                for shard, epoch in message.terms.items():
                    self._learn(shard, epoch, stream)
                self.list_held(stream, message.request, now)
            case Told():
                self._told(stream, message, now)

    def _told(self, stream: Stream, message: Told, now: Micros) -> None:
        held = self.held.get(message.token)
        if held is None:
            return
        if message.what in ("recorded", "refused", "lost"):
            del self.held[message.token]
            return
        held.is_stop_asked = True
        if held.has_started and held.outcome is None:
            self.say_started(held, stream, now)

    def may_start(self, held: Held, now: Micros) -> bool:
        """Tell whether the rules let a handler begin."""
        return (
            not held.has_started
            and held.outcome is None
            and not held.is_stop_asked
            and now < held.deadline - bounds.LATE_ASSIGNMENT_MARGIN
            and now < held.start_by
        )

    def say_started(self, held: Held, stream: Stream, now: Micros) -> None:
        stream.say(Up("started", held.token, held.key), now)

    def conclude(self, held: Held, kind: OutcomeKind, digest: bytes) -> None:
        """End an attempt: its outcome is kept until it is answered."""
        held.outcome = (kind, digest)

    def send_outcome(self, held: Held, stream: Stream, now: Micros, retry_after: Micros | None = None) -> None:
        """Send an outcome, again perhaps."""
        assert held.outcome is not None
        kind, digest = held.outcome
        held.sent_on.add(stream.holder.stream_id)
        end = End(held.key, held.token, stream.holder, kind, digest, retry_after=retry_after)
        stream.say(Up("outcome", held.token, held.key, end), now)

    def beat(self, stream: Stream, now: Micros) -> None:
        """Send a heartbeat: what is held on this stream, and no outcome of it was sent here."""
        self._return_late(now)
        stream_id = stream.holder.stream_id
        tokens = {
            held.token: (held.key, held.has_started)
            for held in self.held.values()
            if stream_id in held.since and stream_id not in held.sent_on
        }
        stream.say(Up("beat", last_assignments=stream.received, held=tokens), now)

    def list_held(self, stream: Stream, answers: int, now: Micros) -> None:
        """Say what is held, on a stream: from now on it is held there, too."""
        self._return_late(now)
        for held in self.held.values():
            held.since.setdefault(stream.holder.stream_id, len(stream.sent_at))
        stream.say(Up("held", answers=answers, last_assignments=stream.received, held=self._listed()), now)

    def _return_late(self, now: Micros) -> None:
        """Give up what may not start any more, before anything is said or heard that renews it."""
        for held in self.held.values():
            if not held.has_started and held.outcome is None and not self.may_start(held, now):
                held.outcome = (OutcomeKind.RETURNED, b"returned")

    def _listed(self) -> dict[bytes, tuple[TaskKey, bool]]:
        return {held.token: (held.key, held.has_started) for held in self.held.values()}

    def _assigned(self, stream: Stream, message: Assigned, now: Micros) -> None:
        stream.received = message.number
        # Once its time and the grace are over, counted from before the grant, the node may have ended it.
        start_by = stream.sent_at[message.last_read] + message.time_left + bounds.STOP_GRACE
        if message.start_within is not None:
            start_by = min(start_by, now + message.start_within)
        held = Held(
            message.token,
            message.key,
            message.shard,
            message.epoch,
            message.attempt,
            {stream.holder.stream_id: message.last_read},
            stream.sent_at[message.last_read] + LEASE,
            start_by,
        )
        self.held[message.token] = held
        if not self._learn(message.shard, message.epoch, stream):
            held.outcome = (OutcomeKind.RETURNED, b"returned")

    def _learn(self, shard: ShardId, epoch: Epoch, stream: Stream) -> bool:
        """Remember who leads a shard; False if a higher epoch is known."""
        highest = self.floors.get(shard)
        if highest is None or epoch > highest[0] or (epoch == highest[0] and not highest[1].is_usable):
            self.floors[shard] = (epoch, stream)
        return epoch >= self.floors[shard][0]
