"""The worker's side of the protocol: what nodes say goes in, what to do and what to say comes out. No I/O, no clock.

One `Protocol` serves all of a worker's streams. Its methods take the elapsed time and return `Action`s for the runner;
`outgoing` gives a stream's messages. It promises:

- *Credit is conserved*: what is out on all streams, waiting, running and free is always `slots + prefetch`. A handler
  that runs on after its lease was lost keeps its slot.
- *A late assignment is not started*: a lease's time counts from when the message was sent that the assignment named,
  or from the last heartbeat or LeasesHeld that covered the lease and that the leader's stream has confirmed since. Less
  than LATE_ASSIGNMENT_MARGIN before its end an unstarted attempt is Returned; one that was never renewed, and has less
  left than a renewal may take, waits for that unless it is to start within some time.
- *Lower epochs are refused*: such an assignment is Returned like a late one, to the shard's leader. Dropping it would
  be as safe, but only a leader that got LeasesHeld after its own term began would learn at once that nobody runs it.
- *An outcome is kept* and sent again on every new stream and for every new term of its shard, until it is recorded or
  refused. So that memory stays bounded, no credit is given while too many wait (`outcomes.MAX_UNRECORDED`).
"""

from collections.abc import Collection, Iterable
from typing import Final

from google.protobuf.duration_pb2 import Duration

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.v1 import worker_service_pb2 as pb
from duecourse.worker import credit, wire
from duecourse.worker.attempt import RETURNED, Attempt, Outcome, Phase, StopReason
from duecourse.worker.capacity import Capacity, Introduction
from duecourse.worker.errors import ProtocolViolated
from duecourse.worker.holdings import Action, Holdings
from duecourse.worker.node_stream import NodeStream, StreamPhase
from duecourse.worker.outcomes import Outcomes
from duecourse.worker.reach import Reach
from duecourse.worker.terms import Terms

PROTOCOL_VERSION: Final = 1
# A batch that weighs more is cut up, so that one long attempt does not keep the payloads of all the others.
SHARED_BATCH_BYTES: Final = 256 * 1024
REBALANCE_INTERVAL: Final = bounds.SECOND
_BETWEEN_LISTS: Final = bounds.SECOND
"""At least so long between lists that nobody asks for: about as long as it takes to confirm one."""
_TO_BE_CONFIRMED: Final = 2 * bounds.SECOND
"""What it takes at most, on a good connection, until a heartbeat that was sent is known to be confirmed."""
_NEVER_SENT: Final = -(1 << 62)


