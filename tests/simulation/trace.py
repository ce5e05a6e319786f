"""From all that happened in a run to what a reader needs: the failure, and the events that have to do with it."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Final

from simulation.plan import FaultPlan, Setup, TaskPlan
from simulation.world import Result

from duecourse.model import bounds

_ALWAYS: Final = ("world", "!", " leads ", "term_ended", "terms_begun", "stream ended", "stream serving")
_STARTS: Final = " starts"
"""Ends the line of a process that begins."""
_LONGEST: Final = 200
_COUNTS: Final = frozenset(
    (
        "batch",
        "client",
        "clients",
        "head",
        "max_attempts",
        "members",
        "nodes",
        "payload_bytes",
        "prefetch",
        "priority",
        "shards",
        "slots",
        "target",
        "workers",
    )
)
"""The numbers of a plan that are no times."""
_DIGEST: Final = 2**64 - 1
_FEW: Final = 12
"""So many tasks of a plan are shown."""


def readable(result: Result, commit: str, *, shows_all: bool) -> Sequence[str]:
    """Return the lines of a trace: all of them, or those of the tasks that failed and of what happened around them.

    What says of no task what is wrong names workers, perhaps: then what is told to them is shown, and what they tell.
    """
    plan = result.plan
    head = [
        f"{plan.setup.kind} seed {plan.seed} at commit {commit}: {len(plan.tasks)} tasks, {len(plan.faults)} faults,"
        f" {result.steps} events, digest {result.digest & _DIGEST:x}",
        f"set-up: {_described(plan.setup)}",
        *(f"planned: {_described(fault)}" for fault in plan.faults),
        *(f"planned: {_described(task)}" for task in plan.tasks if len(plan.tasks) <= _FEW),
    ]
    tail = [f"broken: {violation}" for violation in result.violations] or ["nothing was broken"]
    lines = result.trace
    if not shows_all:
        names = (*_ALWAYS, *_names(result))
        lines = [line for line in lines if line.endswith(_STARTS) or any(name in line for name in names)]
    return [*head, *(line[:_LONGEST] for line in lines), *tail]


def _names(result: Result) -> set[str]:
    """Return what the lines about the failed tasks have in common, their ids and their tokens, and other workers."""
    names = {f"{violation.key.task_id} " for violation in result.violations if violation.key is not None}
    tokens: set[str] = set()
    for line in result.trace:
        if any(name in f"{line} " for name in names):
            tokens.update(word for word in line.split() if len(word) == 6 and _is_hex(word))
    words = {word for violation in result.violations if violation.key is None for word in violation.text.split()}
    workers = {f"{word}#" for word in words if word.startswith("worker")}
    return {name.strip() + end for name in names for end in (" ", ",", ":")} | tokens | workers


def _described(planned: Setup | FaultPlan | TaskPlan) -> str:
    """Say what is planned in a line, without what is not set."""
    return ", ".join(_values(planned))


def _values(planned: Setup | FaultPlan | TaskPlan) -> Iterator[str]:
    for spec in fields(planned):
        value = getattr(planned, spec.name)
        if isinstance(value, bool):
            if value:
                yield spec.name
        elif isinstance(value, int):
            if value or spec.name == "target":
                yield f"{spec.name} {value if spec.name in _COUNTS else f'{value / bounds.SECOND:g} s'}"
        elif isinstance(value, str):
            if value:
                yield f"{spec.name} {value!s}"
        elif value:
            yield f"{spec.name} {', '.join(f'{ending} after {lasts / bounds.SECOND:g} s' for ending, lasts in value)}"


def _is_hex(word: str) -> bool:
    return all(letter in "0123456789abcdef" for letter in word)
