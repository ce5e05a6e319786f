"""Makes a failing plan smaller: fewer faults, fewer tasks, as long as it breaks in the same way."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from simulation.history import Violation
from simulation.plan import Plan

Breaks = Callable[[Plan], Violation | None]
"""Runs a plan, and returns what it breaks first."""
_PARTS: Final = ("faults", "tasks")


def shrink(plan: Plan, breaks: Breaks, tell: Callable[[str], None]) -> Plan:
    """Return the smallest plan found; the same one if it does not fail. Tells of each that is smaller than the last."""
    broken = _broken(plan, breaks)
    if broken is None:
        tell("it does not fail, so there is nothing to leave out")
        return plan
    tell(f"{broken[0]} is broken: leaving out faults and tasks for as long as it still is")
    last = None
    while plan is not last:
        last = plan
        for part in _PARTS:
            plan = _with_fewer(plan, part, breaks, broken, tell)
    return plan


def gist(violation: Violation) -> Sequence[str]:
    """Return the invariant that was broken and what is said of it, but for names, numbers, and an account of details.

    A text is a sentence, with the name of a task before it or details behind it, parted from it by a colon, or by a
    semicolon. What has failed unexpectedly (S20) differs by the details.
    """
    parts = [part.split() for part in re.split("[:;] ", violation.text)]
    sentence = next((part for part in parts if len(part) > 1), [])
    said = re.split("[^A-Za-z_]+", violation.text) if violation.invariant == "S20" else sentence
    words = (word.strip(",") for word in said)
    return [violation.invariant, *(word for word in words if word.isalpha() and len(word) > 1)]


def _with_fewer(plan: Plan, part: str, breaks: Breaks, broken: Sequence[str], tell: Callable[[str], None]) -> Plan:
    """Leave out halves of a part, then quarters, and so on down to single items, as long as it still fails."""
    size = max(1, len(getattr(plan, part)) // 2)
    while True:
        start = 0
        while start < len(items := getattr(plan, part)):
            changes: dict[str, Any] = {part: [*items[:start], *items[start + size :]]}
            fewer = replace(plan, **changes)
            if _broken(fewer, breaks) == broken:
                plan = fewer
                tell(f"{len(plan.faults)} faults and {len(plan.tasks)} tasks still break {broken[0]}")
            else:
                start += size
        if size == 1:
            return plan
        size //= 2


def _broken(plan: Plan, breaks: Breaks) -> Sequence[str] | None:
    violation = breaks(plan)
    return None if violation is None else gist(violation)
