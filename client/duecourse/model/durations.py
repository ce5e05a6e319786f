"""Durations as people write them: `250ms`, `5s`, `1m30s`, `24h`, or a plain number of seconds."""

import re
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros

_UNITS: Final = {
    "us": 1,
    "ms": bounds.MILLISECOND,
    "s": bounds.SECOND,
    "m": bounds.MINUTE,
    "h": bounds.HOUR,
    "d": bounds.DAY,
}
_SECONDS: Final = re.compile(r"\d{1,18}(\.\d{1,9})?", re.ASCII)
_PART: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)(us|ms|s|m|h|d)", re.ASCII)


def parse(text: str) -> Micros:
    """Read a duration; raises ValueError, with what is expected."""
    text = text.strip()
    if _SECONDS.fullmatch(text):
        return round(float(text) * bounds.SECOND)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a duration such as 250ms, 5s, 1m30s or 24h")
    return round(sum(float(number) * _UNITS[unit] for number, unit in parts))


def write(micros: Micros) -> str:
    """Write a duration so that `parse` reads it back, in the largest unit that divides it."""
    if micros == 0:
        return "0s"
    unit = next(unit for unit in reversed(_UNITS) if micros % _UNITS[unit] == 0)
    return f"{micros // _UNITS[unit]}{unit}"
