"""The checker, tried with histories of which each breaks one promise, and with one that breaks none."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from faults import checker, histories
from faults.histories import Histories, Operation, Row, Term, Transition, WorkerEvent

RUN_AT = 1_000_000
TOKEN, OTHER = "aa", "bb"


def _submission(**change: object) -> Operation:
    ok = Operation(
        client="1",
        call=1,
        operation="submit",
        task_id="t",
        invoked=100,
        run_at=RUN_AT,
        max_attempts=2,
        outcome="ok",
        returned=900,
        created=True,
        uid="01",
    )
    return replace(ok, **change)  # type: ignore[arg-type]


def _cancellation(result: str, state: str, returned: int = 5_000_000) -> Operation:
    return Operation(
        client="1",
        call=9,
        operation="cancel",
        task_id="t",
        invoked=200,
        outcome="ok",
        returned=returned,
        result=result,
        state=state,
    )


def _event(kind: str, wall: int, **change: object) -> WorkerEvent:
    event = WorkerEvent(
        kind=kind,
        worker="w",
        task_id="t",
        attempt=1,
        fencing_token=7,
        wall=wall,
        boot=wall,
        outcome="success" if kind == "finish" else None,
    )
    return replace(event, **change)  # type: ignore[arg-type]


PENDING = Row(state="pending", revision=1, run_at=RUN_AT, due_time=RUN_AT)
LEASED = Row(
    state="leased",
    revision=2,
    run_at=RUN_AT,
    due_time=RUN_AT,
    attempt=1,
    attempts_used=1,
    token=TOKEN,
    fencing_token=7,
    epoch=5,
)
SUCCEEDED = replace(LEASED, state="succeeded", revision=3, due_time=None, outcome="succeeded")
LOST = replace(LEASED, state="retry_wait", revision=3, due_time=2_000_000, outcome="lease_lost")
AGAIN = replace(LEASED, revision=4, attempt=2, attempts_used=2, token=OTHER, fencing_token=8, due_time=2_000_000)
DONE = replace(AGAIN, state="succeeded", revision=5, due_time=None, outcome="succeeded")


def _changes(*rows: Row | None) -> list[Transition]:
    """Make a task's transitions from one row to the next; the first row is what it was created as."""
    return [
        Transition(number=10 + index, wall=500 + 1_000_000 * index, task_id="t", shard=0, old=old, new=new)
        for index, (old, new) in enumerate(zip([None, *rows], rows, strict=False))
    ]


def _good() -> Histories:
    """One attempt is lost, the second one succeeds."""
    return Histories(
        [_submission()],
        [
            _event("start", 1_000_600),
            _event("start", 3_000_600, attempt=2, fencing_token=8),
            _event("finish", 3_000_700, attempt=2, fencing_token=8),
        ],
        _changes(PENDING, LEASED, LOST, AGAIN, DONE),
        [Term(number=1, wall=50, shard=0, epoch=4), Term(number=2, wall=60, shard=0, epoch=5)],
    )


def _never_stored(bad: Histories) -> None:
    bad.transitions, bad.events = [], []


def _refused_and_stored(bad: Histories) -> None:
    bad.operations = [_submission(outcome="fail", created=None, uid=None)]


def _deleted_while_pending(bad: Histories) -> None:
    bad.transitions, bad.events = _changes(PENDING, None), []


def _acknowledged_too_soon(bad: Histories) -> None:
    bad.operations = [_submission(returned=400)]


def _created_twice(bad: Histories) -> None:
    bad.operations.append(_submission(call=2))


def _two_uids(bad: Histories) -> None:
    bad.operations.append(_submission(call=2, created=False, uid="02"))


def _early(bad: Histories) -> None:
    bad.operations = [_submission(run_at=1_000_601)]


def _early_retry(bad: Histories) -> None:
    bad.transitions[2] = replace(bad.transitions[2], new=replace(LOST, due_time=4_000_000))
    bad.transitions[3] = replace(bad.transitions[3], old=replace(LOST, due_time=4_000_000))


