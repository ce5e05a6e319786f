"""The command line, run against a scripted node that lives on a loop of its own."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from services.scripted import ScriptedNode
from typer.testing import CliRunner, Result

from duecourse.cli.commands import app


class CommandLine:
    """Runs commands, by default against one node."""

    def __init__(self, address: str) -> None:
        self.environment = {"DUECOURSE_ADDRESS": address, "COLUMNS": "200", "NO_COLOR": "1"}

    def __call__(self, *arguments: str, given: str | bytes | None = None, **environment: str) -> Result:
        result = CliRunner().invoke(app, arguments, input=given, env=self.environment | environment)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert "Traceback" not in result.output
        return result


@pytest.fixture
def node() -> Iterator[ScriptedNode]:
    """Serve from another thread, since a command blocks the one that it runs in."""
    node = ScriptedNode()
    serving: list[Any] = []
    ready = threading.Event()

    async def serve() -> None:
        stop = asyncio.Event()
        serving.extend((asyncio.get_running_loop(), stop))
        async with node.serving():
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="scripted-node")
    thread.start()
    assert ready.wait(10)
    yield node
    loop, stop = serving
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def duecourse(node: ScriptedNode) -> Iterator[CommandLine]:
    """Run commands in this process; where logs go is put back afterwards, since a command's streams are closed then."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield CommandLine(node.address)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
