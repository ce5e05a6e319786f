"""The store's own history: triggers that write down every change, and their export (see `histories`)."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import asyncpg

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import SystemClock

_SQL: Final = Path(__file__).with_name("audit.sql")
_NO_SERVER: Final = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError)
_POLL: Final = 20 * bounds.MILLISECOND


class Store:
    """The test's own way into the database: short connections, so that faults of the store do not stay in it."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self._clock = SystemClock()

    async def execute(self, statement: str, *, unseen: bool = False) -> None:
        """Execute statements; `unseen`: past the triggers."""
        async with self._connected(unseen=unseen) as connection:
            await connection.execute(statement)

    async def fetch(self, query: str, *arguments: Any, unseen: bool = False) -> list[Any]:
        """Return the rows of a query; `unseen`: what it changes passes by the triggers."""
        async with self._connected(unseen=unseen) as connection:
            return list(await connection.fetch(query, *arguments))

    @asynccontextmanager
    async def _connected(self, *, unseen: bool) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(self.dsn, timeout=10, command_timeout=30)
        try:
            if unseen:
                await connection.execute("SET session_replication_role = replica")
            yield connection
        finally:
            await connection.close()

    async def until_none(self, query: str, limit: Micros) -> None:
        """Wait until a query has no rows, through whatever keeps the server from answering."""
        start = self._clock.elapsed()
        while True:
            try:
                rows: list[Any] | None = await self.fetch(query)
            except _NO_SERVER:
                rows = None
            if rows == []:
                return
            assert self._clock.elapsed() - start < limit, f"after {limit / bounds.SECOND} s there are still {rows}"
            await self._clock.sleep(_POLL)

    async def install(self) -> None:
        """Begin the history."""
        await self.execute(_SQL.read_text(encoding="utf-8"))

    async def export(self, file: Path) -> None:
        """Write the history down."""
        rows = await self.fetch("SELECT number, wall, kind, shard, epoch, task_id, old, new FROM audit.change")
        with file.open("w", encoding="utf-8") as lines:
            for row in rows:
                line = {name: row[name] for name in ("kind", "number", "wall", "shard")}
                if row["kind"] == "term":
                    line["epoch"] = row["epoch"]
                else:
                    line["task_id"] = row["task_id"]
                    line |= {name: row[name] and json.loads(row[name]) for name in ("old", "new")}
                lines.write(json.dumps(line) + "\n")
