"""The worker's messages, built from what the protocol machine decided. No other module fills in these protobufs.

Attempts are written straight into the message that carries them: a message built apart and copied costs twice as much.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.v1 import worker_service_pb2 as pb
from duecourse.worker.attempt import RETURNED, Attempt, Failed, FailureKind, Phase, Success

Request = pb.StreamAssignmentsRequest

_KINDS: Final = {
    FailureKind.RETRYABLE: pb.FAILURE_KIND_RETRYABLE,
    FailureKind.NON_RETRYABLE: pb.FAILURE_KIND_NON_RETRYABLE,
    FailureKind.TIMED_OUT: pb.FAILURE_KIND_TIMED_OUT,
    FailureKind.CANCELLED: pb.FAILURE_KIND_CANCELLED,
}


def succeeded(number: int, attempts: Iterable[Attempt], now: Micros) -> Request:
    """Build Succeeded from attempts whose outcome is a Success."""
    message = Request(number=number)
    add = message.succeeded.attempts.add
    for attempt in attempts:
        success = add()
        _refer(success.attempt, attempt, now)
        outcome = attempt.outcome
        assert isinstance(outcome, Success)
        if outcome.content_type:
            success.result = outcome.result
            success.content_type = outcome.content_type
    return message


def failed(number: int, attempts: Iterable[Attempt], now: Micros) -> Request:
    """Build Failed from attempts whose outcome is a Failed."""
    message = Request(number=number)
    add = message.failed.attempts.add
    for attempt in attempts:
        failure = add()
        _refer(failure.attempt, attempt, now)
        outcome = attempt.outcome
        assert isinstance(outcome, Failed)
        failure.kind = _KINDS[outcome.kind]
        failure.failure.type = outcome.type
        failure.failure.message = outcome.message
        if outcome.retry_after is not None:
            failure.retry_after.seconds, rest = divmod(outcome.retry_after, bounds.SECOND)
            failure.retry_after.nanos = rest * 1_000
    return message


def returned(number: int, attempts: Iterable[Attempt]) -> Request:
    """Build Returned from attempts that did not start."""
    message = Request(number=number)
    add = message.returned.attempts.add
    for attempt in attempts:
        reference = add()
        reference.lease_token = attempt.token
        reference.task_id = attempt.task_id
    return message


def started(number: int, attempts: Iterable[Attempt], now: Micros) -> Request:
    """Build Started from attempts that run."""
    message = Request(number=number)
    add = message.started.attempts.add
    for attempt in attempts:
        _refer(add(), attempt, now)
    return message


def heartbeat(
    number: int, last_assignments: int, count: int, digest: int, progress: Iterable[Attempt], now: Micros
) -> Request:
    """Build a WorkerHeartbeat with the progress of attempts that run."""
    message = Request(number=number)
    beat = message.heartbeat
    beat.last_assignments = last_assignments
    beat.lease_count = count
    beat.lease_digest = digest
    for attempt in progress:
        reference = beat.progress.add()
        _refer(reference, attempt, now)
        reference.progress = attempt.progress
    return message


def leases_held(number: int, answers: int, last_assignments: int, attempts: Iterable[Attempt]) -> Request:
    """Build LeasesHeld from all that is held."""
    message = Request(number=number)
    held = message.leases_held
    held.answers = answers
    held.last_assignments = last_assignments
    for attempt in attempts:
        lease = held.leases.add()
        lease.lease_token = attempt.token
        lease.task_id = attempt.task_id
        lease.started = attempt.phase is not Phase.WAITING and attempt.outcome is not RETURNED
    return message


def credit(number: int, delta: int, task_type_deltas: Mapping[str, int]) -> Request:
    """Build Credit."""
    message = Request(number=number)
    message.credit.delta = delta
    if task_type_deltas:
        message.credit.task_type_deltas.update(task_type_deltas)
    return message


def goodbye(number: int) -> Request:
    """Build Goodbye."""
    return Request(number=number, goodbye=pb.Goodbye())


def _refer(reference: pb.AttemptRef, attempt: Attempt, now: Micros) -> None:
    reference.lease_token = attempt.token
    reference.task_id = attempt.task_id
    ago = now - attempt.started_at
    if ago < bounds.SECOND:
        reference.started_ago.nanos = ago * 1_000
    else:
        reference.started_ago.seconds = ago // bounds.SECOND
        reference.started_ago.nanos = ago % bounds.SECOND * 1_000
