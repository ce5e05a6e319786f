"""One worker's stream as the node sees it: a machine without I/O.

Messages of the worker go in by `receive`, what the loop decided by the other methods, and messages for the worker come
out by `take`.

::

    OPENING ── Hello ──▶ SERVING ── Goodbye ──▶ LEAVING
       └───────────────────┴───────────────────────┴──▶ ENDED

- A message that the protocol does not allow ends this stream and nothing else.
- The leases that are held on the stream are renewed by a heartbeat whose digest agrees with the ledger, or by a list of
  them; a digest that differs asks for the list.
- Once it has ended, nothing comes out; assignments that had not been taken are reported to their shards as unsent.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.effects import Assignment, StopReason, Verdict
from duecourse.server.core.errors import DomainError
from duecourse.server.core.events import End, Hold, OutcomeKind, Report, Start, Unsent
from duecourse.server.core.lease import Holder, Lease
from duecourse.server.core.task import Epoch, Failure, Lane, ShardId, TaskKey
from duecourse.server.streams import Port, reading, wire
from duecourse.server.streams.errors import ProtocolViolation, StreamEnded
from duecourse.server.streams.inquiry import Inquiry
from duecourse.server.streams.ledger import Ledger
from duecourse.server.streams.outbox import Outbox
from duecourse.server.telemetry.metrics import Metrics
from duecourse.v1 import worker_service_pb2 as pb

_MAX_UNDECIDED: Final = 2 * bounds.MAX_CREDIT
"""More than a worker can ever have got: each waits in memory, with its result."""
_RETURNED_DIGEST: Final = reading.digest(OutcomeKind.RETURNED)
_PLAIN_SUCCESS_DIGEST: Final = reading.digest(OutcomeKind.SUCCEEDED)


class Phase(Enum):
    """How far a stream has come."""

    OPENING = 1
    SERVING = 2
    LEAVING = 3
    ENDED = 4


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a stream needs of the node; the same for all of its streams."""

    port: Port
    metrics: Metrics
    node_id: str
    heartbeat: Micros
    join: Callable[["WorkerStream"], None]
    """Called when a worker has introduced itself. Raises StreamEnded if a newer stream of it is open."""
    left: Callable[["WorkerStream"], None]
    """Called when the stream has ended."""
    nodes: Callable[[], wire.Response | None]
    """Returns ClusterChanged as of now; None if nothing is known yet."""


