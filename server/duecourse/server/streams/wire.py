"""The node's messages, built from what the loop decided. No other module of the server fills in these protobufs.

Assignments are written straight into the message that carries them: a message built apart and copied costs twice as
much.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from google.protobuf.duration_pb2 import Duration

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.effects import Assignment, StopReason, Verdict
from duecourse.server.core.task import Epoch, ShardId
from duecourse.v1 import worker_service_pb2 as pb

Response = pb.StreamAssignmentsResponse

VERDICTS: Final = {
    Verdict.LEASE_LOST: pb.OUTCOME_VERDICT_LEASE_LOST,
    Verdict.UNKNOWN_TOKEN: pb.OUTCOME_VERDICT_UNKNOWN_TOKEN,
}
_STOP_REASONS: Final = {
    StopReason.CANCELLED: pb.STOP_REASON_CANCELLED,
    StopReason.TIMED_OUT: pb.STOP_REASON_TIMED_OUT,
}


def welcome(
    version: int, node_id: str, stream_id: int, heartbeat: Micros, terms: Iterable[tuple[ShardId, Epoch]]
) -> Response:
    """Build Welcome. Which of the listed leases are lost is said once the shards have looked."""
    message = Response()
    answer = message.welcome
    answer.protocol_version = version
    answer.node_id = node_id
    answer.stream_id = stream_id
    _set_duration(answer.heartbeat_interval, heartbeat)
    for shard, epoch in terms:
        answer.terms.add(shard=shard, epoch=epoch)
    return message


def fill(message: pb.Assignment, assignment: Assignment) -> None:
    """Write one assignment."""
    lease = assignment.lease
    task = lease.task
    attempt = task.progress.attempt
    assert attempt is not None, "a granted task has an attempt"
    message.lease_token = lease.token
    message.shard = task.shard
    message.epoch = attempt.epoch
    message.attempt = attempt.number
    message.fencing_token = attempt.fencing_token
    _set_duration(message.lease, lease.duration)
    _set_duration(message.time_left, assignment.time_left)
    if assignment.start_within is not None:
        _set_duration(message.start_within, assignment.start_within)
    delivery = assignment.delivery
    lane = task.lane
    sent = message.task
    sent.namespace, sent.task_id = task.key
    sent.uid = task.uid
    sent.queue = lane.queue
    sent.task_type = lane.task_type
    sent.payload = delivery.payload
    sent.round = attempt.round
    run_at = sent.run_at
    run_at.seconds = task.run_at // bounds.SECOND
    run_at.nanos = task.run_at % bounds.SECOND * 1_000
    if delivery.content_type:
        sent.content_type = delivery.content_type
    if lane.fairness_key:
        sent.fairness_key = lane.fairness_key
    if lane.priority:
        sent.priority = lane.priority
    if delivery.headers:
        sent.headers.update(delivery.headers)


def outcomes_recorded(
    recorded: Sequence[bytes], others: Iterable[tuple[bytes, pb.OutcomeVerdict.ValueType, str]]
) -> Response:
    """Build OutcomesRecorded."""
    message = Response()
    answer = message.outcomes_recorded
    answer.SetInParent()
    answer.recorded.extend(recorded)
    for token, verdict, leader in others:
        answer.others.add(lease_token=token, verdict=verdict, leader=leader)
    return message


def cancel_requested(tokens: Iterable[bytes], reason: StopReason) -> Response:
    """Build CancelRequested."""
    message = Response()
    message.cancel_requested.reason = _STOP_REASONS[reason]
    message.cancel_requested.lease_tokens.extend(tokens)
    return message


def lease_lost(tokens: Iterable[bytes]) -> Response:
    """Build LeaseLost."""
    message = Response()
    message.lease_lost.lease_tokens.extend(tokens)
    return message


def term_started(request: int, terms: Iterable[tuple[ShardId, Epoch]]) -> Response:
    """Build TermStarted."""
    message = Response()
    message.term_started.request = request
    for shard, epoch in terms:
        message.term_started.terms.add(shard=shard, epoch=epoch)
    return message


def term_ended(terms: Iterable[tuple[ShardId, Epoch]]) -> Response:
    """Build TermEnded."""
    message = Response()
    message.term_ended.SetInParent()
    for shard, epoch in terms:
        message.term_ended.terms.add(shard=shard, epoch=epoch)
    return message


def leases_wanted(request: int) -> Response:
    """Build LeasesWanted."""
    message = Response()
    message.leases_wanted.request = request
    return message


def credit_returned(count: int) -> Response:
    """Build CreditReturned."""
    message = Response()
    message.credit_returned.count = count
    message.credit_returned.SetInParent()
    return message


def heartbeat(last_read: int) -> Response:
    """Build NodeHeartbeat."""
    message = Response()
    message.heartbeat.last_read = last_read
    message.heartbeat.SetInParent()
    return message


def demand(waiting: int) -> Response:
    """Build Demand."""
    message = Response()
    message.demand.waiting = waiting
    message.demand.SetInParent()
    return message


def cluster_changed(nodes: Iterable[tuple[str, str]]) -> Response:
    """Build ClusterChanged from names and addresses."""
    message = Response()
    message.cluster_changed.SetInParent()
    for node_id, address in nodes:
        message.cluster_changed.nodes.add(node_id=node_id, address=address)
    return message


def draining() -> Response:
    """Build Draining."""
    return Response(draining=pb.Draining())


def _set_duration(message: Duration, duration: Micros) -> None:
    message.seconds = duration // bounds.SECOND
    rest = duration % bounds.SECOND
    # Setting a field, be it to zero, is what makes the duration present.
    if rest:
        message.nanos = rest * 1_000
