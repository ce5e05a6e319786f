"""A scripted node, and a client that talks to it."""

from collections.abc import AsyncIterator

import pytest
from services.scripted import ScriptedNode

from duecourse.client import Client
from duecourse.model.instants import Micros
from duecourse.timing.clock import SystemClock


@pytest.fixture
async def node() -> AsyncIterator[ScriptedNode]:
    async with ScriptedNode().serving() as node:
        yield node


class LeapingClock(SystemClock):
    """The machine's clock, but what sleeps has slept at once: a test of many retries does not wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self._leapt = 0

    def elapsed(self) -> Micros:
        return super().elapsed() + self._leapt

    async def sleep(self, duration: Micros) -> None:
        self._leapt += duration


@pytest.fixture
async def client(node: ScriptedNode) -> AsyncIterator[Client]:
    async with Client(node.address, follows_leaders=False, clock=LeapingClock()) as client:
        yield client
