"""Brings a Postgres database to the schema that this version of Duecourse uses, and tells whether it has it.

Migrations are numbered files, applied in order, each in a transaction of its own together with its record, under an
advisory lock, so that two runs at once do no harm. They only go forward. The record holds the file's checksum: a
database that was changed by a file that has since been altered is refused (drift).

`SCHEMA_VERSION` is the number of the last migration. The schema's row holds its version and the lowest node version
that may still use it, so that nodes of this release and of the one before run side by side while one is rolled out.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Final

import asyncpg

from duecourse.model import bounds, slots
from duecourse.server.storage import StoreRefused, StoreUnavailable, queries

_SQL: Final = queries.statements("migrate.sql")
_FILES: Final = queries.migrations()
_FILE_NAME: Final = re.compile(r"(\d{4})_\w+\.sql")
_MIN_NODE_VERSION: Final = re.compile(rb"^-- min-node-version: (\d+)$", re.MULTILINE)

SCHEMA_VERSION: Final = len(_FILES)
OLDEST_POSTGRES: Final = 15

_TIMEOUT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """What a run of `migrate` found and did."""

    applied: tuple[str, ...]
    """The migrations that this run applied."""
    version: int
    """The schema's version now."""
    shards: int
    """How many shards there are; their number is settled by the first run."""


async def migrate(dsn: str, shards: int = bounds.DEFAULT_SHARDS) -> MigrationReport:
    """Apply what is missing and write the shard rows if there are none.

    Raises StoreUnavailable, and StoreRefused if the database is not one that can be brought to this version.
    """
    if not 1 <= shards <= bounds.SLOTS:
        raise ValueError(f"there can be 1 to {bounds.SLOTS} shards, not {shards}")
    try:
        connection = await asyncpg.connect(dsn, timeout=10, command_timeout=_TIMEOUT_SECONDS)
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise StoreUnavailable(f"cannot connect: {str(error) or 'no answer in time'}") from error
    try:
        check_server(connection.get_server_version().major)
        await connection.execute(_SQL["lock"])
        await connection.execute(_SQL["bootstrap"])
        applied = await _apply_missing(connection)
        return MigrationReport(tuple(applied), SCHEMA_VERSION, await _ensure_shards(connection, shards))
    except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresError) as error:
        raise StoreUnavailable(f"the migration was interrupted; run it again: {error}") from error
    finally:
        await connection.close(timeout=10)


async def check_schema(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Raise StoreRefused unless this node may use the database as it is."""
    check_server(connection.get_server_version().major)
    if not await connection.fetchval(_SQL["schema_exists"]):
        raise StoreRefused("the database has no Duecourse schema: run `duecourse store migrate`")
    row = await connection.fetchrow(_SQL["versions"])
    version, min_node_version = (row["version"], row["min_node_version"]) if row else (0, 0)
    if version < SCHEMA_VERSION:
        raise StoreRefused(
            f"the schema has version {version}, this node needs {SCHEMA_VERSION}: run `duecourse store migrate`"
        )
    if min_node_version > SCHEMA_VERSION:
        raise StoreRefused(
            f"the schema has version {version} and is for nodes of version {min_node_version} or newer, this one is of "
            f"version {SCHEMA_VERSION}: install a newer Duecourse on this node"
        )
    if not await connection.fetchval(_SQL["count_shards"]):
        raise StoreRefused("the database has no shards: run `duecourse store migrate`")


def check_server(major: int) -> None:
    """Raise StoreRefused if the server is too old."""
    if major < OLDEST_POSTGRES:
        raise StoreRefused(f"the server is Postgres {major}; Duecourse needs {OLDEST_POSTGRES} or newer")


async def _apply_missing(connection: "asyncpg.Connection[asyncpg.Record]") -> list[str]:
    known = {row["number"]: row for row in await connection.fetch(_SQL["applied"])}
    if known and max(known) > SCHEMA_VERSION:
        raise StoreRefused(
            f"the schema has version {max(known)}, newer than this Duecourse's {SCHEMA_VERSION}: migrate with the newer"
        )
    applied = []
    for number, (name, text) in enumerate(_FILES.items(), start=1):
        match = _FILE_NAME.fullmatch(name)
        min_node_version = _MIN_NODE_VERSION.search(text)
        assert match is not None, f"not a migration's name: {name}"
        assert int(match[1]) == number, f"the migrations have a gap before {name}"
        assert min_node_version is not None, f"{name} does not say which nodes may still use its schema"
        checksum = hashlib.sha256(text).digest()
        if number in known:
            if known[number]["checksum"] != checksum:
                raise StoreRefused(
                    f"migration {name} is not the one that was applied here as {known[number]['name']}: another "
                    "version of Duecourse made this database; use that one, or another database"
                )
            continue
        async with connection.transaction():
            await connection.execute(text.decode())
            await connection.execute(_SQL["record"], number, name, checksum)
            await connection.execute(_SQL["set_version"], number, int(min_node_version[1]))
        applied.append(name)
    return applied


async def _ensure_shards(connection: "asyncpg.Connection[asyncpg.Record]", shards: int) -> int:
    found: int = await connection.fetchval(_SQL["count_shards"])
    if found:
        return found
    numbers = range(shards)
    await connection.execute(
        _SQL["insert_shards"],
        list(numbers),
        [slots.first_slot(number, shards) for number in numbers],
        [slots.first_slot(number + 1, shards) for number in numbers],
    )
    return shards
