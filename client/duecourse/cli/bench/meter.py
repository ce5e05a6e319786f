"""Shows how far a bench has come: a bar on a terminal, a line every few seconds elsewhere. Always on stderr."""

from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import Clock

_LINE_EVERY: Final = 5 * bounds.SECOND


class Meter:
    """One bench's progress; a context manager."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bar = self._progress.add_task("", total=None, visible=False)
        self._title = ""
        self._total: int | None = None
        self._line_due: Micros = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def phase(self, title: str, total: int | None = None) -> None:
        """Begin something new that counts up to `total`."""
        self._title, self._total = title, total
        self._line_due = self._clock.elapsed() + _LINE_EVERY
        self._progress.reset(self._bar, description=title, total=total, visible=True)
        self.say(title)

    def at(self, count: int) -> None:
        """Say how far it has come."""
        self._progress.update(self._bar, completed=count)
        if not self._console.is_terminal and self._clock.elapsed() >= self._line_due:
            self._line_due = self._clock.elapsed() + _LINE_EVERY
            self.say(f"{self._title}: {count:,}" + (f" of {self._total:,}" if self._total else ""))

    def say(self, line: str) -> None:
        """Print a line."""
        self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True, style="dim")
