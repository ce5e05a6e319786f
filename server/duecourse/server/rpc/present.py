"""From the domain to an answer: tasks, attempts, submissions, cancellations and the cluster as clients see them."""

from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core import effects, task
from duecourse.server.core.errors import DomainError
from duecourse.server.rpc import ClusterDescription, NodeDescription, ShardStanding, status
from duecourse.server.storage import CorruptRecord, StoredTask
from duecourse.v1 import cluster_service_pb2, task_pb2, task_service_pb2

STATES: Final = {state: task_pb2.TaskState.Value(f"TASK_STATE_{state.name}") for state in task.TaskState}
_OUTCOMES: Final = {
    outcome: task_pb2.AttemptOutcome.Value(f"ATTEMPT_OUTCOME_{outcome.name}") for outcome in task.AttemptOutcome
}
_REASONS: Final = {
    reason: task_pb2.FailureReason.Value(f"FAILURE_REASON_{reason.name}") for reason in task.FailureReason
}
_CANCEL_RESULTS: Final = {
    result: task_service_pb2.CancelResult.Value(f"CANCEL_RESULT_{result.name}") for result in effects.CancelResult
}
_STANDINGS: Final = {
    standing: cluster_service_pb2.ShardState.Value(f"SHARD_STATE_{standing.name}") for standing in ShardStanding
}


def submitted(task_id: str, answer: effects.Submitted, message: task_service_pb2.SubmittedTask) -> None:
    """Fill in the answer to a submission that is durable."""
    message.task_id = task_id
    message.uid = answer.uid
    message.created = answer.created


def result(task_id: str, answer: effects.Submitted | DomainError, message: task_service_pb2.SubmitTaskResult) -> None:
    """Fill in the answer to one item of a batch."""
    if isinstance(answer, effects.Submitted):
        submitted(task_id, answer, message.submitted)
    else:
        status.item_error(answer, message.error)


def cancelled(answer: effects.Cancelled) -> task_service_pb2.CancelTaskResponse:
    """Make the answer to a cancellation."""
    return task_service_pb2.CancelTaskResponse(
        result=_CANCEL_RESULTS[answer.result],
        state=STATES[answer.state],
        earlier_attempt_may_run=answer.earlier_attempt_may_run,
    )


def stored_task(stored: StoredTask, message: task_pb2.Task, *, full: bool) -> None:
    """Fill in a task as a read returns it."""
    one = stored.task
    lane = one.lane
    message.namespace = one.namespace
    message.task_id = one.task_id
    message.uid = one.uid
    message.queue = lane.queue
    message.task_type = lane.task_type
    message.priority = lane.priority
    message.fairness_key = lane.fairness_key
    message.content_type = stored.content_type
    message.headers.update(stored.headers)
    message.labels.update(stored.labels)
    _set_instant(message.run_at, one.run_at)
    _set_instant(message.create_time, one.create_time)
    _set_policy(message, one.policy)
    _set_progress(message, one.progress)
    if stored.result is not None:
        message.result_content_type = stored.result[1]
    if not full:
        return
    message.payload = stored.payload
    if stored.result is not None:
        message.result = stored.result[0]
    for attempt in stored.attempts:
        _set_attempt(message.attempts.add(), attempt, one.shard)


def corrupt(record: CorruptRecord, message: task_pb2.Task) -> None:
    """Fill in what is known of a task that does not decode: it is listed, not hidden."""
    message.namespace, message.task_id = record.key
    message.revision = record.revision
    message.state = task_pb2.TASK_STATE_FAILED
    message.failure_reason = task_pb2.FAILURE_REASON_RECORD_CORRUPT
    # What it says is not known; clients take no word that says nothing.
    message.on_lost_attempt = task_pb2.ON_LOST_ATTEMPT_RETRY


