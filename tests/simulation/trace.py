"""From all that happened in a run to what a reader needs: the failure, and the events that have to do with it."""

from collections.abc import Sequence
from typing import Final

from simulation.world import Result

_ALWAYS: Final = ("world", "!", " leads ", "term_ended", "terms_begun", "stream ended", "stream serving")
_STARTS: Final = " starts"
"""Ends the line of a process that begins."""
_LONGEST: Final = 200
_FEW: Final = 12
"""So many tasks of a plan are shown."""


def readable(result: Result, *, shows_all: bool) -> Sequence[str]:
    """Return the lines of a trace: all of them, or those of the tasks that failed and of what happened around them."""
    plan = result.plan
    head = [
        f"seed {plan.seed}: {len(plan.tasks)} tasks, {len(plan.faults)} faults, {result.steps} events, digest"
        f" {result.digest:x}",
        f"set-up: {plan.setup}",
        *(f"planned: {fault}" for fault in plan.faults),
        *(f"planned: {task}" for task in plan.tasks if len(plan.tasks) <= _FEW),
    ]
    tail = [f"broken: {violation}" for violation in result.violations] or ["nothing was broken"]
    lines = result.trace
    if not shows_all:
        names = (*_ALWAYS, *_names(result))
        lines = [line for line in lines if line.endswith(_STARTS) or any(name in line for name in names)]
    return [*head, *(line[:_LONGEST] for line in lines), *tail]


def _names(result: Result) -> set[str]:
    """Return what the lines about the failed tasks have in common: their ids and their tokens."""
    names = {f"{violation.key.task_id} " for violation in result.violations if violation.key is not None}
    tokens: set[str] = set()
    for line in result.trace:
        if any(name in f"{line} " for name in names):
            tokens.update(word for word in line.split() if len(word) == 6 and _is_hex(word))
    return {name.strip() + end for name in names for end in (" ", ",", ":")} | tokens


def _is_hex(word: str) -> bool:
    return all(letter in "0123456789abcdef" for letter in word)