def _two_leases(bad: Histories) -> None:
    bad.transitions = _changes(PENDING, LEASED, replace(AGAIN, revision=3), replace(DONE, revision=4))


def _token_twice(bad: Histories) -> None:
    again, done = replace(AGAIN, token=TOKEN), replace(DONE, token=TOKEN)
    other = replace(LOST, revision=4, token="cc", outcome=None, state="leased", fencing_token=9)
    lost = replace(other, state="retry_wait", outcome="lease_lost", revision=5)
    bad.transitions = _changes(
        PENDING, LEASED, LOST, other, lost, replace(again, revision=6, fencing_token=10), replace(done, revision=7)
    )


def _started_twice(bad: Histories) -> None:
    bad.events.append(_event("start", 3_000_650, attempt=2, fencing_token=8))


def _epoch_again(bad: Histories) -> None:
    bad.terms.append(Term(number=3, wall=70, shard=0, epoch=5))


def _stale_grant(bad: Histories) -> None:
    bad.terms.append(Term(number=12, wall=70, shard=0, epoch=6))


def _start_without_grant(bad: Histories) -> None:
    bad.events.append(_event("start", 3_000_650, attempt=3, fencing_token=99))


def _started_after_prevented(bad: Histories) -> None:
    cancelled = replace(PENDING, state="cancelled", revision=2, due_time=None)
    bad.operations.append(_cancellation("prevented", "cancelled", returned=900_000))
    bad.transitions, bad.events = _changes(PENDING, cancelled), [_event("start", 1_000_600)]


def _prevented_while_running(bad: Histories) -> None:
    bad.operations.append(_cancellation("prevented", "cancelled"))
    ended = replace(LEASED, state="cancelled", revision=3, due_time=None, outcome="cancelled")
    bad.transitions, bad.events = _changes(PENDING, LEASED, ended), [_event("start", 1_000_600)]


def _tried_again_though_cancelled(bad: Histories) -> None:
    asked = replace(LEASED, cancel_requested=True, revision=3)
    bad.transitions = _changes(
        PENDING, LEASED, asked, replace(LOST, revision=4, cancel_requested=True), replace(AGAIN, revision=5)
    )


def _wrong_final_state(bad: Histories) -> None:
    bad.operations.append(_cancellation("already_finished", "failed"))


def _one_attempt_too_many(bad: Histories) -> None:
    bad.operations = [_submission(max_attempts=1)]


def _given_up_too_soon(bad: Histories) -> None:
    failed = replace(LOST, state="failed", due_time=None, failure_reason="attempts_exhausted")
    bad.transitions, bad.events = _changes(PENDING, LEASED, failed), bad.events[:1]


def _returned_and_started(bad: Histories) -> None:
    returned = replace(LEASED, state="pending", revision=3, outcome="returned", attempts_used=0)
    bad.transitions = _changes(PENDING, LEASED, returned, AGAIN, DONE)


def _left_a_terminal_state(bad: Histories) -> None:
    bad.transitions = _changes(PENDING, LEASED, SUCCEEDED, AGAIN, DONE)
    bad.events.append(_event("finish", 1_000_700))


def _recorded_for_a_lost_attempt(bad: Histories) -> None:
    late = replace(LOST, state="succeeded", revision=4, due_time=None, outcome="succeeded")
    bad.transitions = _changes(PENDING, LEASED, LOST, late)
    bad.events = [_event("start", 1_000_600), _event("finish", 3_000_700)]


def _succeeded_by_nobodys_word(bad: Histories) -> None:
    bad.events = bad.events[:2]


def _still_waiting(bad: Histories) -> None:
    bad.transitions, bad.events = _changes(PENDING, LEASED, LOST), bad.events[:1]


