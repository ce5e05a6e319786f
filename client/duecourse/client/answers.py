"""From the API's answers to the edge's values. An answer that does not make sense is a `ServerFault`."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final, TypeVar

from google.protobuf import duration_pb2, timestamp_pb2

from duecourse.client import cluster, errors, tasks
from duecourse.v1 import cluster_service_pb2, task_pb2, task_service_pb2

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_Word = TypeVar("_Word", bound=StrEnum)


def task(message: task_pb2.Task, *, full: bool) -> tasks.Task:
    """Read a task; payload, result and attempts only from a full view."""
    return tasks.Task(
        namespace=message.namespace,
        task_id=message.task_id,
        uid=message.uid,
        queue=message.queue,
        task_type=message.task_type,
        content_type=message.content_type,
        headers=dict(message.headers),
        run_at=_instant(message.run_at),
        priority=message.priority,
        fairness_key=message.fairness_key,
        retry_policy=_retry_policy(message.retry_policy),
        attempt_timeout=_duration(message.attempt_timeout),
        start_deadline=_instant(message.start_deadline) if message.HasField("start_deadline") else None,
        completion_deadline=_instant(message.completion_deadline) if message.HasField("completion_deadline") else None,
        on_lost_attempt=_word(_LOST, message.on_lost_attempt),
        labels=dict(message.labels),
        state=_word(_STATES, message.state),
        failure_reason=_word(_REASONS, message.failure_reason) if message.failure_reason else None,
        cancel_requested=message.cancel_requested,
        revision=message.revision,
        round=message.round,
        attempt_count=message.attempt_count,
        create_time=_instant(message.create_time),
        due_time=_instant(message.due_time) if message.HasField("due_time") else None,
        end_time=_instant(message.end_time) if message.HasField("end_time") else None,
        payload=message.payload if full else None,
        result=message.result if full else None,
        result_content_type=message.result_content_type,
        attempts=tuple(map(_attempt, message.attempts)) if full else None,
    )


def page(message: task_service_pb2.ListTasksResponse) -> tasks.TaskPage:
    """Read a page of a list."""
    return tasks.TaskPage(tuple(task(item, full=False) for item in message.tasks), message.next_page_token)


def cancellation(message: task_service_pb2.CancelTaskResponse) -> tasks.Cancellation:
    """Read what a cancellation achieved."""
    return tasks.Cancellation(
        _word(_CANCEL_RESULTS, message.result), _word(_STATES, message.state), message.earlier_attempt_may_run
    )


def describe_cluster(message: cluster_service_pb2.GetClusterResponse) -> cluster.Cluster:
    """Read a node's description of its cluster."""
    return cluster.Cluster(
        coordination=message.coordination,
        answering_node=message.answering_node,
        nodes=tuple(map(_node, message.nodes)),
        shards=tuple(map(_shard, message.shards)),
        worker_streams=message.worker_streams,
    )


def _node(message: cluster_service_pb2.Node) -> cluster.Node:
    return cluster.Node(
        node_id=message.node_id,
        address=message.address,
        version=message.version,
        ineligible_reason=message.ineligible_reason,
        answered=message.answered,
        wall_clock_offset=_duration(message.wall_clock_offset),
        clock_uncertainty=_duration(message.clock_uncertainty),
        ready_tasks=message.ready_tasks,
        oldest_ready_age=_duration(message.oldest_ready_age),
        incarnation=message.incarnation,
        worker_streams=message.worker_streams,
    )


def _shard(message: cluster_service_pb2.Shard) -> cluster.Shard:
    return cluster.Shard(
        shard=message.shard,
        slot_from=message.slot_from,
        slot_until=message.slot_until,
        state=_word(_SHARD_STATES, message.state),
        leader=message.leader,
        epoch=message.epoch,
        tasks_in_memory=message.tasks_in_memory,
        leases=message.leases,
    )


def _attempt(message: task_pb2.Attempt) -> tasks.Attempt:
    has_failed = message.HasField("failure")
    return tasks.Attempt(
        number=message.number,
        round=message.round,
        worker=message.worker,
        incarnation=message.incarnation,
        node=message.node,
        shard=message.shard,
        epoch=message.epoch,
        fencing_token=message.fencing_token,
        lease_time=_instant(message.lease_time),
        start_time=_instant(message.start_time) if message.HasField("start_time") else None,
        end_time=_instant(message.end_time) if message.HasField("end_time") else None,
        outcome=_word(_OUTCOMES, message.outcome) if message.outcome else None,
        failure=tasks.Failure(type=message.failure.type, message=message.failure.message) if has_failed else None,
        progress=message.progress,
    )


def _retry_policy(message: task_pb2.RetryPolicy) -> tasks.RetryPolicy:
    return tasks.RetryPolicy(
        max_attempts=message.max_attempts if message.HasField("max_attempts") else None,
        initial_backoff=_duration(message.initial_backoff) if message.HasField("initial_backoff") else None,
        multiplier=message.multiplier if message.HasField("multiplier") else None,
        max_backoff=_duration(message.max_backoff) if message.HasField("max_backoff") else None,
        jitter=message.jitter if message.HasField("jitter") else None,
    )


def _instant(message: timestamp_pb2.Timestamp) -> datetime:
    try:
        return _EPOCH + timedelta(seconds=message.seconds, microseconds=message.nanos // 1_000)
    except OverflowError as error:
        raise errors.ServerFault(f"the server answered an instant out of range: {message.seconds} s") from error


def _duration(message: duration_pb2.Duration) -> timedelta:
    try:
        return timedelta(seconds=message.seconds, microseconds=int(message.nanos / 1_000))
    except OverflowError as error:
        raise errors.ServerFault(f"the server answered a duration out of range: {message.seconds} s") from error


def _words(kind: type[_Word], number_of: Callable[[str], int], prefix: str) -> dict[int, _Word]:
    return {number_of(prefix + word.name): word for word in kind}


def _word(words: dict[int, _Word], number: int) -> _Word:
    try:
        return words[number]
    except KeyError:
        kind = type(next(iter(words.values()))).__name__
        raise errors.ServerFault(f"the server answered a {kind} that this version does not know: {number}") from None


_STATES = _words(tasks.TaskState, task_pb2.TaskState.Value, "TASK_STATE_")
_REASONS = _words(tasks.FailureReason, task_pb2.FailureReason.Value, "FAILURE_REASON_")
_OUTCOMES = _words(tasks.AttemptOutcome, task_pb2.AttemptOutcome.Value, "ATTEMPT_OUTCOME_")
_LOST = _words(tasks.OnLostAttempt, task_pb2.OnLostAttempt.Value, "ON_LOST_ATTEMPT_")
_CANCEL_RESULTS = _words(tasks.CancelResult, task_service_pb2.CancelResult.Value, "CANCEL_RESULT_")
_SHARD_STATES = _words(cluster.ShardState, cluster_service_pb2.ShardState.Value, "SHARD_STATE_")
