"""Rows of Postgres to tasks and attempts.

A row that does not decode becomes a `CorruptRecord`, so that it stops nobody but itself. The order of the columns is
that of `task_columns` and `attempt_columns` in `sql/reads.sql`.
"""

import json
from typing import Any, Final

from duecourse.model import bounds
from duecourse.server.core.task import (
    HELD,
    TERMINAL,
    Attempt,
    AttemptOutcome,
    DueKey,
    Failure,
    FailureReason,
    Lane,
    Progress,
    Task,
    TaskKey,
    TaskState,
)
from duecourse.server.storage import CorruptRecord, StoredTask, codec
from duecourse.server.storage.connections import Row

TASK_COLUMNS: Final = 41
"""How many columns a task takes; others may follow them."""

_SHARD, _REVISION = 2, 14
_PAYLOAD_COLUMNS: Final = 3
_ALWAYS_THERE: Final = 10
"""So many columns of an attempt are there from its grant on."""
_CACHE_LIMIT: Final = 4_096

_UNDECODABLE: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What decoding raises, whatever is in a column: also NULL where there should be something."""
_LARGEST: Final = 2**31 - 16
"""Of what a row counts in 32 bits: it has to be counted on for an attempt at least."""

_states = {state.value: state for state in TaskState}
_lanes: dict[Lane, Lane] = {}


def task_of(row: Row) -> Task | CorruptRecord:
    """Return the task that a row begins with."""
    try:
        return _decode_task(row)
    except _UNDECODABLE as error:
        key = TaskKey(row[0], row[1])
        return CorruptRecord(row[_SHARD], key, row[_REVISION], f"{type(error).__name__}: {error}")


def lane_of(row: Row) -> Lane:
    """Return the lane of a task's row, whether the rest decodes or not."""
    return _shared(Lane(row[0], row[3], row[4], row[5], row[6]))


def due_key_of(row: Row) -> DueKey:
    """Return the place in its lane of a waiting task's row, whether the rest decodes or not."""
    return DueKey(row[13], row[8])


def stored_task_of(row: Row) -> StoredTask | CorruptRecord:
    """Return the task of a row that goes on with headers, labels, content type and maybe payload and result."""
    task = task_of(row)
    if isinstance(task, CorruptRecord):
        return task
    headers, labels, content_type, *rest = row[TASK_COLUMNS:]
    payload, result_type, result = rest if len(rest) == _PAYLOAD_COLUMNS else (None, None, None)
    try:
        return StoredTask(
            task,
            payload or b"",
            content_type.decode(),
            codec.strings_of(headers),
            _labels_of(labels),
            None if result_type is None else (result or b"", result_type.decode()),
            [],
        )
    except _UNDECODABLE as error:
        return CorruptRecord(task.shard, task.key, task.progress.revision, f"{type(error).__name__}: {error}")


def attempt_of(row: Row | list[Any]) -> Attempt | None:
    """Return the attempt of a row, None if it does not decode."""
    try:
        return _decode_attempt(row)
    except _UNDECODABLE:
        return None


def _labels_of(labels: str | None) -> dict[str, str]:
    found = json.loads(labels) if labels else {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("labels are no strings by name")
    return found


def _decode_attempt(row: Row | list[Any]) -> Attempt:
    (
        lease_token,
        number,
        of_round,
        worker,
        incarnation,
        node,
        epoch,
        fencing_token,
        lease_time,
        sign_of_life,
        start_time,
        end_time,
        outcome,
        failure_type,
        failure_message,
        outcome_digest,
        progress,
    ) = row
    if None in row[:_ALWAYS_THERE]:
        raise ValueError("an attempt without all that it begins with")
    failure = None
    if failure_type is not None:
        failure = Failure(failure_type.decode(), failure_message.decode())
    return Attempt(
        number,
        of_round,
        lease_token,
        worker,
        incarnation,
        node,
        epoch,
        fencing_token,
        lease_time,
        sign_of_life,
        start_time,
        end_time,
        None if outcome is None else AttemptOutcome(outcome),
        failure,
        outcome_digest,
        "" if progress is None else progress.decode(),
    )


def _decode_task(row: Row) -> Task:
    (
        namespace,
        task_id,
        shard,
        queue,
        task_type,
        priority,
        fairness_key,
        uid,
        sequence,
        run_at,
        create_time,
        policy,
        state_word,
        due_time,
        revision,
        in_round,
        attempt_count,
        attempts_used,
        returns_in_row,
        cancel_requested,
        earlier_attempt_may_run,
        end_time,
        failure_reason,
        answers,
        *attempt_columns,
    ) = row[:TASK_COLUMNS]
    state = _states[state_word]
    attempt = None if attempt_columns[0] is None else _decode_attempt(attempt_columns)
    progress = Progress(
        state,
        due_time,
        revision,
        in_round,
        attempt_count,
        attempts_used,
        returns_in_row,
        cancel_requested,
        earlier_attempt_may_run,
        attempt,
        end_time,
        None if failure_reason is None else FailureReason(failure_reason),
        codec.answers_of(answers),
    )
    is_in_time = 0 <= run_at <= codec.LAST_INSTANT and 0 <= create_time <= codec.LAST_INSTANT
    if not bounds.MIN_PRIORITY <= priority <= bounds.MAX_PRIORITY or sequence < 0 or not is_in_time:
        raise ValueError(f"out of range: priority {priority}, sequence {sequence}, {run_at=}, {create_time=}")
    _check(progress)
    lane = _shared(Lane(namespace, queue, task_type, priority, fairness_key))
    return Task(
        TaskKey(namespace, task_id), shard, lane, uid, sequence, run_at, create_time, codec.policy_of(policy), progress
    )


def _check(progress: Progress) -> None:
    """Raise ValueError for a progress that no transition makes."""
    state, attempt = progress.state, progress.attempt
    if (state in TERMINAL) != (progress.due_time is None) or (state in TERMINAL) != (progress.end_time is not None):
        raise ValueError(f"{state.value}, due {progress.due_time}, ended {progress.end_time}")
    if (state in HELD) != (attempt is not None and attempt.outcome is None):
        raise ValueError(f"{state.value}, attempt {attempt and (attempt.number, attempt.outcome)}")
    if state is TaskState.RUNNING and attempt is not None and attempt.start_time is None:
        raise ValueError("running, and never begun")
    counts = (progress.attempts_used, progress.returns_in_row, progress.due_time or 0, progress.end_time or 0)
    counted = (progress.revision, progress.round, progress.attempt_count, progress.returns_in_row)
    if max(counted) > _LARGEST or max(counts[2:]) > codec.LAST_INSTANT:
        raise ValueError(f"beyond counting: {counted}, due and ended {counts[2:]}")
    if progress.revision < 1 or progress.round < 1 or min(counts) < 0 or progress.attempt_count < counts[0]:
        raise ValueError(f"out of range: revision {progress.revision}, round {progress.round}, counts {counts}")


def _shared(lane: Lane) -> Lane:
    """Return the one object that stands for a lane: many tasks share it."""
    known = _lanes.get(lane)
    if known is None:
        if len(_lanes) >= _CACHE_LIMIT:
            _lanes.clear()
        known = _lanes[lane] = lane
    return known
