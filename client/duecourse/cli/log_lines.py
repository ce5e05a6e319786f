"""How a worker's log is shown: an event and its fields on one line, for a person to read and for grep to find."""

import logging
from typing import Final

from duecourse.cli import output

_OWN: Final = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}


class Formatter(logging.Formatter):
    """Adds the fields that an event carries, with what others wrote escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 the library's name
        """Write the line, without what may follow it: a traceback."""
        fields = (f"{name}={value}" for name, value in vars(record).items() if name not in _OWN)
        return output.printable(" ".join((super().formatMessage(record), *fields)))


def show() -> None:
    """Show events from INFO up on standard error, unless the application has set up its own logging."""
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(Formatter())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