def cluster(description: ClusterDescription) -> cluster_service_pb2.GetClusterResponse:
    """Make the description of the cluster."""
    response = cluster_service_pb2.GetClusterResponse(
        coordination=description.coordination,
        answering_node=description.node_id,
        worker_streams=description.worker_streams,
    )
    for node in description.nodes:
        _set_node(response.nodes.add(), node)
    for shard in description.shards:
        response.shards.add(
            shard=shard.shard,
            slot_from=shard.slot_from,
            slot_until=shard.slot_until,
            state=_STANDINGS[shard.state],
            leader=shard.leader,
            epoch=shard.epoch,
            tasks_in_memory=shard.tasks_in_memory,
            leases=shard.leases,
        )
    return response


def _set_node(message: cluster_service_pb2.Node, node: NodeDescription) -> None:
    message.node_id = node.node_id
    message.address = node.address
    message.version = node.version
    message.ineligible_reason = node.ineligible_reason
    message.answered = node.has_answered
    if node.has_answered:
        message.wall_clock_offset.FromMicroseconds(node.wall_clock_offset)
        message.clock_uncertainty.FromMicroseconds(node.clock_uncertainty)
        message.ready_tasks = node.ready_tasks
        message.oldest_ready_age.FromMicroseconds(node.oldest_ready_age)
        message.worker_streams = node.worker_streams
        message.incarnation = node.incarnation


def _set_policy(message: task_pb2.Task, policy: task.Policy) -> None:
    retries = message.retry_policy
    retries.max_attempts = policy.max_attempts
    retries.multiplier = policy.multiplier
    retries.jitter = policy.jitter
    _set_duration(retries.initial_backoff, policy.initial_backoff)
    _set_duration(retries.max_backoff, policy.max_backoff)
    _set_duration(message.attempt_timeout, policy.attempt_timeout)
    if policy.start_deadline is not None:
        _set_instant(message.start_deadline, policy.start_deadline)
    if policy.completion_deadline is not None:
        _set_instant(message.completion_deadline, policy.completion_deadline)
    message.on_lost_attempt = task_pb2.ON_LOST_ATTEMPT_FAIL if policy.fail_when_lost else task_pb2.ON_LOST_ATTEMPT_RETRY


def _set_progress(message: task_pb2.Task, progress: task.Progress) -> None:
    message.state = STATES[progress.state]
    message.cancel_requested = progress.cancel_requested
    message.revision = progress.revision
    message.round = progress.round
    message.attempt_count = progress.attempt_count
    if progress.failure_reason is not None:
        message.failure_reason = _REASONS[progress.failure_reason]
    if progress.due_time is not None:
        _set_instant(message.due_time, progress.due_time)
    if progress.end_time is not None:
        _set_instant(message.end_time, progress.end_time)


def _set_attempt(message: task_pb2.Attempt, attempt: task.Attempt, shard: task.ShardId) -> None:
    message.number = attempt.number
    message.round = attempt.round
    message.worker = attempt.worker
    message.incarnation = attempt.incarnation
    message.node = attempt.node
    message.shard = shard
    message.epoch = attempt.epoch
    message.fencing_token = attempt.fencing_token
    _set_instant(message.lease_time, attempt.lease_time)
    if attempt.start_time is not None:
        _set_instant(message.start_time, attempt.start_time)
    if attempt.end_time is not None:
        _set_instant(message.end_time, attempt.end_time)
    if attempt.outcome is not None:
        message.outcome = _OUTCOMES[attempt.outcome]
    if attempt.failure is not None:
        message.failure.type = attempt.failure.type
        message.failure.message = attempt.failure.message
    message.progress = attempt.progress


def _set_instant(message: Timestamp, instant: Micros) -> None:
    # Naming the message in its parent needs a field to be set, also when both are zero.
    message.SetInParent()
    message.seconds, micros = divmod(instant, bounds.SECOND)
    message.nanos = micros * 1_000


def _set_duration(message: Duration, duration: Micros) -> None:
    message.SetInParent()
    message.seconds, micros = divmod(duration, bounds.SECOND)
    message.nanos = micros * 1_000
