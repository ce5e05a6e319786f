"""Logs: one line an event, whoever logs it and whatever is in it."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from duecourse.server.config import LogFormat, LogLevel
from duecourse.server.telemetry import logs

HOSTILE = "x\n2026-01-01T00:00:00Z [info] forged\x1b[2J\x9b1m\u2028\u202eend\x00"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_object_with_its_fields() -> None:
    stream = io.StringIO()
    logs.configure(LogFormat.JSON, LogLevel.INFO, stream)
    logs.get("terms").info("term_begun", shard=3, epoch=7, by="a-node")
    [event] = lines_of(stream)
    assert event.pop("time").endswith("Z")
    assert event == {
        "event": "term_begun",
        "level": "info",
        "component": "terms",
        "shard": 3,
        "epoch": 7,
        "by": "a-node",
    }


def test_fields_of_a_scope_are_on_all_its_events() -> None:
    stream = io.StringIO()
    logs.configure(LogFormat.JSON, LogLevel.INFO, stream)
    with structlog.contextvars.bound_contextvars(shard=5, epoch=9):
        logs.get("terms").info("loaded")
    logs.get("terms").info("idle")
    first, second = lines_of(stream)
    assert (first["shard"], first["epoch"]) == (5, 9)
    assert "shard" not in second


def test_less_important_events_are_left_out() -> None:
    stream = io.StringIO()
    logs.configure(LogFormat.JSON, LogLevel.WARNING, stream)
    logs.get("node").info("started")
    logging.getLogger("library").info("chatter")
    logs.get("node").warning("store_away")
    assert [event["event"] for event in lines_of(stream)] == ["store_away"]


def test_libraries_come_out_the_same_way_but_without_their_debugging() -> None:
    stream = io.StringIO()
    logs.configure(LogFormat.JSON, LogLevel.DEBUG, stream)
    logging.getLogger("asyncio").debug("Using selector")
    logging.getLogger("asyncio").warning("slow callback: %s", "f")
    [event] = lines_of(stream)
    assert (event["event"], event["component"], event["level"]) == ("slow callback: f", "asyncio", "warning")


@pytest.mark.parametrize("log_format", [LogFormat.JSON, LogFormat.CONSOLE])
def test_nobody_can_forge_a_line_or_move_the_cursor(log_format: LogFormat) -> None:
    stream = io.StringIO()
    logs.configure(log_format, LogLevel.INFO, stream)
    logs.get("rpc").info("refused", name=HOSTILE, names=[HOSTILE], raw=HOSTILE.encode(), error=ValueError(HOSTILE))
    logging.getLogger("library").info("got %s", HOSTILE)
    text = stream.getvalue()
    assert text.count("\n") == len(text.split("\n")) - 1 == 2
    assert not set("\x1b\x9b\u2028\u202e\x00") & set(text)


def test_a_traceback_on_the_console_cannot_pass_for_an_event() -> None:
    stream = io.StringIO()
    logs.configure(LogFormat.CONSOLE, LogLevel.INFO, stream)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logs.get("node").exception("loop_failed")
    first, *rest = stream.getvalue().rstrip("\n").split("\n")
    assert "loop_failed" in first
    assert len(rest) > 3
    assert all(line.startswith("    | ") for line in rest)


def test_a_traceback_in_json_stays_in_its_object() -> None:
    stream = io.StringIO()
    logs.configure(LogFormat.JSON, LogLevel.INFO, stream)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logs.get("node").exception("loop_failed")
    [event] = lines_of(stream)
    assert "ValueError" in event["exception"]


def test_a_terminal_gets_the_console_format_and_a_pipe_gets_json() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    logs.configure(LogFormat.AUTO, LogLevel.INFO, terminal)
    logs.get("node").info("started")
    logs.configure(LogFormat.AUTO, LogLevel.INFO, pipe)
    logs.get("node").info("started")
    assert "\x1b[" in terminal.getvalue()
    assert lines_of(pipe)[0]["event"] == "started"
