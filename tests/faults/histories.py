"""Three independent histories of a cluster under test, and the format of the files that hold them.

A folder holds any number of `clients*.jsonl`, `workers*.jsonl` and `audit*.jsonl`, with one JSON object a line. They
are written by whoever calls, whoever runs handlers, and the store itself: never by a scheduler, whose word is not taken
for anything. A last line that was cut short by a crash is left out. Times (`wall`) are microseconds since 1970 UTC, all
from clocks of one machine, or from such that agree. Task ids are unique over all namespaces.

Clients: each call about one task is two lines with the same `client` and `call`; a second line that is missing means
that nobody knows what came of it.

    {"kind": "invoke", "client", "call", "operation": "submit" | "cancel", "task_id", "wall",
     "run_at": micros or null, "max_attempts": number or null}
    {"kind": "return", "client", "call", "wall", "outcome": "ok" | "fail" | "info",
     "created": bool, "uid": hex,                              of a submission that is ok
     "result": "prevented" | "requested" | "already_finished", "state", "earlier_attempt_may_run": bool}   of a cancel

`ok`: it was answered. `fail`: it was surely not done. `info`: it may have been done.

Workers: what handlers saw, written by the handlers' process before anything else is done.

    {"kind": "start" | "heartbeat" | "finish", "worker", "task_id", "attempt", "fencing_token", "wall", "boot",
     "outcome": "success" | "failure" | "stopped"}             of a finish

`boot` is the time since boot in microseconds, suspends included.

Audit: every change of a task and of a shard's term, written by the store in the transaction that makes it. `number`
grows with every change of one task or shard.

    {"kind": "task", "number", "wall", "task_id", "shard", "old": row or null, "new": row or null}
    {"kind": "term", "number", "wall", "shard", "epoch"}

    row: {"state", "revision", "round", "attempt", "attempts_used", "token": hex or null, "fencing_token", "epoch",
          "run_at", "due_time", "outcome", "failure_reason", "cancel_requested"}
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TERMINAL = frozenset(("succeeded", "failed", "cancelled"))
WAITING = frozenset(("pending", "retry_wait"))
HELD = frozenset(("leased", "running"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A call of a client, and what came of it."""

    client: str
    call: int
    operation: str
    task_id: str
    invoked: int
    run_at: int | None = None
    max_attempts: int | None = None
    outcome: str = "info"
    returned: int | None = None
    created: bool | None = None
    uid: str | None = None
    result: str | None = None
    state: str | None = None
    earlier_attempt_may_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """Something that a handler did."""

    kind: str
    worker: str
    task_id: str
    attempt: int
    fencing_token: int
    wall: int
    boot: int
    outcome: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A task as it is stored: what changes, and when it was wanted."""

    state: str
    revision: int
    run_at: int
    round: int = 1
    attempt: int | None = None
    attempts_used: int = 0
    token: str | None = None
    fencing_token: int | None = None
    epoch: int | None = None
    due_time: int | None = None
    outcome: str | None = None
    failure_reason: str | None = None
    cancel_requested: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A change of a task: created without an old row, deleted without a new one."""

    number: int
    wall: int
    task_id: str
    shard: int
    old: Row | None
    new: Row | None

    @property
    def is_grant(self) -> bool:
        """It gives the task to a worker."""
        return self.new is not None and self.new.token is not None and self.new.token != (self.old and self.old.token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """An epoch of a shard began."""

    number: int
    wall: int
    shard: int
    epoch: int


@dataclass(slots=True)
class Histories:
    """All that was recorded; transitions and terms in the order of their numbers."""

    operations: list[Operation] = field(default_factory=list)
    events: list[WorkerEvent] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)


def read(folder: Path) -> Histories:
    """Read a folder's files."""
    histories = Histories()
    returns = {}
    invocations = []
    for line in _lines(folder, "clients"):
        if line.pop("kind") == "return":
            returns[line["client"], line["call"]] = line
        else:
            invocations.append(line)
    for invocation in invocations:
        answer = returns.get((invocation["client"], invocation["call"]), {})
        if answer:
            answer["returned"] = answer.pop("wall")
        invocation["invoked"] = invocation.pop("wall")
        histories.operations.append(Operation(**{**invocation, **answer}))
    histories.events = [WorkerEvent(**line) for line in _lines(folder, "workers")]
    for line in _lines(folder, "audit"):
        if line.pop("kind") == "term":
            histories.terms.append(Term(**line))
        else:
            old, new = (line[key] and Row(**line[key]) for key in ("old", "new"))
            histories.transitions.append(Transition(**{**line, "old": old, "new": new}))
    histories.transitions.sort(key=lambda transition: transition.number)
    histories.terms.sort(key=lambda term: term.number)
    return histories


class WorkersSoFar:
    """The workers' history while it grows; each line is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._events: defaultdict[str, list[WorkerEvent]] = defaultdict(list)

    def of(self, task_id: str, kind: str) -> list[WorkerEvent]:
        """Return what handlers have done with a task until now, of one kind."""
        for file in self._folder.glob("workers*.jsonl"):
            with file.open("rb") as lines:
                lines.seek(self._read.get(file, 0))
                for line in lines:
                    if not line.endswith(b"\n"):
                        # Its end may come while we read, and would look like a line.
                        break
                    event = WorkerEvent(**json.loads(line))
                    self._events[event.task_id].append(event)
                    self._read[file] = self._read.get(file, 0) + len(line)
        return [event for event in self._events[task_id] if event.kind == kind]


def _lines(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob(f"{name}*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)
