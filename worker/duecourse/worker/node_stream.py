"""One stream to one node, as the protocol machine sees it: numbers, what is held on it, and what waits to be sent.

::

    OPENING ── Welcome ──▶ SERVING ── any end of the stream ──▶ CLOSED

`outgoing` makes as few messages as possible of all that waits, in an order on which the digest of heartbeats relies:
LeasesHeld, outcomes, Started, Credit, Goodbye, heartbeat. The digest covers what the last LeasesHeld had listed of
shards that the node leads, by its own word, and what has come since, without those whose outcome was sent on it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.worker import wire
from duecourse.worker.attempt import RETURNED, Attempt, Failed, Phase, Success
from duecourse.worker.credit import Account
from duecourse.worker.sent import SentTimes

MAX_MESSAGE_ATTEMPTS: Final = bounds.MAX_BATCH
MAX_MESSAGE_BYTES: Final = bounds.MAX_REQUEST_BYTES // 4
_REFERENCE_BYTES: Final = 2 * bounds.MAX_NAME_BYTES
_FAILURE_BYTES: Final = bounds.MAX_FAILURE_MESSAGE_BYTES + bounds.MAX_FAILURE_TYPE_BYTES


class StreamPhase(Enum):
    """How far a stream has come."""

    OPENING = 1
    SERVING = 2
    CLOSED = 3


class NodeStream:
    """The state of one stream; altered only by the protocol machine."""

    def __init__(self, address: str, serial: int, hello: wire.Request, now: Micros) -> None:
        self.address = address
        self.node_id = ""
        """The node at the other end, once it has said so."""
        self.serial = serial
        """Counts this worker's streams to whichever node, from 1."""
        self.number = hello.hello.stream_number
        """Counts its streams to this node."""
        self.phase = StreamPhase.OPENING
        self.interval: Micros = bounds.DEFAULT_HEARTBEAT
        self.heard_at = now
        self.last_assignments = 0
        self.account = Account()
        self.outcomes: list[Attempt] = []
        self.starts: dict[bytes, Attempt] = {}
        """Those whose start is to be told, by token: asked for at every tick until the writer takes it."""
        self.is_list_due = False
        """Whether a list is to be sent though nobody asks."""
        self.listed_at = now
        self._request: int | None = None
        """The highest that the next list answers, 0 for none; None if no list is wanted."""
        self._led: dict[int, int] = {}
        """By shard: the epochs in which the node leads, as it has said on this stream."""
        self.is_goodbye_due = False
        self.beat_at = now
        self.is_beat_due = False
        self._hello: wire.Request | None = hello
        self._message_number = 0
        self._sent = SentTimes()
        self._renewals = SentTimes(grain=0)
        self._held: dict[bytes, int] = {}
        self._told: set[bytes] = set()
        """Leases whose outcomes were sent on this stream and are not answered yet."""
        self._progress_told: dict[bytes, str] = {}
        """By lease token: what was last said on this stream of a handler's progress."""
        self._digest = 0
        self._renewed_number = 0
        self._renewed_at: Micros = 0

    @property
    def is_serving(self) -> bool:
        """Whether the node has said Welcome and the stream has not ended."""
        return self.phase is StreamPhase.SERVING

    @property
    def has_outgoing(self) -> bool:
        """Whether `outgoing` would make a message."""
        if self.phase is StreamPhase.OPENING:
            return self._hello is not None
        return self.is_serving and bool(
            self.outcomes
            or self.starts
            or self.is_list_wanted
            or self.account.unsent
            or self.account.limited_unsent
            or self.is_beat_due
            or self.is_goodbye_due
        )

    @property
    def is_list_wanted(self) -> bool:
        """Whether `outgoing` will make a list of leases."""
        return self._request is not None

    def want_list(self, request: int) -> None:
        """Have a list of leases sent next; one answers all requests that have come, by the highest."""
        self._request = max(request, self._request or 0)

    def hold(self, token: bytes) -> None:
        """Count a lease that came on this stream into the digest."""
        self._held[token] = self._message_number
        self._digest ^= int.from_bytes(token[:8], "big")

    def release(self, token: bytes) -> None:
        """Take a lease out of the digest, if it is in."""
        if self._held.pop(token, None) is not None:
            self._digest ^= int.from_bytes(token[:8], "big")

    def leads(self, terms: Iterable[tuple[int, int]]) -> None:
        """Take in which shards the node leads, in which epochs."""
        self._led.update(terms)

    def leads_no_more(self, shard: int, epoch: int) -> None:
        """Take in that a term of the node is over."""
        if shard in self._led and self._led[shard] <= epoch:
            del self._led[shard]

    def begin_again(self, token: bytes) -> None:
        """Let only messages that are sent from now on renew a lease."""
        if token in self._held:
            self._held[token] = self._message_number

    def forget(self, token: bytes) -> None:
        """Drop all that is known of a lease."""
        self._told.discard(token)
        self.release(token)

    def sent_at(self, number: int) -> Micros | None:
        """Tell when message `number` was sent at the latest possible, None if it was not."""
        entry = self._sent.floor(number)
        return entry[1] if entry else None

    def confirmed(self, number: int) -> None:
        """Take in that the node's terms stood after it had read message `number`."""
        entry = self._renewals.floor(number)
        if entry and entry[0] > self._renewed_number:
            self._renewed_number, self._renewed_at = entry

    def renewed_at(self, token: bytes) -> Micros | None:
        """Tell when the message was sent that last renewed a lease on this stream; None if none did.

        Only a message that was sent after the lease came or was listed, and its shard's term was told, can have.
        """
        since = self._held.get(token)
        return self._renewed_at if since is not None and since < self._renewed_number else None

    def outgoing(self, held: Collection[Attempt], running: Mapping[bytes, Attempt], now: Micros) -> list[wire.Request]:
        """Make messages of all that waits; they count as sent now. `held` is needed only if a list is wanted."""
        if self._hello is not None:
            hello, self._hello = self._hello, None
            hello.number = self._next(now)
            return [hello]
        if not self.is_serving:
            return []
        messages: list[wire.Request] = []
        if self._request is not None:
            messages.append(self._leases_held(self._request, held, now))
            self._request = None
        if self.outcomes:
            messages.extend(self._outcomes(now))
        begun = [attempt for attempt in self.starts.values() if attempt.phase is Phase.RUNNING]
        self.starts.clear()
        for part in _parts(begun):
            for attempt in part:
                attempt.is_start_told = True
            messages.append(wire.started(self._next(now), part, now))
        if self.account.unsent or self.account.limited_unsent:
            messages.append(wire.credit(self._next(now), self.account.unsent, self.account.limited_unsent))
            self.account.unsent = 0
            self.account.limited_unsent.clear()
        if self.is_goodbye_due:
            self.is_goodbye_due = False
            messages.append(wire.goodbye(self._next(now)))
        if self.is_beat_due:
            self.is_beat_due = False
            self.beat_at = now
            messages.extend(self._heartbeats(running, now))
        return messages

    def _next(self, now: Micros) -> int:
        self._message_number += 1
        self._sent.record(self._message_number, now)
        return self._message_number

    def _leases_held(self, answers: int, held: Collection[Attempt], now: Micros) -> wire.Request:
        # What others lead ends by way of them: it is not counted here.
        counted = {attempt.token for attempt in held if attempt.shard in self._led} - self._told
        for token in self._held.keys() - counted:
            self.release(token)
        # Before the message has its number: it is the first that covers what it lists.
        for token in counted - self._held.keys():
            self.hold(token)
        self.is_list_due = False
        self.listed_at = now
        number = self._next(now)
        self._renewals.record(number, now)
        self._progress_told.clear()
        return wire.leases_held(number, answers, self.last_assignments, held)

    def _heartbeats(self, running: Mapping[bytes, Attempt], now: Micros) -> Iterator[wire.Request]:
        """Make one heartbeat, or several if many handlers have said something new."""
        for progress in list(_parts(self._progress_news(running))) or [[]]:
            number = self._next(now)
            self._renewals.record(number, now)
            yield wire.heartbeat(number, self.last_assignments, len(self._held), self._digest, progress, now)

    def _progress_news(self, running: Mapping[bytes, Attempt]) -> list[Attempt]:
        """Return the attempts whose progress is not what this stream was told; from now on it is."""
        news = []
        told = {}
        for token in self._held:
            attempt = running.get(token)
            if attempt is None or not (attempt.progress or token in self._progress_told):
                continue
            progress = told[token] = attempt.progress
            if progress != self._progress_told.get(token, ""):
                news.append(attempt)
        self._progress_told = told
        return news

    def _outcomes(self, now: Micros) -> Iterator[wire.Request]:
        successes: list[Attempt] = []
        failures: list[Attempt] = []
        returns: list[Attempt] = []
        for attempt in self.outcomes:
            attempt.is_queued = False
            if attempt.phase is not Phase.ENDED:
                continue
            self.release(attempt.token)
            self._told.add(attempt.token)
            attempt.sent_on = self.serial
            outcome = attempt.outcome
            if type(outcome) is Success:
                successes.append(attempt)
            elif outcome is RETURNED:
                returns.append(attempt)
            else:
                failures.append(attempt)
        self.outcomes.clear()
        for part in _parts(returns):
            yield wire.returned(self._next(now), part)
        for part in _parts(successes):
            yield wire.succeeded(self._next(now), part, now)
        for part in _parts(failures):
            yield wire.failed(self._next(now), part, now)


def _parts(attempts: Iterable[Attempt]) -> Iterator[list[Attempt]]:
    """Cut attempts into lists that each fit into a message, whatever their outcomes weigh."""
    rest = iter(attempts)
    while part := list(islice(rest, MAX_MESSAGE_ATTEMPTS)):
        if sum(weight(one) for one in part) <= MAX_MESSAGE_BYTES:
            yield part
            continue
        light: list[Attempt] = []
        total = 0
        for attempt in part:
            total += weight(attempt)
            if light and total > MAX_MESSAGE_BYTES:
                yield light
                light, total = [], weight(attempt)
            light.append(attempt)
        yield light


def weight(attempt: Attempt) -> int:
    """Tell roughly, and not too low, how many bytes an attempt takes in a message."""
    outcome = attempt.outcome
    if type(outcome) is Success:
        return _REFERENCE_BYTES + len(outcome.result)
    return _REFERENCE_BYTES + _FAILURE_BYTES if type(outcome) is Failed else _REFERENCE_BYTES