PLANTED: list[tuple[str, Callable[[Histories], None]]] = [
    ("S1", _never_stored),
    ("S1", _refused_and_stored),
    ("S1", _deleted_while_pending),
    ("S1", _acknowledged_too_soon),
    ("S2", _created_twice),
    ("S2", _two_uids),
    ("S3", _early),
    ("S3", _early_retry),
    ("S4", _two_leases),
    ("S4", _token_twice),
    ("S4", _started_twice),
    ("S6", _epoch_again),
    ("S7", _stale_grant),
    ("S7", _start_without_grant),
    ("S8", _started_after_prevented),
    ("S8", _prevented_while_running),
    ("S9", _tried_again_though_cancelled),
    ("S9", _wrong_final_state),
    ("S11", _one_attempt_too_many),
    ("S11", _given_up_too_soon),
    ("S11", _returned_and_started),
    ("S12", _left_a_terminal_state),
    ("S13", _recorded_for_a_lost_attempt),
    ("S13", _succeeded_by_nobodys_word),
    ("L1", _still_waiting),
]


def test_a_history_that_breaks_nothing_passes() -> None:
    assert checker.check(_good(), is_healed=True) == []


@pytest.mark.parametrize(("invariant", "plant"), PLANTED, ids=[plant.__name__[1:] for _, plant in PLANTED])
def test_a_planted_fault_is_caught(invariant: str, plant: Callable[[Histories], None]) -> None:
    bad = _good()
    plant(bad)
    caught = checker.check(bad, is_healed=True)
    assert invariant in {violation.invariant for violation in caught}, caught


def test_what_nobody_knows_to_be_done_is_no_fault_either_way() -> None:
    unknown = _good()
    unknown.operations = [_submission(outcome="info", created=None, uid=None, returned=None)]
    assert checker.check(unknown, is_healed=True) == []
    unknown.events, unknown.transitions = [], []
    assert checker.check(unknown, is_healed=True) == []


LINES = {
    "clients-1.jsonl": [
        {
            "kind": "invoke",
            "client": "1",
            "call": 1,
            "operation": "submit",
            "task_id": "t",
            "wall": 100,
            "run_at": RUN_AT,
            "max_attempts": 2,
        },
        {"kind": "return", "client": "1", "call": 1, "wall": 900, "outcome": "ok", "created": True, "uid": "01"},
    ],
    "audit.jsonl": [{"kind": "term", "number": 1, "wall": 50, "shard": 0, "epoch": 5}],
    "workers-1.jsonl": [
        {
            "kind": "start",
            "worker": "w",
            "task_id": "t",
            "attempt": 1,
            "fencing_token": 7,
            "wall": 1,
            "boot": 1,
        }
    ],
}


def _write(folder: Path) -> None:
    for name, lines in LINES.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name).write_text(text + '{"kind": "cut sh')


def test_files_are_read_but_for_a_last_line_that_was_cut_short(tmp_path: Path) -> None:
    _write(tmp_path)
    recorded = histories.read(tmp_path)
    assert recorded.operations == [_submission()]
    assert [event.fencing_token for event in recorded.events] == [7]
    assert [term.epoch for term in recorded.terms] == [5]


def _check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-m", "faults.checker", str(folder), "--healed"]
    tests = Path(__file__).resolve().parents[1]
    return subprocess.run(command, capture_output=True, text=True, cwd=tests, env={}, check=False)


def test_the_command_tells_each_violation_and_needs_no_duecourse(tmp_path: Path) -> None:
    _write(tmp_path)
    ended = _check(tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "S1  t: was acknowledged and never stored" in ended.stdout
    assert "S3  t: attempt 1 started 999999 us before run_at" in ended.stdout
    assert ended.stdout.endswith("1 calls, 1 worker events, 0 transitions: 3 violations\n")


def test_the_command_refuses_a_folder_in_which_nothing_was_recorded(tmp_path: Path) -> None:
    (tmp_path / "clients.jsonl").touch()
    empty, missing = _check(tmp_path), _check(tmp_path / "missing")
    assert (empty.returncode, missing.returncode) == (2, 2)
    assert f"nothing was recorded in {tmp_path}" in empty.stderr
    assert f"there is no folder {tmp_path / 'missing'}" in missing.stderr
    assert empty.stdout + missing.stdout == ""
