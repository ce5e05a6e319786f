"""A server for each test."""

from collections.abc import AsyncIterator

import pytest_asyncio
from rpc.edge import Edge


@pytest_asyncio.fixture
async def edge() -> AsyncIterator[Edge]:
    async with Edge().serving() as serving:
        yield serving
