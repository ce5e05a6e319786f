"""Outcomes that no node has answered yet: kept, and sent to whoever leads, until they are recorded or refused.

An outcome is queued on one stream, or sent on one and waits for the verdict, or has no home for now. It goes to the
leader's stream; with none known to the stream that its attempt came on, else to any. What was sent on a stream that
ended is routed again, and a new term of a shard gets all of that shard's again: recording is idempotent.
"""

from collections.abc import Mapping
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.v1 import worker_service_pb2 as pb
from duecourse.worker.attempt import NO_ASSIGNMENT, Attempt, Outcome, Phase, Success
from duecourse.worker.node_stream import NodeStream
from duecourse.worker.reach import Reach
from duecourse.worker.terms import Terms

MAX_UNRECORDED: Final = 4_096
MAX_UNRECORDED_BYTES: Final = 64 * 1024 * 1024
RESEND_DELAY: Final = bounds.SECOND


class Outcomes:
    """The unrecorded outcomes of a worker."""

    def __init__(self, terms: Terms, streams: Mapping[str, NodeStream], reach: Reach) -> None:
        self.unrecorded: dict[bytes, Attempt] = {}
        self.refused_count = 0
        self._terms = terms
        self._streams = streams
        self._reach = reach
        self._bytes = 0
        self._homeless: dict[bytes, Attempt] = {}
        self._housed_at: Micros = 0
        self._turn = 0

    @property
    def is_full(self) -> bool:
        """Whether so much waits that nothing more should be taken on."""
        return len(self.unrecorded) >= MAX_UNRECORDED or self._bytes >= MAX_UNRECORDED_BYTES

    def keep(self, attempt: Attempt, outcome: Outcome) -> None:
        """End an attempt, and queue its outcome."""
        attempt.phase = Phase.ENDED
        attempt.outcome = outcome
        attempt.assignment = NO_ASSIGNMENT
        self.unrecorded[attempt.token] = attempt
        if type(outcome) is Success:
            self._bytes += len(outcome.result)
        self._route(attempt)

    def answered(self, stream: NodeStream, answer: pb.OutcomesRecorded) -> None:
        """Take in verdicts: drop what is recorded or refused, send on what came to the wrong node."""
        for token in answer.recorded:
            self._drop(token)
        for record in answer.others:
            match record.verdict:
                case pb.OUTCOME_VERDICT_RECORDED:
                    self._drop(record.lease_token)
                case pb.OUTCOME_VERDICT_LEASE_LOST | pb.OUTCOME_VERDICT_UNKNOWN_TOKEN:
                    self.refused_count += self._drop(record.lease_token)
                case pb.OUTCOME_VERDICT_NOT_LEADER:
                    self._not_leader(record.lease_token, stream, record.leader)

    def term_started(self, shards: set[int], stream: NodeStream) -> None:
        """Send outcomes of these shards, whose new leader is at `stream`, whether they were sent before or not."""
        for attempt in self.unrecorded.values():
            if attempt.shard in shards and not attempt.is_queued:
                self._queue(attempt, stream)

    def closed(self, stream: NodeStream) -> None:
        """Send elsewhere, or later, what was queued or unanswered on a stream that has ended."""
        for attempt in stream.outcomes:
            attempt.is_queued = False
        for attempt in self.unrecorded.values():
            if attempt.sent_on == stream.serial:
                attempt.sent_on = 0
            if not attempt.sent_on and not attempt.is_queued:
                self._route(attempt)

    def welcomed(self) -> None:
        """Try the homeless again, since one more node is there."""
        serving = [stream for stream in self._streams.values() if stream.is_serving]
        self._turn += 1
        for attempt in list(self._homeless.values()):
            leader = self._terms.leader(attempt.shard)
            self._queue(attempt, leader or serving[self._turn % len(serving)])

    def tick(self, now: Micros) -> None:
        """Try the homeless again, each time at another node as long as no leader is known."""
        if self._homeless and now - self._housed_at >= RESEND_DELAY:
            self._housed_at = now
            if any(stream.is_serving for stream in self._streams.values()):
                self.welcomed()

    def _drop(self, token: bytes) -> bool:
        attempt = self.unrecorded.pop(token, None)
        if attempt is None:
            return False
        if type(attempt.outcome) is Success:
            self._bytes -= len(attempt.outcome.result)
        if self._homeless:
            self._homeless.pop(token, None)
        attempt.phase = Phase.FORGOTTEN
        for stream in self._streams.values():
            stream.forget(token)
        return True

    def _not_leader(self, token: bytes, stream: NodeStream, leader: str) -> None:
        attempt = self.unrecorded.get(token)
        if attempt is None or attempt.is_queued or attempt.sent_on != stream.serial:
            return  # It is already on its way to another one.
        attempt.sent_on = 0
        for other in (self._reach.stream_at(leader), self._terms.leader(attempt.shard)):
            if other is not None and other is not stream and other.is_serving:
                self._queue(attempt, other)
                return
        self._homeless[token] = attempt

    def _route(self, attempt: Attempt) -> None:
        stream = self._terms.leader(attempt.shard) or self._origin(attempt)
        if stream is None:
            self._homeless[attempt.token] = attempt
        else:
            self._queue(attempt, stream)

    def _origin(self, attempt: Attempt) -> NodeStream | None:
        origin = self._streams.get(attempt.address)
        if origin is not None and origin.is_serving:
            return origin
        return next((stream for stream in self._streams.values() if stream.is_serving), None)

    def _queue(self, attempt: Attempt, stream: NodeStream) -> None:
        if self._homeless:
            self._homeless.pop(attempt.token, None)
        attempt.is_queued = True
        stream.outcomes.append(attempt)
