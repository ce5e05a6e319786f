"""Every test here runs once on each store."""

from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio
from conformance.harness import Harness
from services.postgres import SHARDS

from duecourse.server.core.task import TaskKey
from duecourse.server.storage.memory import MemoryStore
from duecourse.server.storage.postgres import PostgresStore

_TABLES = ("shard", "queue", "task", "attempt")


@pytest.fixture(params=["memory", "postgres"])
def dsn(request: pytest.FixtureRequest) -> str | None:
    """Where the store's database is; None for the store that needs none."""
    if request.param == "memory":
        return None
    found: str = request.getfixturevalue("postgres_dsn")
    return found


@pytest_asyncio.fixture
async def harness(dsn: str | None) -> AsyncIterator[Harness]:
    if dsn is None:
        yield _memory()
        return
    store = PostgresStore(dsn)
    await store.open()
    connection = await asyncpg.connect(dsn, timeout=10, command_timeout=10)

    async def snapshot() -> bytes:
        lines = []
        for table in _TABLES:
            rows = await connection.fetch(f"SELECT t::text FROM duecourse.{table} t ORDER BY 1")
            lines += [f"{table} {row[0]}" for row in rows]
        return "\n".join(lines).encode()

    async def spoil(key: TaskKey) -> None:
        await connection.execute(
            "UPDATE duecourse.task SET policy = '\\xff' WHERE namespace = $1 AND task_id = $2", *key
        )

    yield Harness(store, snapshot, spoil)
    await connection.close()
    await store.close()


def _memory() -> Harness:
    store = MemoryStore(SHARDS)

    async def snapshot() -> bytes:
        return store.snapshot()

    async def spoil(key: TaskKey) -> None:
        store.spoil(key)

    return Harness(store, snapshot, spoil)