class Protocol:
    """The state of one incarnation of a worker."""

    def __init__(self, introduction: Introduction, capacity: Capacity) -> None:
        self.is_draining = False
        self.assigned_count = 0
        self.stale_count = 0
        self.unknown_event_count = 0
        self._introduction = introduction
        self._capacity = capacity
        self._limited = capacity.limited
        self._task_types = frozenset(introduction.task_types)
        self._streams: dict[str, NodeStream] = {}
        self._serial = 0
        self._rebalanced_at: Micros = 0
        self._terms = Terms()
        self.reach = Reach(self._streams)
        self.outcomes = Outcomes(self._terms, self._streams, self.reach)
        self.holdings = Holdings(capacity, self._terms, self.outcomes)

    @property
    def out(self) -> int:
        """The credit that is out on all streams."""
        return sum(stream.account.out for stream in self._streams.values())

    @property
    def free(self) -> int:
        """How much more could be taken, beyond what is out."""
        return self._capacity.total - self.holdings.waiting - len(self.holdings.running) - self.out

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or is unrecorded."""
        return not self.holdings.held and not self.holdings.running and not self.outcomes.unrecorded

    def is_silent(self, stream: NodeStream, now: Micros) -> bool:
        """Tell whether a stream is dead: nothing came for two intervals."""
        return now - stream.heard_at > bounds.SILENT_INTERVALS * stream.interval

    def opened(self, address: str, now: Micros) -> NodeStream:
        """Begin a stream to a node, discarding an older one."""
        if address in self._streams:
            self.closed(self._streams[address])
        self._serial += 1
        hello = self._hello(self.reach.number(address))
        stream = self._streams[address] = NodeStream(address, self._serial, hello, now)
        return stream

    def closed(self, stream: NodeStream) -> None:
        """Take in that a stream has ended; its credit is void, and outcomes without a verdict look for another one."""
        if self._streams.get(stream.address) is not stream:
            return
        self._keep_renewals(self.holdings.held.values())
        del self._streams[stream.address]
        stream.phase = StreamPhase.CLOSED
        stream.account.void()
        self._terms.closed(stream)
        self.reach.closed(stream)
        self.outcomes.closed(stream)
        self._give_credit()

    def received(self, stream: NodeStream, message: pb.StreamAssignmentsResponse, now: Micros) -> list[Action]:
        """Take in a node's message."""
        if self._streams.get(stream.address) is not stream:
            return []
        stream.heard_at = now
        event = message.WhichOneof("event")
        if (event == "welcome") == stream.is_serving:
            raise ProtocolViolated(f"{event} {'again' if stream.is_serving else 'before welcome'}")
        match event:
            case "assignments":
                self._assigned(stream, message.assignments, now)
            case "outcomes_recorded":
                self.outcomes.answered(stream, message.outcomes_recorded)
            case "heartbeat":
                stream.confirmed(message.heartbeat.last_read)
            case "term_started":
                self._term_started(stream, message.term_started)
            case "term_ended":
                self._term_ended(stream, message.term_ended)
            case "leases_wanted":
                stream.want_list(message.leases_wanted.request)
            case "cancel_requested":
                self._cancel_requested(stream, message.cancel_requested)
            case "lease_lost":
                self._lost(stream, message.lease_lost.lease_tokens)
            case "credit_returned":
                stream.account.returned(message.credit_returned.count)
            case "demand":
                stream.account.wants(message.demand.waiting, now)
            case "cluster_changed":
                stream.account.tells()
                self.reach.listed(stream, message.cluster_changed.nodes)
            case "draining":
                stream.account.close()
            case "welcome":
                self._welcome(stream, message.welcome, now)
            case _:
                self.unknown_event_count += 1
        return self._follow(now)

    def ended(self, endings: Iterable[tuple[Attempt, Outcome]], now: Micros) -> list[Action]:
        """Take in that handlers have ended."""
        self.holdings.ended(endings)
        return self._follow(now)

    def tick(self, now: Micros) -> list[Action]:
        """Do what only time asks for; to be called several times a second."""
        for attempt in self.holdings.watch(now):
            stream = self._terms.leader(attempt.shard) or self._streams.get(attempt.address)
            if stream is not None and stream.is_serving:
                stream.starts[attempt.token] = attempt
        for stream in self._streams.values():
            if stream.is_serving and now - stream.beat_at >= stream.interval:
                stream.is_beat_due = True
            if stream.is_list_due and now - stream.listed_at >= _BETWEEN_LISTS:
                stream.want_list(0)
        self.outcomes.tick(now)
        credit.forget_demand(self._accounts(), now)
        if now - self._rebalanced_at >= REBALANCE_INTERVAL:
            self._rebalanced_at = now
            credit.rebalance(self._accounts())
        return self._follow(now)

    def outgoing(self, stream: NodeStream, now: Micros) -> list[wire.Request]:
        """Make the messages that wait to be sent on a stream; they count as sent now."""
        held = [*self.holdings.held.values(), *self.outcomes.unrecorded.values()] if stream.is_list_wanted else ()
        return stream.outgoing(held, self.holdings.running, now)

    def drain(self) -> None:
        """Take no more: say Goodbye everywhere and return what has not started."""
        self.is_draining = True
        for stream in self._streams.values():
            stream.account.void()
            stream.is_goodbye_due = stream.is_serving
        self.holdings.give_back_waiting()

    def stop_running(self) -> list[Action]:
        """Ask all that still runs to stop, since the worker is about to go."""
        self.holdings.stop_running(StopReason.SHUTDOWN)
        return self.holdings.take()

    def _welcome(self, stream: NodeStream, welcome: pb.Welcome, now: Micros) -> None:
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise ProtocolViolated(f"protocol version {welcome.protocol_version}")
        older = self.reach.welcomed(stream, welcome.node_id)
        if older is not None:
            self.closed(older)
        stream.interval = _micros(welcome.heartbeat_interval) or bounds.DEFAULT_HEARTBEAT
        stream.phase = StreamPhase.SERVING
        stream.beat_at = now
        stream.account.is_open = not self.is_draining
        stream.is_goodbye_due = self.is_draining
        shards = self._told_to_lead(welcome.terms, stream)
        self._lost(stream, welcome.lost_lease_tokens)
        # Also that it holds nothing is worth a word: an assignment may have been lost with another stream.
        if self.assigned_count:
            stream.want_list(0)
        # The leader before this node may never have answered.
        self.outcomes.term_started(shards, stream)
        self.outcomes.welcomed()

    def _assigned(self, stream: NodeStream, batch: pb.Assignments, now: Micros) -> None:
        if batch.number != stream.last_assignments + 1:
            raise ProtocolViolated(f"assignments {batch.number} after {stream.last_assignments}")
        stream.last_assignments = batch.number
        sent_at = stream.sent_at(batch.last_read)
        counts_from = _NEVER_SENT if sent_at is None else sent_at
        items: Collection[pb.Assignment] = batch.assignments
        if len(items) > 1 and batch.ByteSize() > SHARED_BATCH_BYTES:
            items = [pb.Assignment.FromString(item.SerializeToString()) for item in items]
        for item in items:
            self.assigned_count += 1
            self._admit(_attempt(item, stream, counts_from, self.assigned_count, now), stream, now)

    def _admit(self, attempt: Attempt, stream: NodeStream, now: Micros) -> None:
        """Let an attempt wait for its start, or end it Returned."""
        has_credit = stream.account.use(attempt.task_type)
        token = attempt.token
        if token in self.holdings.held or token in self.outcomes.unrecorded:
            return
        highest = self._terms.highest(attempt.shard)
        if attempt.epoch > highest:
            self._learn([(attempt.shard, attempt.epoch)], stream)
        if attempt.epoch < highest:
            self.stale_count += 1
            self.outcomes.keep(attempt, RETURNED)
        elif not has_credit or attempt.task_type not in self._task_types:
            self.outcomes.keep(attempt, RETURNED)
        else:
            stream.hold(token)
            self.holdings.admit(attempt)
            # A list is confirmed sooner than the next heartbeat.
            stream.is_list_due = stream.is_list_due or attempt.is_short(now)

    def _term_started(self, stream: NodeStream, started: pb.TermStarted) -> None:
        stream.want_list(started.request)
        shards = self._told_to_lead(started.terms, stream)
        self.outcomes.term_started(shards, stream)

    def _term_ended(self, stream: NodeStream, ended: pb.TermEnded) -> None:
        for term in ended.terms:
            stream.leads_no_more(term.shard, term.epoch)
            self._keep_renewals(one for one in self.holdings.held.values() if one.shard == term.shard)
            self._terms.ended(term.shard, term.epoch)

    def _cancel_requested(self, stream: NodeStream, request: pb.CancelRequested) -> None:
        is_timeout = request.reason == pb.STOP_REASON_TIMED_OUT
        for token in request.lease_tokens:
            attempt = self.holdings.held.get(token)
            if attempt is None:
                continue
            if attempt.phase is Phase.WAITING:
                self.holdings.give_back(attempt)
            else:
                self.holdings.stop(attempt, StopReason.TIMED_OUT if is_timeout else StopReason.CANCELLED)
                stream.starts[attempt.token] = attempt

    def _lost(self, stream: NodeStream, tokens: Iterable[bytes]) -> None:
        for token in tokens:
            stream.release(token)
            attempt = self.holdings.held.get(token)
            if attempt is not None:
                self.holdings.lose(attempt)
                for one in self._streams.values():
                    one.forget(token)

    def _told_to_lead(self, told: Iterable[pb.Term], stream: NodeStream) -> set[int]:
        terms = [(term.shard, term.epoch) for term in told]
        stream.leads(terms)
        return self._learn(terms, stream)

    def _learn(self, terms: Iterable[tuple[int, int]], stream: NodeStream) -> set[int]:
        """Take in that a node leads shards, and return those of which no later term is known.

        What has renewed their leases so far is kept. From now on only that node does, and what it confirmed before
        tells nothing: another may have led meanwhile.
        """
        known = self._terms
        # In order, so that of a shard that is named twice the higher epoch counts.
        epochs = {shard: epoch for shard, epoch in sorted(terms) if epoch >= known.highest(shard)}
        begun = {
            shard
            for shard, epoch in epochs.items()
            if epoch > known.highest(shard) or known.leader(shard) is not stream
        }
        attempts = [attempt for attempt in self.holdings.held.values() if attempt.shard in begun]
        self._keep_renewals(attempts)
        for attempt in attempts:
            stream.begin_again(attempt.token)
        for shard, epoch in epochs.items():
            known.learn(shard, epoch, stream)
        return set(epochs)

    def _keep_renewals(self, attempts: Iterable[Attempt]) -> None:
        """Write down what leaders have renewed so far, before one of them is forgotten."""
        for attempt in attempts:
            attempt.counts_from = self._terms.counts_from(attempt)

    def _follow(self, now: Micros) -> list[Action]:
        """Start what can start, put free credit out, and hand over what the runner is to do."""
        self.holdings.start_waiting(now)
        self._give_credit()
        return self.holdings.take()

    def _give_credit(self) -> None:
        if self.is_draining or self.outcomes.is_full:
            return
        accounts = self._accounts()
        self._put_out(accounts)
        if len(accounts) > 1 and any(account.demand for account in accounts):
            credit.move(accounts)
            self._put_out(accounts)
        if self._limited:
            self._give_limited_credit()

    def _put_out(self, accounts: list[credit.Account]) -> None:
        if (free := self.free) > 0:
            credit.distribute(free, accounts)

    def _give_limited_credit(self) -> None:
        serving = [stream for stream in self._streams.values() if stream.account.is_open]
        wanting = sum(stream.account.demand > 0 for stream in serving)
        occupied = self.holdings.occupied()
        for stream in serving:
            sharers = wanting if stream.account.demand else len(serving)
            share = -(-self._capacity.threads // sharers)
            for task_type in self._limited:
                stream.account.limit(task_type, share, occupied[stream.address, task_type])

    def _accounts(self) -> list[credit.Account]:
        return [stream.account for stream in self._streams.values() if stream.is_serving]

    def _hello(self, stream_number: int) -> wire.Request:
        about = self._introduction
        return wire.Request(
            hello=pb.Hello(
                protocol_version=PROTOCOL_VERSION,
                namespace=about.namespace,
                worker=about.worker,
                incarnation=about.incarnation,
                stream_number=stream_number,
                queues=about.queues,
                task_types=about.task_types,
                lease_tokens=[*self.holdings.held, *self.outcomes.unrecorded],
                library=about.library,
            )
        )


def _attempt(item: pb.Assignment, stream: NodeStream, counts_from: Micros, order: int, now: Micros) -> Attempt:
    task = item.task
    lease = _micros(item.lease)
    return Attempt(
        item.lease_token,
        task.task_id,
        task.task_type,
        item.shard,
        item.epoch,
        stream.address,
        item,
        lease,
        counts_from,
        counts_from,
        # Of a short lease more than half is left when it comes, else none would ever start.
        min(stream.interval + _TO_BE_CONFIRMED, lease // 2),
        item.HasField("start_within"),
        now + _micros(item.time_left) if item.HasField("time_left") else None,
        _start_by(item, counts_from, now),
        order,
    )


def _start_by(item: pb.Assignment, counts_from: Micros, now: Micros) -> Micros | None:
    """Tell until when a handler may begin; None: its lease alone bounds it.

    Once an attempt's time and the grace are over, counted from before it was granted, the node may have ended it.
    """
    until = []
    if item.HasField("start_within"):
        until.append(now + _micros(item.start_within))
    if item.HasField("time_left"):
        until.append(counts_from + _micros(item.time_left) + bounds.STOP_GRACE)
    return min(until, default=None)


def _micros(duration: Duration) -> Micros:
    return duration.seconds * bounds.SECOND + duration.nanos // 1_000
