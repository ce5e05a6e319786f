"""Makes a failing plan smaller: fewer faults, fewer tasks, as long as it breaks in the same way."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from simulation import world
from simulation.plan import FaultPlan, Plan, TaskPlan

_T = TypeVar("_T")


def shrink(plan: Plan, tell: Callable[[str], None]) -> Plan:
    """Return the smallest plan found; the same one if it does not fail."""
    broken = _broken(plan)
    if broken is None:
        return plan
    before = (-1, -1)
    while before != (len(plan.faults), len(plan.tasks)):
        before = (len(plan.faults), len(plan.tasks))
        plan = replace(plan, faults=_fewer(plan.faults, partial(_fails_with_faults, plan, broken)))
        plan = replace(plan, tasks=_fewer(plan.tasks, partial(_fails_with_tasks, plan, broken)))
        tell(f"{len(plan.faults)} faults and {len(plan.tasks)} tasks still break {broken[0]}")
    return plan


def _fails_with_faults(plan: Plan, broken: Sequence[str], faults: Sequence[FaultPlan]) -> bool:
    return _broken(replace(plan, faults=faults)) == broken


def _fails_with_tasks(plan: Plan, broken: Sequence[str], tasks: Sequence[TaskPlan]) -> bool:
    return _broken(replace(plan, tasks=tasks)) == broken


def _broken(plan: Plan) -> Sequence[str] | None:
    """Return the invariant that breaks first and what is said of it, but for names and numbers; None: none does."""
    violations = world.run(plan).violations
    if not violations:
        return None
    words = (word.strip(":;,") for word in violations[0].text.split())
    return [violations[0].invariant, *(word for word in words if word.isalpha())]


def _fewer(items: Sequence[_T], fails: Callable[[Sequence[_T]], bool]) -> Sequence[_T]:
    """Leave out halves, then quarters, and so on down to single items, as long as it still fails."""
    size = max(1, len(items) // 2)
    while True:
        start = 0
        while start < len(items):
            few = [*items[:start], *items[start + size :]]
            if len(few) < len(items) and fails(few):
                items = few
            else:
                start += size
        if size == 1:
            return items
        size //= 2
