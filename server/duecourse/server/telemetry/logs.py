"""Logs: events with fields, one line each, on standard error.

An event is a word (`term_begun`) and its fields (`shard=3 epoch=7`); fields bound with `structlog.contextvars` are on
every event of their scope. Libraries that log through `logging` come out the same way. Whatever a peer sent may be in a
field: control characters are escaped, so that nobody can forge a line or move a terminal's cursor, and lines of a
traceback are marked as such. Payloads and secrets are never logged; that is the caller's duty.
"""

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Final, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from duecourse.server.config import LogFormat, LogLevel

# C0 and C1 controls, line separators, and the marks that reorder what a terminal shows.
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_TRACEBACK_MARK: Final = "    | "


def get(component: str) -> FilteringBoundLogger:
    """Return the logger of a part of the node, named on each of its events."""
    return cast(FilteringBoundLogger, structlog.get_logger(component=component))


def configure(log_format: LogFormat, level: LogLevel, stream: TextIO | None = None) -> None:
    """Send all events of this process, ours and the libraries', to a stream; once, at start."""
    stream = stream or sys.stderr
    is_terminal = stream.isatty()
    if log_format is LogFormat.AUTO:
        log_format = LogFormat.CONSOLE if is_terminal else LogFormat.JSON
    threshold = logging.getLevelNamesMapping()[level.value.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.format_exc_info,
    ]
    last = [_escape, _renderer(log_format, is_terminal)]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    _route_libraries(shared, last, threshold, stream)


def _renderer(log_format: LogFormat, is_terminal: bool) -> Processor:
    if log_format is LogFormat.JSON:
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(colors=is_terminal, timestamp_key="time", pad_event_to=0)


def _route_libraries(shared: list[Processor], last: list[Processor], threshold: int, stream: TextIO) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _name_library],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(threshold, logging.INFO))


def _name_library(_: Any, __: str, event: EventDict) -> EventDict:
    event["component"] = event["_record"].name
    return event


def _escape(_: Any, __: str, event: EventDict) -> EventDict:
    traceback = event.pop("exception", None)
    _escape_values(event)
    if traceback is not None:
        # Only the line breaks that we put there ourselves may stay.
        event["exception"] = "\n".join(_TRACEBACK_MARK + _escaped(line) for line in str(traceback).split("\n"))
    return event


def _escape_values(event: MutableMapping[str, Any]) -> None:
    for key, value in event.items():
        if isinstance(value, str):
            if _CONTROL.search(value):
                event[key] = _escaped(value)
        elif not isinstance(value, bool | int | float | None):
            event[key] = _escaped(repr(value) if isinstance(value, bytes) else str(value))


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
