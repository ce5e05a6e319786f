"""How values are written on the command line and in files of tasks, and read from there."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import typer

from duecourse.model import bounds, durations, names
from duecourse.model.instants import Micros


def duration(name: str, text: str) -> Micros:
    """Read a duration; a bad one ends the command with a line on the option `name`."""
    try:
        return durations.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=name) from None


def name(text: str | None) -> str | None:
    """Read an id or a name, if there is one; a bad one ends the command with a line on its option."""
    if text is not None and not names.is_name(text):
        raise typer.BadParameter(f"{text!r} is no name: 1 to {bounds.MAX_NAME_BYTES} of {names.ALPHABET}")
    return text


def instant(text: str) -> datetime:
    """Read an ISO 8601 instant; raises ValueError. It has to say its zone: nothing is to run an hour off."""
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not an instant such as 2030-01-31T08:00:00Z") from None
    if read.utcoffset() is None:
        raise ValueError(f"{text!r} does not say its zone; write 2030-01-31T08:00:00Z, or +01:00 in place of Z")
    return read


def pairs(name: str, texts: Iterable[str]) -> dict[str, str]:
    """Read `key=value`s of the option `name`."""
    read = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise typer.BadParameter(f"{text!r} is not of the form key=value", param_hint=name)
        read[key] = value
    return read


def write_instant(written: datetime | None) -> str:
    """Write an instant as `instant` reads it, in UTC; nothing for None."""
    return "" if written is None else written.astimezone(UTC).isoformat().replace("+00:00", "Z")


def write_second(written: datetime | None) -> str:
    """Write an instant to the second, for people."""
    return "" if written is None else write_instant(written.replace(microsecond=0)).replace("T", " ")


def write_age(age: timedelta) -> str:
    """Write how long something has lasted, for people, in the largest unit of which there are two; nothing for none."""
    seconds = age.total_seconds()
    units = ((bounds.DAY, "d"), (bounds.HOUR, "h"), (bounds.MINUTE, "min"))
    long = (
        f"{age // timedelta(microseconds=unit)} {name}" for unit, name in units if seconds >= 2 * unit / bounds.SECOND
    )
    return next(long, f"{seconds:.1f} s" if age else "")
