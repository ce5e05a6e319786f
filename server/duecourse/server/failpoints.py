"""Named points at which a node kills itself, so that fault tests can hit a moment exactly.

Off unless settings name them.
A name may carry a count, `after_commit:3`: the process dies when it comes by for the third time.
"""

import os
import signal
from collections.abc import Iterable
from typing import Final

BEFORE_COMMIT: Final = "before_commit"
AFTER_COMMIT: Final = "after_commit"
AFTER_ANSWER: Final = "after_answer"
BEFORE_ASSIGNMENT: Final = "before_assignment"
NAMES: Final = (BEFORE_COMMIT, AFTER_COMMIT, AFTER_ANSWER, BEFORE_ASSIGNMENT)


class Failpoints:
    """Counts how often each armed point is passed, and kills the process at the one that is due."""

    def __init__(self, armed: Iterable[str] = ()) -> None:
        self._left: dict[str, int] = {}
        for entry in armed:
            name, _, count = entry.partition(":")
            if name not in NAMES:
                raise ValueError(f"there is no failpoint {name!r}; there are {', '.join(NAMES)}")
            self._left[name] = int(count or 1)

    def passes(self, name: str) -> None:
        """Come by a point."""
        if not self._left or name not in self._left:
            return
        self._left[name] -= 1
        if self._left[name] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
