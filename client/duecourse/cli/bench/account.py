"""Holds what was acknowledged against what the workers recorded: lateness, early starts, losses, repeats. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from duecourse.cli.bench.figures import Figures
from duecourse.cli.distribution import Distribution
from duecourse.model.instants import Micros


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What became of the tasks."""

    lateness: Distribution
    """Of the first start of each task that is measured."""
    early: int
    """Starts, of any attempt, before their time."""
    lost: int
    """Acknowledged tasks that never began."""
    repeats: int
    """Starts beyond the first of their task."""

    def enter(self, figures: Figures) -> None:
        """Put it among the figures."""
        figures.metrics["early"] = self.early
        figures.metrics["lost"] = self.lost
        if self.repeats:
            figures.details["repeats"] = self.repeats
        figures.add_lateness(self.lateness)


def settle(
    acknowledged: Iterable[int],
    starts: Iterable[tuple[int, int, Micros]],
    due: Callable[[int], Micros],
    *,
    is_measured: Callable[[int], bool] = lambda _: True,
) -> Account:
    """Settle the account of some tasks; starts of others are left out. `due` is when a task was wanted, by its index.

    All of them count as early, lost or repeated; only the measured ones, which leaves out a warm-up, in the lateness.
    """
    first: dict[int, Micros] = {}
    early = repeats = 0
    wanted = set(acknowledged)
    for index, _, at in starts:
        if index not in wanted:
            continue
        if at < due(index):
            early += 1
        if index in first:
            repeats += 1
            first[index] = min(first[index], at)
        else:
            first[index] = at
    return Account(
        lateness=Distribution(at - due(index) for index, at in first.items() if is_measured(index)),
        early=early,
        lost=len(wanted) - len(first),
        repeats=repeats,
    )
