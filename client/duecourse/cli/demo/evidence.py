"""The demonstration's judge: holds what was acknowledged against what the worker's file says was started. Pure.

The file has one line for each start of a handler: task id, attempt number, and the wall clock in microseconds. Its
lines are appended by the worker's process itself, so nothing that the scheduler believes or loses can improve them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from duecourse.cli.distribution import Distribution
from duecourse.client import AttemptOutcome
from duecourse.model.instants import Micros

ALLOW_ANOTHER: Final = frozenset((AttemptOutcome.FAILED, AttemptOutcome.TIMED_OUT, AttemptOutcome.LEASE_LOST))
"""Outcomes of a started attempt after which the task may be started again."""


class Start(NamedTuple):
    """A handler began."""

    task_id: str
    attempt: int
    at: Micros


@dataclass(frozen=True, slots=True)
class Repeat:
    """A task that was started more than once."""

    task_id: str
    starts: tuple[Start, ...]
    outcomes: tuple[str, ...]
    """Of each start's attempt, as the scheduler recorded it."""
    is_allowed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the file proves."""

    submitted: int
    run: int
    lost: tuple[str, ...]
    early: tuple[Start, ...]
    unknown: tuple[Start, ...]
    """Starts of tasks that nobody submitted."""
    repeats: tuple[Repeat, ...]
    lateness: Distribution
    """Of each task's first start."""
    lateness_in_service: Distribution
    """Of those that the outage did not touch: started before it, or due after it."""

    @property
    def is_kept(self) -> bool:
        """No promise was broken."""
        return not (self.lost or self.early or self.unknown) and all(repeat.is_allowed for repeat in self.repeats)


def read(lines: Iterable[str]) -> list[Start]:
    """Read the worker's file."""
    starts = []
    for line in lines:
        task_id, attempt, at = line.split()
        starts.append(Start(task_id, int(attempt), int(at)))
    return starts


def repeated(starts: Iterable[Start]) -> dict[str, tuple[Start, ...]]:
    """Return the tasks that were started more than once, with their starts in the order of the file."""
    by_task: dict[str, list[Start]] = {}
    for start in starts:
        by_task.setdefault(start.task_id, []).append(start)
    return {task_id: tuple(several) for task_id, several in by_task.items() if len(several) > 1}


def judge(
    run_at: Mapping[str, Micros],
    starts: Sequence[Start],
    outcomes: Mapping[str, Mapping[int, AttemptOutcome | None]],
    outage: tuple[Micros, Micros] | None,
) -> Verdict:
    """Judge the acknowledged tasks, given by their `run_at`.

    `outcomes`: of the attempts, by number, of every task that was started more than once. `outage`: from when to when
    no task could be started.
    """
    first: dict[str, Start] = {}
    unknown = []
    for start in starts:
        if start.task_id not in run_at:
            unknown.append(start)
        elif start.task_id not in first or start.at < first[start.task_id].at:
            first[start.task_id] = start
    lateness = {task_id: start.at - run_at[task_id] for task_id, start in first.items()}
    gone_from, gone_until = outage or (0, 0)
    return Verdict(
        submitted=len(run_at),
        run=len(first),
        lost=tuple(task_id for task_id in run_at if task_id not in first),
        early=tuple(start for start in starts if start.at < run_at.get(start.task_id, start.at)),
        unknown=tuple(unknown),
        repeats=tuple(
            _judge_repeat(task_id, several, outcomes.get(task_id, {})) for task_id, several in repeated(starts).items()
        ),
        lateness=Distribution(lateness.values()),
        lateness_in_service=Distribution(
            late for task_id, late in lateness.items() if first[task_id].at < gone_from or run_at[task_id] >= gone_until
        ),
    )


def _judge_repeat(task_id: str, starts: tuple[Start, ...], outcomes: Mapping[int, AttemptOutcome | None]) -> Repeat:
    """Judge one: every start but the last needs an attempt of its own, whose outcome allowed another."""
    words = tuple(
        outcomes.get(start.attempt) or ("open" if start.attempt in outcomes else "unknown") for start in starts
    )
    is_allowed = all(
        earlier.attempt < later.attempt and outcomes.get(earlier.attempt) in ALLOW_ANOTHER
        for earlier, later in pairwise(starts)
    )
    return Repeat(task_id, starts, tuple(map(str, words)), is_allowed and starts[-1].attempt in outcomes)
