"""What waits to be sent on one stream, in as few messages as possible and in bounded memory.

Whatever concerns a lease follows the Assignments that carry it; heartbeats, what became of outcomes, which nodes there
are and what waits here may overtake. So may, before these, the ends and beginnings of terms: until a worker has
answered what a new leader asks, nothing renews its leases. Its answer says by number which Assignments it had not
received; those of an earlier term that still wait it refuses from then on. That a lease is lost whose assignment has
left comes before what it is asked, so that no list and no heartbeat speaks of that lease again.
Assignments join the message that waits last until it is full, so that a burst leaves in few messages and a slow
connection still lets a heartbeat through between two of them.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from duecourse.server.core.effects import Assignment, StopReason
from duecourse.server.core.lease import Lease
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.streams import wire
from duecourse.v1 import worker_service_pb2 as pb

FULL_MESSAGE_BYTES: Final = 256 * 1024
MAX_BYTES: Final = 32 * 1024 * 1024
MAX_RECORDS: Final = 131_072
MESSAGE_RECORDS: Final = 16_384
_ASSIGNMENT_BYTES: Final = 256


class _Batch:
    """One Assignments message that waits."""

    __slots__ = ("add", "last_read", "leases", "message", "number", "weight")

    def __init__(self, number: int, last_read: int) -> None:
        self.message = wire.Response()
        self.add: Callable[[], pb.Assignment] = self.message.assignments.assignments.add
        self.number = number
        self.last_read = last_read
        """The lowest of its grants': their lease times may seem shorter, never longer."""
        self.leases: list[Lease] = []
        self.weight = 0


class Outbox:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.sent_number = 0
        """The number of the last Assignments that was taken to be sent."""
        self.taken = 0
        """How many messages were taken."""
        self._number = 0
        self._bytes = 0
        self._welcome: wire.Response | None = None
        self._nodes: wire.Response | None = None
        self._ended: dict[ShardId, Epoch] = {}
        self._lost: list[bytes] = []
        self._requests: deque[wire.Response] = deque()
        self._beat: int | None = None
        self._demand: int | None = None
        self._recorded: list[bytes] = []
        self._others: list[tuple[bytes, pb.OutcomeVerdict.ValueType, str]] = []
        self._queue: deque[_Batch | wire.Response] = deque()
        self._open: _Batch | None = None
        """The last in the queue, if it is Assignments that take more."""

    @property
    def is_full(self) -> bool:
        """Whether so many bytes wait that no more assignments are taken."""
        return self._bytes >= MAX_BYTES

    @property
    def is_roomy(self) -> bool:
        """Whether half of the room for assignments is free."""
        return self._bytes <= MAX_BYTES // 2

    @property
    def is_overrun(self) -> bool:
        """Whether the worker made more to answer than it reads."""
        answers = len(self._recorded) + len(self._others)
        return answers + len(self._lost) + len(self._requests) + len(self._queue) > MAX_RECORDS

    def welcome(self, message: wire.Response) -> None:
        """Say Welcome, before all else."""
        self._welcome = message

    def say(self, message: wire.Response) -> None:
        """Send a message after all that waits."""
        self._queue.append(message)
        self._open = None

    def ask(self, message: wire.Response) -> None:
        """Ask for a list of leases, for new terms or without, before what else waits of leases that are not lost."""
        self._requests.append(message)

    def lose(self, tokens: Iterable[bytes]) -> None:
        """Tell that leases are lost whose assignments have left, here or elsewhere."""
        self._lost.extend(tokens)

    def stop(self, tokens: Iterable[bytes], reason: StopReason) -> None:
        """Ask to stop attempts."""
        self.say(wire.cancel_requested(tokens, reason))

    def beat(self, last_read: int) -> None:
        """Send a heartbeat; of several that wait only the last is sent."""
        self._beat = last_read

    def nodes(self, message: wire.Response) -> None:
        """Say which nodes there are, right after Welcome; of several such messages that wait only the last is sent."""
        self._nodes = message

    def end_term(self, shard: ShardId, epoch: Epoch) -> None:
        """Say that a term is over, and no more that it has begun."""
        self._ended[shard] = max(epoch, self._ended.get(shard, epoch))
        for message in self._requests:
            terms = message.term_started.terms
            kept = [term for term in terms if (term.shard, term.epoch) != (shard, epoch)]
            if len(kept) < len(terms):
                del terms[:]
                terms.extend(kept)

    def demand(self, waiting: int) -> None:
        """Say how many tasks wait here; of several numbers that wait only the last is sent."""
        self._demand = waiting

    def record(self, token: bytes) -> None:
        """Tell that an outcome is durable."""
        self._recorded.append(token)

    def refuse(self, token: bytes, verdict: pb.OutcomeVerdict.ValueType, leader: str = "") -> None:
        """Tell what else became of an outcome."""
        self._others.append((token, verdict, leader))

    def assign(self, assignment: Assignment) -> None:
        """Send an assignment, numbering its lease by the message that carries it."""
        batch = self._open
        if batch is None or batch.weight >= FULL_MESSAGE_BYTES:
            batch = self._open_batch(assignment.last_read)
        elif assignment.last_read < batch.last_read:
            batch.last_read = assignment.last_read
        lease = assignment.lease
        lease.assignment_number = batch.number
        batch.leases.append(lease)
        wire.fill(batch.add(), assignment)
        delivery = assignment.delivery
        weight = _ASSIGNMENT_BYTES + len(delivery.payload)
        if delivery.headers:
            weight += sum(len(key) + len(value) for key, value in delivery.headers.items())
        batch.weight += weight
        self._bytes += weight

    def take(self) -> wire.Response | None:
        """Return the next message to send; None if nothing waits."""
        message = self._next()
        if message is not None:
            self.taken += 1
        return message

    def unsent(self) -> list[Lease]:
        """Give up: return the leases whose assignments surely never left."""
        leases = [lease for one in self._queue if isinstance(one, _Batch) for lease in one.leases]
        self._queue.clear()
        self._open = None
        self._bytes = 0
        return leases

    def _next(self) -> wire.Response | None:
        if self._welcome is not None:
            message, self._welcome = self._welcome, None
            return message
        if self._nodes is not None:
            message, self._nodes = self._nodes, None
            return message
        if self._ended:
            ended, self._ended = self._ended, {}
            return wire.term_ended(ended.items())
        if self._lost:
            lost, self._lost = self._lost[:MESSAGE_RECORDS], self._lost[MESSAGE_RECORDS:]
            return wire.lease_lost(lost)
        if self._requests:
            return self._requests.popleft()
        if self._beat is not None:
            beat, self._beat = self._beat, None
            return wire.heartbeat(beat)
        if self._demand is not None:
            waiting, self._demand = self._demand, None
            return wire.demand(waiting)
        if self._recorded or self._others:
            message = wire.outcomes_recorded(self._recorded[:MESSAGE_RECORDS], self._others[:MESSAGE_RECORDS])
            del self._recorded[:MESSAGE_RECORDS]
            del self._others[:MESSAGE_RECORDS]
            return message
        if not self._queue:
            return None
        entry = self._queue.popleft()
        if not isinstance(entry, _Batch):
            return entry
        if entry is self._open:
            self._open = None
        self._bytes -= entry.weight
        self.sent_number = entry.number
        entry.message.assignments.number = entry.number
        entry.message.assignments.last_read = entry.last_read
        return entry.message

    def _open_batch(self, last_read: int) -> _Batch:
        self._number += 1
        batch = self._open = _Batch(self._number, last_read)
        self._queue.append(batch)
        return batch
