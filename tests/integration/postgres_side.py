"""The other side of the store's connections: a session of our own that looks at the server, and harms it."""

import contextlib
from collections.abc import AsyncIterator

import asyncpg
from services.waiting import eventually

_STORE = "application_name = 'duecourse' AND datname = current_database()"


class Side:
    def __init__(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        self.connection = connection

    async def commit_backends(self) -> list[int]:
        """Return the server's processes that serve commits."""
        rows = await self.connection.fetch(
            f"SELECT pid FROM pg_stat_activity WHERE {_STORE} AND query LIKE '%commit_writes%'"
        )
        return [row[0] for row in rows]

    async def waiting(self) -> list[int]:
        """Return the server's processes that wait for a lock on the store's behalf."""
        # Within a transaction the view otherwise stands still.
        await self.connection.execute("SELECT pg_stat_clear_snapshot()")
        rows = await self.connection.fetch(
            f"SELECT pid FROM pg_stat_activity WHERE {_STORE} AND wait_event_type = 'Lock'"
        )
        return [row[0] for row in rows]

    async def until_waiting(self) -> int:
        await eventually(self.waiting)
        found = await self.waiting()
        return found[0] if found else 0

    async def terminate(self, pid: int) -> None:
        await self.connection.execute("SELECT pg_terminate_backend($1)", pid)

    async def count(self, table: str) -> int:
        found: int = await self.connection.fetchval(f"SELECT count(*) FROM duecourse.{table}")
        return found


@contextlib.asynccontextmanager
async def side_of(dsn: str) -> AsyncIterator[Side]:
    connection = await asyncpg.connect(dsn, timeout=10, command_timeout=30, server_settings={"jit": "off"})
    try:
        yield Side(connection)
    finally:
        connection.terminate()
