"""What a bench worker measures, in a file that both sides map into memory: progress while it runs, evidence at the end.

64-bit integers: a header, then three for each handler start: the task's index, the attempt's number, the wall clock in
microseconds. Appending costs well under a microsecond, and what was written survives the worker.
"""

import mmap
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Final

from duecourse.model.instants import Micros

TASK_TYPE: Final = "bench"
_WORD: Final = 8
_COUNT, _LAST_START, _PHASE, _ENDED_AT = range(4)
_HEADER: Final = 4
_WIDTH: Final = 3


class Phase(IntEnum):
    """Where a bench worker stands."""

    STARTING = 0
    LOADED = 1
    """Everything is imported; it waits for the word to connect."""
    ENDED = 2
    """It has disconnected, all outcomes recorded."""


class Records:
    """One worker's records. The file is sparse: capacity that is not used costs nothing."""

    def __init__(self, file: mmap.mmap) -> None:
        self._file = file
        self._words = memoryview(file).cast("q")

    @classmethod
    def create(cls, path: Path, capacity: int) -> "Records":
        """Make the file, with room for `capacity` starts."""
        with path.open("w+b") as file:
            file.truncate((_HEADER + _WIDTH * capacity) * _WORD)
            return cls(mmap.mmap(file.fileno(), 0))

    @classmethod
    def open(cls, path: Path) -> "Records":
        """Map a file that exists."""
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))

    def close(self) -> None:
        """Unmap the file."""
        self._words.release()
        self._file.close()

    def append(self, index: int, attempt: int, at: Micros) -> None:
        """Record that a handler began. Raises IndexError when the file is full."""
        words = self._words
        count = words[_COUNT]
        place = _HEADER + _WIDTH * count
        words[place] = index
        words[place + 1] = attempt
        words[place + 2] = at
        words[_LAST_START] = at
        words[_COUNT] = count + 1

    @property
    def count(self) -> int:
        """How many starts there are."""
        return self._words[_COUNT]

    @property
    def last_start(self) -> Micros:
        """When the latest handler began; 0 before the first."""
        return self._words[_LAST_START]

    @property
    def phase(self) -> Phase:
        """Where the worker stands."""
        return Phase(self._words[_PHASE])

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._words[_PHASE] = phase

    @property
    def ended_at(self) -> Micros:
        """When the worker had ended."""
        return self._words[_ENDED_AT]

    @ended_at.setter
    def ended_at(self, at: Micros) -> None:
        self._words[_ENDED_AT] = at

    def starts(self, begin: int = 0) -> Iterator[tuple[int, int, Micros]]:
        """Yield (index, attempt, at) of the starts from the one numbered `begin`."""
        words = self._words
        for place in range(_HEADER + _WIDTH * begin, _HEADER + _WIDTH * self.count, _WIDTH):
            yield words[place], words[place + 1], words[place + 2]
