"""Submits tasks from lines of JSON: any number of them, in bounded memory, each bad line told by its number.

What could not be reached, or did not answer, ends the run: the lines before that are told for what they came to.
"""

import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from rich import console, progress

from duecourse.cli import exits, output, task_text
from duecourse.cli.connection import Session
from duecourse.client import DuecourseError, NewTask, SubmittedTask
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import SystemClock

_READ_BYTES: Final = 1024 * 1024
_MOST_TOLD: Final = 50
MAX_LINE_BYTES: Final = 2 * bounds.MAX_REQUEST_BYTES


class Lines:
    """Cuts a stream of bytes into numbered lines; None stands for a line that is too long to be a task."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._number = 0
        self._is_skipping = False

    def feed(self, read: bytes) -> list[tuple[int, bytes | None]]:
        """Take what was read, and return the lines that it completes. Nothing read is the end of the stream."""
        lines: list[tuple[int, bytes | None]] = []
        self._rest += read if read else (b"\n" if self._rest or self._is_skipping else b"")
        *complete, rest = self._rest.split(b"\n")
        for line in complete:
            self._number += 1
            if self._is_skipping or len(line) > MAX_LINE_BYTES:
                lines.append((self._number, None))
                self._is_skipping = False
            elif line.strip():
                lines.append((self._number, bytes(line)))
        self._rest = rest
        if len(self._rest) > MAX_LINE_BYTES:
            self._is_skipping = True
            self._rest.clear()
        return lines


@dataclass(slots=True)
class Tally:
    """What came of the lines so far."""

    address: str
    as_json: bool
    submitted: int = 0
    existed: int = 0
    failed: int = 0
    code: exits.ExitCode = exits.ExitCode.DONE
    _told: int = field(default=0)

    @property
    def is_cut_short(self) -> bool:
        """The cluster does not answer, so there is no use in sending more."""
        return self.code in (exits.ExitCode.UNAVAILABLE, exits.ExitCode.UNCERTAIN)

    def add(self, number: int, result: SubmittedTask | DuecourseError) -> None:
        """Count what came of a line, and tell it if it was not good."""
        if isinstance(result, SubmittedTask):
            self.submitted += 1
            self.existed += not result.created
            if self.as_json:
                shown = {"line": number, "task_id": result.task_id, "uid": result.uid.hex(), "created": result.created}
                output.say_json(shown)
            return
        explained = exits.explain(result, self.address)
        self.refuse(number, explained, exits.of(result), result.task_id)

    def refuse(
        self, number: int, why: str, code: exits.ExitCode = exits.ExitCode.REFUSED, task_id: str | None = None
    ) -> None:
        """Count a line that was not submitted, or may not have been."""
        self.failed += 1
        self.code = max(self.code, code)
        if self.as_json:
            output.say_json({"line": number, "task_id": task_id, "error": why})
        self._told += 1
        if self._told <= _MOST_TOLD:
            output.tell(f"line {number}: {why}")
        elif self._told == _MOST_TOLD + 1:
            output.tell("more lines failed; use --json to see them all")


def submit(session: Session, source: Path | BinaryIO, defaults: Mapping[str, Any], tally: Tally) -> None:
    """Submit what a file or a stream holds."""
    if isinstance(source, Path):
        with source.open("rb") as opened:
            _submit(session, opened, source.stat().st_size, defaults, tally)
    else:
        _submit(session, source, None, defaults, tally)


def _submit(session: Session, stream: BinaryIO, size: int | None, defaults: Mapping[str, Any], tally: Tally) -> None:
    lines = Lines()
    clock = SystemClock()
    began = clock.elapsed()
    with _progress(size) as advance:
        try:
            while not tally.is_cut_short:
                # Takes what is there, so that a slow producer's lines do not wait for more of them.
                read = stream.read1(_READ_BYTES) if isinstance(stream, io.BufferedIOBase) else stream.read(_READ_BYTES)
                tasks = _parse(lines.feed(read), defaults, tally)
                results = session.run(session.client.submit_many(task for _, task in tasks))
                for (number, _), result in zip(tasks, results, strict=True):
                    tally.add(number, result)
                advance(len(read), tally.submitted)
                if not read:
                    break
        finally:
            output.tell(_summary(tally, clock.elapsed() - began))


def _parse(
    lines: list[tuple[int, bytes | None]], defaults: Mapping[str, Any], tally: Tally
) -> list[tuple[int, NewTask]]:
    tasks = []
    for number, line in lines:
        if line is None:
            tally.refuse(number, f"has more than {MAX_LINE_BYTES} bytes")
            continue
        try:
            tasks.append((number, task_text.parse(line, defaults)))
        except task_text.BadTask as error:
            tally.refuse(number, str(error))
    return tasks


def _summary(tally: Tally, took: Micros) -> str:
    parts = [f"submitted {_count(tally.submitted, 'task')} in {took / bounds.SECOND:.1f} s"]
    if tally.existed:
        parts.append(f"{tally.existed:,} of them existed already")
    if tally.failed:
        parts.append(f"{_count(tally.failed, 'line')} failed")
    if tally.is_cut_short:
        parts.append("stopped early: what follows was not sent")
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


@contextmanager
def _progress(size: int | None) -> Iterator[Callable[[int, int], None]]:
    """Show how far it has come, if a person looks; the bar counts bytes, the text tasks."""
    bar = progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.fields[submitted]:,} tasks"),
        progress.BarColumn(),
        progress.TimeElapsedColumn(),
        console=console.Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    with bar:
        shown = bar.add_task("submit", total=size, submitted=0)
        yield lambda count, submitted: bar.update(shown, advance=count, submitted=submitted)
