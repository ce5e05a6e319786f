"""The writes of a commit as the arguments of one SQL function, and its rows as answers.

`migrations/0002_writes.sql` says what the arguments are. Building and encoding them is most of what a write costs the
node, so: one list for each column, made by one comprehension; names joined to one string; nothing at all for a column
that has its default throughout.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from duecourse.model import bounds, slots
from duecourse.server.core.task import AttemptOutcome, Delivery, Epoch, ShardId, TaskState
from duecourse.server.core.writes import Insert, Update
from duecourse.server.storage import Committed, Existing, ShardBatch, Stale, codec
from duecourse.server.storage.connections import Row

_STALE, _TAKEN, _MISMATCHED, _DELIVERED = range(4)

_join = "\x1f".join

Queue = tuple[str, str]
"""Namespace and name."""

_JSON: Final = "application/json"
_content_types: dict[str, bytes] = {_JSON: _JSON.encode()}
_CACHE_LIMIT: Final = 1_024


@dataclass(slots=True)
class CommitCall:
    """One commit on its way to the server."""

    batches: Sequence[ShardBatch]
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
        lanes = {insert.task.lane for insert in inserts}
        queues = {(lane.namespace, lane.queue) for lane in lanes} - known_queues
        new_queues = sorted(queues)
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
        arguments = [
            [fence.shard for fence in fences],
            [fence.epoch for fence in fences],
            [fence.holder for fence in fences],
            [namespace for namespace, _ in new_queues],
            [name for _, name in new_queues],
            *_insert_columns(inserts),
            *_grant_columns(grants),
            *_success_columns(successes),
            *_update_columns(others),
            *_archive_columns([*grants, *successes, *others]),
            bounds.MAX_RETURNED_RECORDS,
        ]
        insert_places = [(batch.fence.shard, index) for batch in batches for index in range(len(batch.inserts))]
        return cls(batches, arguments, queues, insert_places, [*places[0], *places[1], *places[2]])

    def answers(self, rows: Sequence[Row]) -> Mapping[ShardId, Committed | Stale]:
        """Return what became of the shards. If some are stale they are all there is: nothing was written."""
        if rows and rows[0][0] == _STALE:
            return {ShardId(shard): Stale(Epoch(epoch), holder) for _, shard, epoch, holder, _, _ in rows}
        committed = {batch.fence.shard: Committed({}, set(), {}) for batch in self.batches}
        for kind, place, _, first, second, third in rows:
            if kind == _DELIVERED:
                shard, index = self._updates[place - 1]
                delivery = Delivery(first, second.decode(), codec.strings_of(third) if third else {})
                committed[shard].deliveries[index] = delivery
            elif kind == _TAKEN:
                shard, index = self._inserts[place - 1]
                committed[shard].taken[index] = Existing(first, second)
            else:
                assert kind == _MISMATCHED, f"no such kind: {kind}"
                shard, index = self._updates[place - 1]
                committed[shard].mismatched.add(index)
        return committed


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
    )


def _insert_columns(inserts: list[Insert]) -> list[Any]:
    tasks = [insert.task for insert in inserts]
    submissions = [insert.submission for insert in inserts]
    lanes = [task.lane for task in tasks]
    return [
        [task.shard for task in tasks],
        [slots.slot_of(task.namespace, task.task_id) for task in tasks],
        _join([task.namespace for task in tasks]),
        _join([task.task_id for task in tasks]),
        _join([lane.queue for lane in lanes]),
        _join([lane.task_type for lane in lanes]),
        _unless_all([lane.priority for lane in lanes], 0),
        _join([lane.fairness_key for lane in lanes]),
        [codec.lane_hash(lane) for lane in lanes],
        [task.uid for task in tasks],
        [task.sequence for task in tasks],
        [task.run_at for task in tasks],
        [task.create_time for task in tasks],
        _unless_all([codec.policy_to_bytes(task.policy) for task in tasks], b""),
        _unless_all([codec.strings_to_bytes(submission.headers) for submission in submissions], b""),
        _unless_all([_labels(submission.labels) for submission in submissions], None),
        [_content_type(submission.content_type) for submission in submissions],
        [submission.payload for submission in submissions],
        [submission.fingerprint for submission in submissions],
    ]


def _grant_columns(grants: list[Update]) -> list[Any]:
    tasks = [update.task for update in grants]
    progresses = [update.progress for update in grants]
    attempts = [progress.attempt for progress in progresses if progress.attempt is not None]
    assert len(attempts) == len(grants), "a grant opens an attempt"
    numbers = [attempt.number for attempt in attempts]
    attempts_used = [progress.attempts_used for progress in progresses]
    lease_times = [attempt.lease_time for attempt in attempts]
    fencing_tokens = [attempt.fencing_token for attempt in attempts]
    return [
        _join([task.namespace for task in tasks]),
        _join([task.task_id for task in tasks]),
        [progress.revision for progress in progresses],
        _unless_all([attempt.round for attempt in attempts], 1),
        numbers,
        attempts_used if attempts_used != numbers else [],
        [attempt.lease_token for attempt in attempts],
        _join([attempt.worker for attempt in attempts]),
        _join([attempt.incarnation for attempt in attempts]),
        _join([attempt.node for attempt in attempts]),
        [attempt.epoch for attempt in attempts],
        fencing_tokens if fencing_tokens != lease_times else [],
        lease_times,
    ]


def _success_columns(successes: list[Update]) -> list[Any]:
    tasks = [update.task for update in successes]
    attempts = [update.progress.attempt for update in successes if update.progress.attempt is not None]
    results = [update.result for update in successes]
    return [
        _join([task.namespace for task in tasks]),
        _join([task.task_id for task in tasks]),
        [update.progress.revision for update in successes],
        [attempt.start_time for attempt in attempts],
        [attempt.end_time for attempt in attempts],
        [attempt.outcome_digest for attempt in attempts],
        *_result_columns(results),
    ]


def _update_columns(updates: list[Update]) -> list[Any]:
    tasks = [update.task for update in updates]
    progresses = [update.progress for update in updates]
    attempts = [progress.attempt for progress in progresses]
    failures = [attempt and attempt.failure for attempt in attempts]
    return [
        _join([task.namespace for task in tasks]),
        _join([task.task_id for task in tasks]),
        [progress.state for progress in progresses],
        [progress.due_time for progress in progresses],
        [progress.revision for progress in progresses],
        [progress.round for progress in progresses],
        [progress.attempt_count for progress in progresses],
        [progress.attempts_used for progress in progresses],
        [progress.returns_in_row for progress in progresses],
        [progress.cancel_requested for progress in progresses],
        [progress.earlier_attempt_may_run for progress in progresses],
        [attempt and attempt.epoch for attempt in attempts],
        [attempt and attempt.sign_of_life for attempt in attempts],
        [attempt and attempt.start_time for attempt in attempts],
        [attempt and attempt.end_time for attempt in attempts],
        [attempt and attempt.outcome for attempt in attempts],
        [failure and failure.type.encode() for failure in failures],
        [failure and failure.message.encode() for failure in failures],
        [attempt and attempt.outcome_digest for attempt in attempts],
        [progress.end_time for progress in progresses],
        [progress.failure_reason for progress in progresses],
        [codec.answers_to_bytes(progress.answers) for progress in progresses],
        *_result_columns([update.result for update in updates]),
    ]


def _archive_columns(updates: list[Update]) -> list[Any]:
    archived = [(number, update) for number, update in enumerate(updates, start=1) if update.archive is not None]
    tasks = [update.task for _, update in archived]
    attempts = [update.archive for _, update in archived if update.archive is not None]
    failures = [attempt.failure for attempt in attempts]
    return [
        [number for number, _ in archived],
        _join([task.namespace for task in tasks]),
        _join([task.task_id for task in tasks]),
        [attempt.number for attempt in attempts],
        [attempt.round for attempt in attempts],
        [attempt.epoch for attempt in attempts],
        [attempt.fencing_token for attempt in attempts],
        [attempt.lease_time for attempt in attempts],
        [attempt.sign_of_life for attempt in attempts],
        [attempt.start_time for attempt in attempts],
        [attempt.end_time for attempt in attempts],
        [attempt.lease_token for attempt in attempts],
        [attempt.worker for attempt in attempts],
        [attempt.incarnation for attempt in attempts],
        [attempt.node for attempt in attempts],
        [attempt.outcome for attempt in attempts],
        [failure and failure.type.encode() for failure in failures],
        [failure and failure.message.encode() for failure in failures],
        [attempt.outcome_digest for attempt in attempts],
    ]


def _result_columns(results: list[tuple[bytes, str] | None]) -> tuple[list[Any], list[Any]]:
    if results.count(None) == len(results):
        return [], []
    types = [None if result is None else _content_type(result[1]) for result in results]
    return types, [None if result is None else result[0] for result in results]


def _unless_all(values: list[Any], default: Any) -> list[Any]:
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
