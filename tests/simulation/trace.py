"""From all that happened in a run to what a reader needs: the failure, and the events that have to do with it."""

from collections.abc import Sequence
from typing import Final

from simulation.world import Result

_ALWAYS: Final = ("world", "!", " starts", " leads ", "term_ended", "terms_begun", "stream ended", "stream serving")
_LONGEST: Final = 200


def readable(result: Result, *, shows_all: bool) -> Sequence[str]:
    """Return the lines of a trace: all of them, or those of the tasks that failed and of what happened around them."""
    plan = result.plan
    head = [
        f"seed {plan.seed}: {len(plan.tasks)} tasks, {len(plan.faults)} faults, {result.steps} events, digest"
        f" {result.digest:x}",
        f"set-up: {plan.setup}",
    ]
    tail = [f"broken: {violation}" for violation in result.violations] or ["nothing was broken"]
    lines = result.trace
    if not shows_all:
        names = _names(result)
        lines = [line for line in lines if any(word in line for word in _ALWAYS) or any(name in line for name in names)]
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
