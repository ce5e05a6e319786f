"""The writes of a commit as the arguments of one SQL function, and its rows as answers.

`migrations/0002_writes.sql` says what the arguments are. Building and encoding them is most of what a write costs the
node, so: one list for each column, made by one comprehension; names joined to one string; one value for a column that
is the same throughout, as most are; nothing at all for one that has its default throughout.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from duecourse.model import bounds
from duecourse.server.core.task import (
    DEFAULT_POLICY,
    Attempt,
    AttemptOutcome,
    Delivery,
    Epoch,
    Lane,
    ShardId,
    TaskState,
)
from duecourse.server.core.writes import Insert, Update
from duecourse.server.storage import Committed, Existing, ShardBatch, Stale, codec, queries
from duecourse.server.storage.connections import Row

_COMMIT: Final = queries.statements("writes.sql")["commit"]

_STALE, _TAKEN, _MISMATCHED, _DELIVERED = range(4)

_SEPARATOR: Final = "\x1f"
_join = _SEPARATOR.join

Value = TypeVar("Value")
Queue = tuple[str, str]
"""Namespace and name."""

_JSON: Final = "application/json"
_content_types: dict[str, bytes] = {_JSON: _JSON.encode()}
_CACHE_LIMIT: Final = 1_024


@dataclass(slots=True)
class CommitCall:
    """One commit on its way to the server."""

    batches: Sequence[ShardBatch]
    statement: str
    arguments: list[Any]
    queues: set[Queue]
    """The queues that it creates unless they exist."""
    _inserts: list[tuple[ShardId, int]]
    _updates: list[tuple[ShardId, int]]
    """Whose write it is, by the order in which the function counts."""

    @classmethod
    def of(cls, batches: Sequence[ShardBatch], known_queues: set[Queue]) -> "CommitCall":
        """Build a call. No shard occurs twice in `batches`."""
        batches = sorted(batches, key=lambda batch: batch.fence.shard)
        fences = [batch.fence for batch in batches]
        inserts = [insert for batch in batches for insert in batch.inserts]
        lanes = _once([insert.task.lane for insert in inserts])
        queues = {(lane.namespace, lane.queue) for lane in lanes} - known_queues
        grants: list[Update] = []
        successes: list[Update] = []
        others: list[Update] = []
        places: tuple[list[tuple[ShardId, int]], ...] = ([], [], [])
        for batch in batches:
            shard = batch.fence.shard
            for index, update in enumerate(batch.updates):
                if update.is_grant:
                    grants.append(update)
                    places[0].append((shard, index))
                elif _is_plain_success(update):
                    successes.append(update)
                    places[1].append((shard, index))
                else:
                    others.append(update)
                    places[2].append((shard, index))
        updates = [*grants, *successes, *others]
        columns: dict[str, Any] = {
            "f_shard": [fence.shard for fence in fences],
            "f_epoch": [fence.epoch for fence in fences],
            "f_holder": [fence.holder for fence in fences],
        }
        if queues:
            columns |= _queue_columns(queues)
        if inserts:
            columns |= _insert_columns(inserts, lanes)
        if grants:
            columns |= _grant_columns(grants)
        if successes:
            columns |= _success_columns(successes)
        if others:
            columns |= _update_columns(others)
        archived = [(number, update) for number, update in enumerate(updates, start=1) if update.archive is not None]
        if archived:
            columns |= _archive_columns(archived)
        insert_places = [(batch.fence.shard, index) for batch in batches for index in range(len(batch.inserts))]
        update_places = [*places[0], *places[1], *places[2]]
        return cls(batches, _statement(tuple(columns)), list(columns.values()), queues, insert_places, update_places)

    def answers(self, rows: Sequence[Row]) -> Mapping[ShardId, Committed | Stale]:
        """Return what became of the shards. If some are stale they are all there is: nothing was written."""
        if rows and rows[0][0] == _STALE:
            return {ShardId(shard): Stale(Epoch(epoch), holder) for _, shard, epoch, holder, _, _ in rows}
        committed = {batch.fence.shard: Committed({}, set(), {}) for batch in self.batches}
        for kind, place, _, first, second, third in rows:
            if kind == _DELIVERED:
                shard, index = self._updates[place - 1]
                committed[shard].deliveries[index] = _delivery(first, second, third)
            elif kind == _TAKEN:
                shard, index = self._inserts[place - 1]
                committed[shard].taken[index] = Existing(first, second)
            else:
                assert kind == _MISMATCHED, f"no such kind: {kind}"
                shard, index = self._updates[place - 1]
                committed[shard].mismatched.add(index)
        return committed


def _delivery(payload: bytes, content_type: bytes, headers: bytes | None) -> Delivery | Literal[False]:
    try:
        return Delivery(payload, content_type.decode(), codec.strings_of(headers) if headers else {})
    except (ValueError, AttributeError):
        return False


@functools.cache
def _statement(names: tuple[str, ...]) -> str:
    """Return the call with the arguments that are there: one statement for each mixture of kinds of writes."""
    arguments = ", ".join(f"{name} => ${number}" for number, name in enumerate(names, start=1))
    return _COMMIT.replace("$arguments", arguments)


def _is_plain_success(update: Update) -> bool:
    """Tell whether an update changes only what a success changes, so that it may be sent as one."""
    progress, last = update.progress, update.task.progress
    attempt, was = progress.attempt, last.attempt
    return (
        progress.state is TaskState.SUCCEEDED
        and update.archive is None
        and attempt is not None
        and was is not None
        and attempt.outcome is AttemptOutcome.SUCCEEDED
        and attempt.failure is None
        and attempt.outcome_digest is not None
        and progress.failure_reason is None
        and progress.end_time == attempt.end_time
        and progress.returns_in_row == 0
        and progress.answers is last.answers
        and progress.round == last.round
        and progress.attempt_count == last.attempt_count
        and progress.attempts_used == last.attempts_used
        and progress.cancel_requested == last.cancel_requested
        and progress.earlier_attempt_may_run == last.earlier_attempt_may_run
        and attempt.epoch == was.epoch
        and attempt.sign_of_life == was.sign_of_life
        and attempt.progress is was.progress
    )


def _queue_columns(queues: set[Queue]) -> dict[str, Any]:
    # In one order everywhere: two commits that create the same queues then wait for each other in line, not in a ring.
    ordered = sorted(queues)
    return {"q_namespace": [namespace for namespace, _ in ordered], "q_name": [name for _, name in ordered]}


def _insert_columns(inserts: list[Insert], lanes: list[Lane]) -> dict[str, Any]:
    """Make the columns of new tasks, whose lanes are `lanes`: one alone if they are all the same."""
    tasks = [insert.task for insert in inserts]
    submissions = [insert.submission for insert in inserts]
    headers = [submission.headers for submission in submissions]
    labels = [submission.labels for submission in submissions]
    return {
        "i_place": [insert.task.shard * bounds.SLOTS + insert.submission.slot for insert in inserts],
        "i_namespace": _join_once([lane.namespace for lane in lanes], len(inserts)),
        "i_task_id": _join([task.key.task_id for task in tasks]),
        "i_queue": _join_once([lane.queue for lane in lanes], len(inserts)),
        "i_task_type": _join_once([lane.task_type for lane in lanes], len(inserts)),
        "i_priority": _unless_all([lane.priority for lane in lanes], 0),
        "i_fairness_key": _join_once([lane.fairness_key for lane in lanes], len(inserts)),
        "i_lane_hash": _once([codec.lane_hash(lane) for lane in lanes]),
        "i_uid": _packed([task.uid for task in tasks]),
        "i_sequence": [task.sequence for task in tasks],
        "i_run_at": [task.run_at for task in tasks],
        "i_create_time": _once([task.create_time for task in tasks]),
        "i_policy": [
            codec.policy_to_bytes(policy) for policy in _unless_all([task.policy for task in tasks], DEFAULT_POLICY)
        ],
        "i_headers": [codec.strings_to_bytes(one) for one in headers] if any(headers) else [],
        "i_labels": [_labels(one) for one in labels] if any(labels) else [],
        "i_content_type": [_content_type(one) for one in _once([one.content_type for one in submissions])],
        "i_payload": [submission.payload for submission in submissions],
        "i_fingerprint": _packed([submission.fingerprint for submission in submissions]),
    }


def _grant_columns(grants: list[Update]) -> dict[str, Any]:
    tasks = [update.task for update in grants]
    progresses = [update.progress for update in grants]
    attempts = [progress.attempt for progress in progresses if progress.attempt is not None]
    assert len(attempts) == len(grants), "a grant opens an attempt"
    numbers = [attempt.number for attempt in attempts]
    attempts_used = [progress.attempts_used for progress in progresses]
    lease_times = [attempt.lease_time for attempt in attempts]
    fencing_tokens = [attempt.fencing_token for attempt in attempts]
    return {
        "grants": len(grants),
        "g_namespace": _join_once([task.key.namespace for task in tasks]),
        "g_task_id": _join([task.key.task_id for task in tasks]),
        "g_revision": _once([progress.revision for progress in progresses]),
        "g_round": _unless_all([attempt.round for attempt in attempts], 1),
        "g_number": _once(numbers),
        "g_attempts_used": attempts_used if attempts_used != numbers else [],
        "g_lease_token": _packed([attempt.lease_token for attempt in attempts]),
        "g_worker": _join_once([attempt.worker for attempt in attempts]),
        "g_incarnation": _join_once([attempt.incarnation for attempt in attempts]),
        "g_node": _join_once([attempt.node for attempt in attempts]),
        "g_epoch": _once([attempt.epoch for attempt in attempts]),
        "g_fencing_token": fencing_tokens if fencing_tokens != lease_times else [],
        "g_lease_time": _once(lease_times),
        "g_latest_due_time": max(progress.due_time or 0 for progress in progresses),
    }


def _success_columns(successes: list[Update]) -> dict[str, Any]:
    tasks = [update.task for update in successes]
    attempts = [update.progress.attempt for update in successes if update.progress.attempt is not None]
    result_types, results = _result_columns(successes)
    return {
        "successes": len(successes),
        "s_namespace": _join_once([task.key.namespace for task in tasks]),
        "s_task_id": _join([task.key.task_id for task in tasks]),
        "s_revision": _once([update.progress.revision for update in successes]),
        "s_start_time": [attempt.start_time for attempt in attempts],
        "s_end_time": _once([attempt.end_time for attempt in attempts]),
        "s_outcome_digest": _once([attempt.outcome_digest for attempt in attempts]),
        "s_result_type": result_types,
        "s_result": results,
    }


def _update_columns(updates: list[Update]) -> dict[str, Any]:
    tasks = [update.task for update in updates]
    progresses = [update.progress for update in updates]
    attempts = [progress.attempt for progress in progresses]
    failures = [attempt and attempt.failure for attempt in attempts]
    result_types, results = _result_columns(updates)
    return {
        "u_namespace": _join([task.key.namespace for task in tasks]),
        "u_task_id": _join([task.key.task_id for task in tasks]),
        "u_state": [progress.state for progress in progresses],
        "u_due_time": [progress.due_time for progress in progresses],
        "u_revision": [progress.revision for progress in progresses],
        "u_round": [progress.round for progress in progresses],
        "u_attempt_count": [progress.attempt_count for progress in progresses],
        "u_attempts_used": [progress.attempts_used for progress in progresses],
        "u_returns_in_row": [progress.returns_in_row for progress in progresses],
        "u_cancel_requested": [progress.cancel_requested for progress in progresses],
        "u_earlier_attempt_may_run": [progress.earlier_attempt_may_run for progress in progresses],
        "u_epoch": [attempt and attempt.epoch for attempt in attempts],
        "u_sign_of_life": [attempt and attempt.sign_of_life for attempt in attempts],
        "u_start_time": [attempt and attempt.start_time for attempt in attempts],
        "u_attempt_end_time": [attempt and attempt.end_time for attempt in attempts],
        "u_outcome": [attempt and attempt.outcome for attempt in attempts],
        "u_failure_type": [failure and failure.type.encode() for failure in failures],
        "u_failure_message": [failure and failure.message.encode() for failure in failures],
        "u_outcome_digest": [attempt and attempt.outcome_digest for attempt in attempts],
        "u_progress": _said(attempts),
        "u_end_time": [progress.end_time for progress in progresses],
        "u_failure_reason": [progress.failure_reason for progress in progresses],
        "u_answers": [codec.answers_to_bytes(progress.answers) for progress in progresses],
        "u_result_type": result_types,
        "u_result": results,
    }


def _archive_columns(archived: list[tuple[int, Update]]) -> dict[str, Any]:
    tasks = [update.task for _, update in archived]
    attempts = [update.archive for _, update in archived if update.archive is not None]
    failures = [attempt.failure for attempt in attempts]
    return {
        "a_of": [number for number, _ in archived],
        "a_namespace": _join([task.key.namespace for task in tasks]),
        "a_task_id": _join([task.key.task_id for task in tasks]),
        "a_number": [attempt.number for attempt in attempts],
        "a_round": [attempt.round for attempt in attempts],
        "a_epoch": [attempt.epoch for attempt in attempts],
        "a_fencing_token": [attempt.fencing_token for attempt in attempts],
        "a_lease_time": [attempt.lease_time for attempt in attempts],
        "a_sign_of_life": [attempt.sign_of_life for attempt in attempts],
        "a_start_time": [attempt.start_time for attempt in attempts],
        "a_end_time": [attempt.end_time for attempt in attempts],
        "a_lease_token": [attempt.lease_token for attempt in attempts],
        "a_worker": [attempt.worker for attempt in attempts],
        "a_incarnation": [attempt.incarnation for attempt in attempts],
        "a_node": [attempt.node for attempt in attempts],
        "a_outcome": [attempt.outcome for attempt in attempts],
        "a_failure_type": [failure and failure.type.encode() for failure in failures],
        "a_failure_message": [failure and failure.message.encode() for failure in failures],
        "a_outcome_digest": [attempt.outcome_digest for attempt in attempts],
        "a_progress": _said(attempts),
        "returned_kept": bounds.MAX_RETURNED_RECORDS,
    }


def _said(attempts: Sequence[Attempt | None]) -> list[Any]:
    return _unless_all([attempt.progress.encode() or None if attempt else None for attempt in attempts], None)


def _result_columns(updates: list[Update]) -> tuple[list[Any], list[Any]]:
    results = [update.result for update in updates]
    if results.count(None) == len(results):
        return [], []
    types = [None if result is None else _content_type(result[1]) for result in results]
    return types, [None if result is None else result[0] for result in results]


def _once(values: list[Value]) -> list[Value]:
    """Return a column that is the same throughout as its first value alone."""
    return values[:1] if values and values.count(values[0]) == len(values) else values


def _join_once(names: list[str], rows: int = 0) -> str:
    """Join names; return one that is the same throughout alone, unless it would fall apart.

    A single name may stand for so many `rows`.
    """
    first = names[0]
    if names.count(first) < len(names):
        return _join(names)
    return first if _SEPARATOR not in first else _join([first] * max(rows, len(names)))


def _packed(values: list[bytes]) -> bytes:
    """Join strings of bytes that are all equally long."""
    packed = b"".join(values)
    assert len(packed) == len(values) * len(values[0]), "equally long"
    return packed


def _unless_all(values: list[Value], default: Value) -> list[Value]:
    return [] if values.count(default) == len(values) else values


def _labels(labels: dict[str, str]) -> str | None:
    return json.dumps(labels) if labels else None


def _content_type(content_type: str) -> bytes:
    known = _content_types.get(content_type)
    if known is None:
        if len(_content_types) >= _CACHE_LIMIT:
            _content_types.clear()
        known = _content_types[content_type] = content_type.encode()
    return known