class WorkerStream:
    """See the module's docstring."""

    def __init__(self, around: Surroundings, stream_id: int, now: Micros, wake: Callable[[], None]) -> None:
        self.stream_id = stream_id
        self.phase = Phase.OPENING
        self.error: DomainError | None = None
        """Why it has ended; None if the worker closed it."""
        self.identity: tuple[str, str, str] | None = None
        """Namespace, worker, incarnation."""
        self.stream_number = 0
        self.last_read = 0
        """The number of the last message read from the worker."""
        self._port = around.port
        self._around = around
        self._wake = wake
        self._is_due = False
        self._heard_at = now
        self._beat_at = now
        self._stuck_since: Micros | None = None
        self._taken_seen = 0
        self._holder: Holder | None = None
        self._ledger = Ledger()
        self._outbox = Outbox()
        self._inquiry = Inquiry()
        self._renewals: tuple[int, int] | None = None
        """Of heartbeats and LeasesHeld that are not confirmed: the number from which on to tell it, and the last."""
        self._credit_out = 0
        self._no_room_for: list[Lane] = []
        """The lanes of assignments whose credit comes back once there is room: they would only be turned away again."""
        self._task_types: frozenset[str] = frozenset()

    @property
    def is_ended(self) -> bool:
        """Whether nothing goes in or comes out any more."""
        return self.phase is Phase.ENDED

    # What the pump calls.

    def receive(self, message: pb.StreamAssignmentsRequest, now: Micros) -> None:
        """Take in a message of the worker, read at an elapsed time."""
        if self.phase is Phase.ENDED:
            return
        self._heard_at = now
        try:
            self._handle(message, now)
        except DomainError as error:
            self.end(error)

    def take(self) -> wire.Response | None:
        """Return the next message for the worker; None if nothing waits."""
        message = None if self.phase is Phase.ENDED else self._outbox.take()
        self._is_due = message is not None
        if self._no_room_for and self._outbox.is_roomy and self.phase is Phase.SERVING:
            lanes, self._no_room_for = self._no_room_for, []
            self._port.give_back(self._the_holder(), lanes)
        return message

    def end(self, error: DomainError | None) -> None:
        """End the stream: for a reason that the worker is told, or because it closed it."""
        if self.phase is Phase.ENDED:
            return
        was_serving = self.phase is Phase.SERVING and self._holder is not None
        self.phase = Phase.ENDED
        self.error = error
        self._around.left(self)
        if self._holder is not None:
            self._holder.is_open = False
            if was_serving:
                self._port.unsubscribe(self._holder)
        for lease in self._outbox.unsent():
            self._port.post(lease.task.shard, Unsent(lease))
        self._wake()

    # What the hub calls.

    def assign(self, assignment: Assignment) -> bool:
        """Send a lease to the worker; False if too much waits already."""
        outbox = self._outbox
        if outbox.is_full:
            self._no_room_for.append(assignment.lease.task.lane)
            return False
        outbox.assign(assignment)
        self._ledger.assigned(assignment.lease)
        self._credit_out -= 1
        if not self._is_due:
            self._notify()
        return True

    def verdict(self, token: bytes, verdict: Verdict) -> None:
        """Tell what became of an outcome."""
        self._ledger.decided(token)
        if verdict is Verdict.RECORDED:
            self._outbox.record(token)
        else:
            self._outbox.refuse(token, wire.VERDICTS[verdict])
        if not self._is_due:
            self._notify()

    def stop(self, tokens: Iterable[bytes], reason: StopReason) -> None:
        """Ask the worker to stop attempts."""
        self._outbox.stop(tokens, reason)
        self._notify()

    def lose(self, tokens: Sequence[bytes]) -> None:
        """Tell the worker that leases are no longer its."""
        outbox = self._outbox
        waiting = self._ledger.sent_after(outbox.sent_number, tokens)
        outbox.lose(token for token in tokens if token not in waiting)
        if waiting:
            outbox.say(wire.lease_lost(waiting))
        for token in tokens:
            self._ledger.lost(token)
        self._notify()

    def adopted(self, token: bytes) -> None:
        """Expect a lease that was listed: if a later list had it no more, the next heartbeat shows that it is gone."""
        self._ledger.listed([token])

    def announce(self, terms: Sequence[tuple[ShardId, Epoch]]) -> None:
        """Tell the worker of terms that have begun, and ask what it holds."""
        if self._holder is None:
            return
        self._outbox.ask(wire.term_started(self._inquiry.announce(terms), terms))
        self._notify()

    def end_term(self, shard: ShardId, epoch: Epoch) -> None:
        """Tell the worker of a term that is over: what it is told from now on does not speak of its leases."""
        if self._holder is not None:
            self._inquiry.ended(shard, epoch)
            self._outbox.end_term(shard, epoch)
            self._notify()

    def drain(self) -> None:
        """Tell the worker that the node drains."""
        if self._holder is not None:
            self._outbox.say(wire.draining())
            self._notify()

    def tell_nodes(self, message: wire.Response) -> None:
        """Tell the worker which nodes there are."""
        if self._holder is not None:
            self._outbox.nodes(message)
            self._notify()

    def demand(self, waiting: int) -> None:
        """Tell the worker how many tasks wait here for its credit."""
        if self.phase is Phase.SERVING:
            self._outbox.demand(waiting)
            self._notify()

    def check_began(self) -> None:
        """Remember what was read when the node began to check its terms."""
        self._inquiry.check_began(self.last_read)

    def check_succeeded(self) -> None:
        """Take in that the terms stood after what had been read then."""
        self._inquiry.check_succeeded()
        confirmed = self._inquiry.confirmed
        if self._renewals is not None and confirmed >= self._renewals[0]:
            # At once: until it hears this, the worker does not know that its leases were renewed.
            last = self._renewals[1]
            self._renewals = (last, last) if last > confirmed else None
            self._beat_at = self._port.elapsed()
            self._outbox.beat(confirmed)
            self._notify()

    def tick(self, now: Micros) -> None:
        """Send a heartbeat when it is time; end a stream that is silent or not read."""
        limit = bounds.SILENT_INTERVALS * self._around.heartbeat
        if now - self._heard_at > limit:
            self.end(StreamEnded("the worker was silent for too long"))
        elif self._is_stuck(now, limit) or self._outbox.is_overrun:
            self.end(StreamEnded("the worker does not read"))
        elif self._holder is not None and now - self._beat_at >= self._around.heartbeat:
            self._beat_at = now
            self._outbox.beat(self._inquiry.confirmed)
            self._notify()

    def excuse(self, gap: Micros) -> None:
        """Do not count time in which the node itself did not run."""
        self._heard_at += gap
        if self._stuck_since is not None:
            self._stuck_since += gap

    # What the worker says.

    def _handle(self, message: pb.StreamAssignmentsRequest, now: Micros) -> None:
        self.last_read += 1
        if message.number != self.last_read:
            raise ProtocolViolation("messages are numbered from 1 without gaps")
        event = message.WhichOneof("event")
        if self._holder is None:
            if event != "hello":
                raise ProtocolViolation("Hello comes first")
            self._hello(message.hello, now)
        elif event is None:
            self._around.metrics.unknown_events += 1
        elif event == "hello":
            raise ProtocolViolation("Hello comes only once")
        else:
            _HANDLERS[event](self, getattr(message, event), now)

    def _hello(self, hello: pb.Hello, now: Micros) -> None:
        worker = reading.introduction(hello)
        self.identity = (worker.namespace, worker.worker, worker.incarnation)
        self.stream_number = worker.stream_number
        self._around.join(self)
        self._holder = holder = Holder(self.stream_id, worker.namespace, worker.worker, worker.incarnation, now)
        self.phase = Phase.SERVING
        port = self._port
        self._task_types = worker.task_types
        port.subscribe(holder, worker.queues, worker.task_types)
        terms = port.terms()
        self._inquiry.welcome(terms)
        around = self._around
        self._outbox.welcome(
            wire.welcome(worker.protocol_version, around.node_id, self.stream_id, around.heartbeat, terms)
        )
        if nodes := around.nodes():
            self._outbox.nodes(nodes)
        self._notify()
        if worker.lease_tokens:
            self._ledger.listed(worker.lease_tokens)
            leases: dict[bytes, tuple[TaskKey | None, bool]] = dict.fromkeys(worker.lease_tokens, (None, False))
            for shard, _ in terms:
                port.post(shard, Hold(holder, leases, 0, is_complete=False))

    def _credit(self, credit: pb.Credit, _: Micros) -> None:
        if self.phase is Phase.LEAVING:
            raise ProtocolViolation("after Goodbye there is no credit")
        holder = self._the_holder()
        delta = credit.delta
        of_types = dict(credit.task_type_deltas)
        if not self._task_types.issuperset(of_types):
            raise ProtocolViolation("Credit: a task type that Hello did not name")
        if any(abs(change) > bounds.MAX_CREDIT for change in (delta, *of_types.values())):
            raise ProtocolViolation(f"Credit: at most {bounds.MAX_CREDIT} can be out")
        if delta > 0:
            # What is granted and not assigned yet is still out here: the bound is the worker's own count.
            self._credit_out += delta
            if self._credit_out > bounds.MAX_CREDIT:
                raise ProtocolViolation(f"Credit: at most {bounds.MAX_CREDIT} can be out")
        unused = self._port.credit(holder, delta, of_types)
        if delta < 0:
            self._credit_out -= unused
            self._outbox.say(wire.credit_returned(unused))
            self._notify()

    def _started(self, started: pb.Started, _: Micros) -> None:
        port = self._port
        utc = port.utc()
        for reference in started.attempts:
            token = reference.lease_token
            lease = self._ledger.lease_of(token)
            key, shard = self._locate(reference, lease)
            # Without a duration the handler began just now.
            port.post(shard, Start(key, token, _start_time(reference, lease, utc) or utc))

    def _succeeded(self, succeeded: pb.Succeeded, _: Micros) -> None:
        utc = self._port.utc()
        for success in succeeded.attempts:
            result = reading.result(success)
            digest = _PLAIN_SUCCESS_DIGEST if result is None else reading.digest(OutcomeKind.SUCCEEDED, returned=result)
            self._end(success.attempt, utc, OutcomeKind.SUCCEEDED, digest, None, result, None)

    def _failed(self, failed: pb.Failed, _: Micros) -> None:
        utc = self._port.utc()
        for attempt in failed.attempts:
            kind = reading.failure_kind(attempt)
            failure = reading.failure(attempt)
            digest = reading.digest(kind, failure)
            self._end(attempt.attempt, utc, kind, digest, failure, None, reading.retry_after(attempt))

    def _returned(self, returned: pb.Returned, _: Micros) -> None:
        utc = self._port.utc()
        for reference in returned.attempts:
            self._end(reference, utc, OutcomeKind.RETURNED, _RETURNED_DIGEST, None, None, None)

    def _heartbeat(self, heartbeat: pb.WorkerHeartbeat, now: Micros) -> None:
        received = self._received(heartbeat.last_assignments)
        if self._ledger.digest(received) == (heartbeat.lease_count, heartbeat.lease_digest):
            self._renew(now)
        else:
            self._inquiry.disagreed(self.last_read)
            self._want_leases()
        for reference in heartbeat.progress:
            token = reference.lease_token
            if token in self._ledger:
                key, shard = self._locate(reference, self._ledger.lease_of(token))
                self._port.post(shard, Report(key, token, reading.progress(reference)))

    def _leases_held(self, held: pb.LeasesHeld, now: Micros) -> None:
        holder = self._the_holder()
        if not 0 <= held.answers <= self._inquiry.requested:
            raise ProtocolViolation("LeasesHeld: it answers what was not asked")
        if len(held.leases) > reading.MAX_LISTED:
            raise ProtocolViolation(f"at most {reading.MAX_LISTED} leases can be listed")
        received = self._received(held.last_assignments)
        by_shard: dict[ShardId, dict[bytes, tuple[TaskKey | None, bool]]] = {}
        port = self._port
        self._inquiry.answered(held.answers)
        tokens, counted = set(), set()
        for lease in held.leases:
            token = reading.token(lease.lease_token)
            key = TaskKey(holder.namespace, reading.task_id(lease.task_id))
            shard = port.shard_of(*key)
            tokens.add(token)
            if self._inquiry.is_known_to_lead(shard):
                counted.add(token)
            by_shard.setdefault(shard, {})[token] = (key, lease.started)
        self._ledger.reset(tokens, counted, received)
        self._renew(now)
        for shard, epoch in port.terms():
            is_complete = self._inquiry.proves_absence(shard, epoch, held.answers)
            leases = by_shard.get(shard)
            if is_complete or leases:
                port.post(shard, Hold(holder, leases or {}, received, is_complete))

    def _goodbye(self, _: pb.Goodbye, __: Micros) -> None:
        if self.phase is Phase.SERVING:
            self.phase = Phase.LEAVING
            self._credit_out = 0
            self._port.unsubscribe(self._the_holder())

    # Helpers.

    def _end(
        self,
        reference: pb.AttemptRef,
        utc: Micros,
        kind: OutcomeKind,
        digest: bytes,
        failure: Failure | None,
        result: tuple[bytes, str] | None,
        retry_after: Micros | None,
    ) -> None:
        token = reference.lease_token
        lease = self._ledger.conclude(token)
        if self._ledger.undecided > _MAX_UNDECIDED:
            raise ProtocolViolation(f"at most {_MAX_UNDECIDED} outcomes may wait for what becomes of them")
        key, shard = self._locate(reference, lease)
        port = self._port
        if not port.leads(shard):
            self._outbox.refuse(token, pb.OUTCOME_VERDICT_NOT_LEADER, port.leader_of(shard))
            self._notify()
            return
        start_time = _start_time(reference, lease, utc)
        port.post(shard, End(key, token, self._the_holder(), kind, digest, start_time, failure, result, retry_after))

    def _locate(self, reference: pb.AttemptRef, lease: Lease | None) -> tuple[TaskKey, ShardId]:
        """Return an attempt's task and shard: as it was assigned on this stream, or else as the worker says."""
        if lease is not None:
            task = lease.task
            return task.key, task.shard
        reading.token(reference.lease_token)
        key = TaskKey(self._the_holder().namespace, reading.task_id(reference.task_id))
        return key, self._port.shard_of(*key)

    def _received(self, number: int) -> int:
        if not 0 <= number <= self._outbox.sent_number:
            raise ProtocolViolation("it names Assignments that were not sent")
        return number

    def _renew(self, now: Micros) -> None:
        self._the_holder().renewed_at = now
        self._inquiry.agreed()
        first = self.last_read if self._renewals is None else self._renewals[0]
        self._renewals = first, self.last_read
        if self._ledger.undecided > bounds.MAX_CREDIT:
            # Outcomes whose shards moved on stay here; a list tells which of them the worker has forgotten.
            self._want_leases()

    def _want_leases(self) -> None:
        request = self._inquiry.ask()
        if request is not None:
            self._outbox.ask(wire.leases_wanted(request))
            self._notify()

    def _is_stuck(self, now: Micros, limit: Micros) -> bool:
        """Tell whether something has waited for too long while nothing was taken."""
        if not self._is_due or self._outbox.taken != self._taken_seen:
            self._taken_seen = self._outbox.taken
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        return self._stuck_since is not None and now - self._stuck_since > limit

    def _notify(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._wake()

    def _the_holder(self) -> Holder:
        assert self._holder is not None, "the worker has introduced itself"
        return self._holder


def _start_time(reference: pb.AttemptRef, lease: Lease | None, utc: Micros) -> Micros | None:
    """Return when the handler began; never before the grant, whatever the worker says."""
    start_time = reading.start_time(reference, utc)
    if start_time is None or lease is None:
        return start_time
    attempt = lease.task.progress.attempt
    return start_time if attempt is None else max(start_time, attempt.lease_time)


_HANDLERS: Final[dict[str, Callable[[WorkerStream, Any, Micros], None]]] = {
    "credit": WorkerStream._credit,
    "started": WorkerStream._started,
    "succeeded": WorkerStream._succeeded,
    "failed": WorkerStream._failed,
    "returned": WorkerStream._returned,
    "heartbeat": WorkerStream._heartbeat,
    "leases_held": WorkerStream._leases_held,
    "goodbye": WorkerStream._goodbye,
}
