"""A scripted node, and a client that talks to it."""

from collections.abc import AsyncIterator

import pytest
from services.scripted import ScriptedNode

from duecourse.client import Client


@pytest.fixture
async def node() -> AsyncIterator[ScriptedNode]:
    async with ScriptedNode().serving() as node:
        yield node


@pytest.fixture
async def client(node: ScriptedNode) -> AsyncIterator[Client]:
    async with Client(node.address) as client:
        yield client
