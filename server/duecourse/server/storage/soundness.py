"""What must be true of rows, whatever happened to nodes, etcd and Postgres: the rules that `fsck` checks.

Each rule looks at one row as a single statement read it, together with what that statement found beside it: so nothing
that goes on meanwhile can make a sound row look broken. A rule says what is wrong in words for people. The columns are
those of `sql/fsck.sql`.

A task that was set aside (FAILED, record corrupt) is known to be broken: of it only the place is checked.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, cast

from duecourse.model import bounds, slots
from duecourse.server.core.task import HELD, TERMINAL, FailureReason, Lane, TaskKey, TaskState
from duecourse.server.storage import SEQUENCE_BITS, CorruptRecord, ShardRow, codec, rows
from duecourse.server.storage.connections import Row

STORED_COLUMNS: Final = rows.TASK_COLUMNS + 6
"""How many columns `rows.stored_task_of` takes."""
ATTEMPT_COLUMNS: Final = 17
"""How many columns `rows.attempt_of` takes."""
_ATTEMPTS_TOLD: Final = 100
"""So many that are missing are looked for."""


class Rule(StrEnum):
    """What can be broken."""

    SHARDS = "shards"
    """The shards cover every slot once, belong to one coordination, and their rows hold whole terms."""
    PLACE = "place"
    """A task has the slot of its id, and is in the shard that has the slot."""
    LANE = "lane"
    """A task stands in the due index under its lane."""
    STATE = "state"
    """State, due time, end and attempt of a task fit together."""
    RECORD = "record"
    """What is stored decodes."""
    TERM = "term"
    """No attempt and no sequence is of a term that its shard has not had."""
    DUE = "due"
    """A task that has a due time is found by the due index: otherwise it would never be started."""
    HELD = "held"
    """A task that is out is found by who takes over: it is not due later than what its shard has granted."""
    ATTEMPTS = "attempts"
    """A task's attempts are all there, but for old ones that were handed back, each with a larger fencing token."""
    QUEUE = "queue"
    """A task's queue is there."""
    ORPHAN = "orphan"
    """An attempt belongs to a task."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that is broken, and where."""

    rule: Rule
    detail: str
    shard: int | None = None
    key: TaskKey | None = None


_Faults = Iterator[tuple[Rule, str]]


def of_shards(shards: Sequence[ShardRow]) -> Iterator[Finding]:
    """Check the shard rows, given by number."""
    slot = 0
    for row in shards:
        if row.slot_from != slot:
            first, after = sorted((row.slot_from, slot))
            what = "belong to two shards" if row.slot_from < slot else "belong to no shard"
            yield Finding(Rule.SHARDS, f"slots {first} to {after - 1} {what}", row.shard)
        slot = max(slot, row.slot_until)
        # A cluster is written into the rows before its first term; a rebound store has epochs that nobody holds.
        has_holder, was_led = row.holder != b"", row.epoch > 0
        if row.epoch < 0 or (has_holder and not was_led) or (was_led and row.coordination == ""):
            detail = f"epoch {row.epoch}, coordination {row.coordination!r}, holder {row.holder.hex()!r}"
            yield Finding(Rule.SHARDS, f"this is no term: {detail}", row.shard)
    if slot != bounds.SLOTS:
        yield Finding(Rule.SHARDS, f"the last slot of the shards is {slot - 1}, not {bounds.SLOTS - 1}")
    names = sorted({row.coordination for row in shards} - {""})
    if len(names) > 1:
        yield Finding(Rule.SHARDS, f"the shards belong to different coordinations: {', '.join(names)}")


def of_task(row: Row) -> list[Finding]:
    """Check a task's row."""
    faults = [*_place(row)]
    if row["failure_reason"] != FailureReason.RECORD_CORRUPT:
        told = [*_state(row)]
        task = rows.stored_task_of(cast(Row, row[:STORED_COLUMNS]))
        # What the decoder refuses of a state was told before, more plainly.
        if isinstance(task, CorruptRecord) and not told:
            told.append((Rule.RECORD, task.detail))
        faults += [*told, *_term(row), *_attempts(row)]
        most = None if isinstance(task, CorruptRecord) else task.task.policy.max_attempts
        if most is not None and row["attempts_used"] > most:
            faults.append((Rule.ATTEMPTS, f"{row['attempts_used']} attempts were used of at most {most}"))
    key = TaskKey(row["namespace"], row["task_id"])
    return [Finding(rule, detail, row["shard"], key) for rule, detail in faults]


def of_attempt(row: Row) -> list[Finding]:
    """Check an attempt record's row."""
    number, shard = row["number"], row["shard"]
    attempt = rows.attempt_of(list(row[:ATTEMPT_COLUMNS]))
    faults: list[tuple[Rule, str]] = []
    if shard is None:
        faults.append((Rule.ORPHAN, f"attempt {number} belongs to no task"))
    if attempt is None:
        faults.append((Rule.RECORD, f"attempt {number} does not decode"))
    if row["outcome"] is None or row["end_time"] is None:
        faults.append((Rule.ATTEMPTS, f"attempt {number} is among those that have ended, and has no end"))
    if row["shard_epoch"] is not None and row["epoch"] > row["shard_epoch"]:
        detail = f"attempt {number} is of epoch {row['epoch']}, and its shard has come to {row['shard_epoch']} only"
        faults.append((Rule.TERM, detail))
    key = TaskKey(row["namespace"], row["task_id"])
    return [Finding(rule, detail, shard, key) for rule, detail in faults]


