"""Shows the demonstration while it runs: what happens, line by line, and a bar that moves if there is a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import Clock

_LINE_EVERY: int = 5 * bounds.SECOND


class Stage:
    """Where the demonstration is seen."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._began = clock.elapsed()
        self._progress: Progress | None = None
        self._bar = TaskID(0)
        self._line_due: Micros = 0

    def say(self, line: str, style: str = "") -> None:
        """Print a line with the time since the beginning."""
        seconds = (self._clock.elapsed() - self._began) / bounds.SECOND
        (self._progress.console if self._progress else self._console).print(
            f"{seconds:6.1f} s  {line}", style=style, highlight=False, markup=False, soft_wrap=True
        )

    @contextmanager
    def counting(self, total: int) -> Iterator[None]:
        """Show how many of `total` tasks were run, in between the lines."""
        columns = (TextColumn(" " * 9), BarColumn(), TextColumn("{task.description}"))
        if not self._console.is_terminal:
            yield
            return
        with Progress(*columns, console=self._console, transient=True) as progress:
            self._progress, self._bar = progress, progress.add_task("", total=total)
            try:
                yield
            finally:
                self._progress = None

    def count(self, run: int, due: int, total: int) -> None:
        """Show where it stands: how many were run of those that are due."""
        where = f"{run:,} run of {due:,} due of {total:,}"
        if self._progress is not None:
            self._progress.update(self._bar, completed=run, description=where)
        elif self._clock.elapsed() >= self._line_due:
            self._line_due = self._clock.elapsed() + _LINE_EVERY
            self.say(where)