def _place(row: Row) -> _Faults:
    slot = slots.slot_of(row["namespace"], row["task_id"])
    if row["slot"] != slot:
        yield Rule.PLACE, f"its slot is {slot}, and it is stored under {row['slot']}"
    if row["slot_from"] is None:
        yield Rule.PLACE, f"there is no shard {row['shard']}"
    elif not row["slot_from"] <= slot < row["slot_until"]:
        held = f"{row['slot_from']} to {row['slot_until'] - 1}"
        yield Rule.PLACE, f"its slot is {slot}, and its shard {row['shard']} has {held}"
    lane = Lane(row["namespace"], row["queue"], row["task_type"], row["priority"], row["fairness_key"])
    if row["lane_hash"] != codec.lane_hash(lane):
        yield Rule.LANE, f"the hash of its lane is {codec.lane_hash(lane)}, and it is stored under {row['lane_hash']}"
    if row["due_time"] is not None and not row["is_in_due_index"]:
        yield Rule.DUE, "it has a due time, and is not in the due index: run `REINDEX INDEX duecourse.task_due`"
    if not row["has_queue"]:
        yield Rule.QUEUE, f"there is no queue {row['queue']!r} in its namespace"


def _state(row: Row) -> _Faults:
    state, due, end = row["state"], row["due_time"], row["end_time"]
    is_ended = state in TERMINAL
    if (due is None) != is_ended or (end is not None) != is_ended:
        yield Rule.STATE, f"it is {state}, due {due}, ended {end}"
    if (row["failure_reason"] is not None) != (state == TaskState.FAILED):
        yield Rule.STATE, f"it is {state}, failure reason {row['failure_reason']}"
    has_attempt = row["lease_token"] is not None
    if has_attempt != (row["attempt_count"] > 0):
        lease = "a" if has_attempt else "no"
        yield Rule.STATE, f"it has had {row['attempt_count']} attempts, and has {lease} lease token"
    missing = [name for name in _OF_ATTEMPT if (row[name] is not None) != has_attempt]
    if missing:
        yield (
            Rule.STATE,
            f"{', '.join(missing)}: {'missing' if has_attempt else 'there'} without the rest of an attempt",
        )
    if has_attempt and row["attempt_number"] != row["attempt_count"]:
        yield Rule.STATE, f"its latest attempt is {row['attempt_number']}, of {row['attempt_count']}"
    is_open = has_attempt and row["outcome"] is None
    if is_open != (state in HELD):
        yield Rule.STATE, f"it is {state}, and its latest attempt is {'open' if is_open else 'not open'}"
    if (row["outcome"] is None) != (row["attempt_end_time"] is None):
        yield Rule.STATE, f"its attempt ended {row['outcome']} at {row['attempt_end_time']}"
    if state in HELD and (row["start_time"] is not None) != (state == TaskState.RUNNING):
        yield Rule.STATE, f"it is {state}, and its handler began at {row['start_time']}"


def _term(row: Row) -> _Faults:
    if row["slot_from"] is None:
        return
    if row["epoch"] is not None and row["epoch"] > row["shard_epoch"]:
        yield Rule.TERM, f"its attempt is of epoch {row['epoch']}, and its shard has come to {row['shard_epoch']} only"
    end = row["sequence_block"] + 1 << SEQUENCE_BITS
    if row["sequence"] >= end:
        yield Rule.TERM, f"its sequence is {row['sequence']}, and its shard has issued none from {end} on"
    if row["state"] in HELD and row["due_time"] is not None and row["due_time"] > row["granted_until"]:
        detail = f"it is out and due {row['due_time']}, and its shard says that it granted until {row['granted_until']}"
        yield Rule.HELD, detail


def _attempts(row: Row) -> _Faults:
    numbers, returned = row["numbers"] or [], row["returned"] or []
    there, before = set(numbers), range(1, row["attempt_count"])
    beyond = [number for number in numbers if number not in before]
    if beyond:
        yield (
            Rule.ATTEMPTS,
            f"there are attempt records {_some(beyond)}, and before the latest there were {len(before)}",
        )
    # Of those that were handed back only the last ones are kept: older ones may be missing.
    kept_from = returned[-bounds.MAX_RETURNED_RECORDS] if len(returned) >= bounds.MAX_RETURNED_RECORDS else 0
    absent = (number for number in range(kept_from + 1, row["attempt_count"]) if number not in there)
    missing = list(itertools.islice(absent, _ATTEMPTS_TOLD))
    if missing:
        yield Rule.ATTEMPTS, f"there are no records of attempts {_some(missing)}"
    tokens = [*(row["fencing_tokens"] or []), *([] if row["fencing_token"] is None else [row["fencing_token"]])]
    if any(later <= earlier for earlier, later in itertools.pairwise(tokens)):
        yield Rule.ATTEMPTS, "a later attempt does not have a larger fencing token"


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return shown if len(numbers) <= 5 else f"{shown} and {len(numbers) - 5} more"


_OF_ATTEMPT: Final = (
    "attempt_number",
    "attempt_round",
    "worker",
    "incarnation",
    "node",
    "epoch",
    "fencing_token",
    "lease_time",
    "sign_of_life",
)
