"""Reads a whole Postgres store and tells where it breaks the rules of `soundness`: `duecourse store fsck`.

It changes nothing: its session cannot write. It may run beside live nodes: it reads in batches of bounded size, holds
no lock and no snapshot from one batch to the next, and looks at what it finds a second time before it is reported.
Of Postgres' own indexes only the due index is held against the rows; the others are for `pg_amcheck`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import asyncpg

from duecourse.server.core.task import FailureReason
from duecourse.server.storage import ShardRow, StoreUnavailable, migrate, queries, soundness
from duecourse.server.storage.connections import Row
from duecourse.server.storage.soundness import Finding, Rule

MOST_SHOWN: Final = 1_000
"""How many findings a report holds; all are counted."""
_BATCH: Final = 1_000
_CONNECT_SECONDS: Final = 10.0
_STATEMENT_SECONDS: Final = 60.0
_SESSION: Final[Mapping[str, str]] = {
    "application_name": "duecourse-fsck",
    "default_transaction_read_only": "on",
    "jit": "off",
    # Rows are to be found by the index that nodes find them by, also where the planner knows a shorter way.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
}
_SQL: Final = queries.statements("fsck.sql", queries.statements("reads.sql"))


@dataclass(slots=True)
class Report:
    """What was read, and what is wrong with it."""

    shards: int = 0
    tasks: int = 0
    attempts: int = 0
    """Records of attempts; the latest attempt of a task is in its row."""
    set_aside: int = 0
    """Tasks that do not decode, of which that is known: they are FAILED, record corrupt."""
    broken: Counter[Rule] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    """The first ones."""

    @property
    def is_sound(self) -> bool:
        """Nothing is wrong."""
        return not self.broken

    def add(self, findings: Sequence[Finding]) -> None:
        """Count findings, and keep those that there is room for."""
        self.broken.update(finding.rule for finding in findings)
        self.findings += findings[: MOST_SHOWN - len(self.findings)]


async def check(dsn: str, tell: Callable[[Report], None] = lambda _: None, *, batch: int = _BATCH) -> Report:
    """Read a store; `tell` is called after each batch.

    Raises StoreUnavailable, StoreRefused, and ValueError for a connection string that cannot be read.
    """
    try:
        connection = await asyncpg.connect(
            dsn, timeout=_CONNECT_SECONDS, command_timeout=_STATEMENT_SECONDS, server_settings=dict(_SESSION)
        )
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise StoreUnavailable(f"cannot connect: {str(error) or 'no answer in time'}") from error
    try:
        await migrate.check_schema(connection)
        return await _Reader(connection, tell, batch).read()
    except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresError) as error:
        raise StoreUnavailable(f"the store was not read to its end; run it again: {error}") from error
    finally:
        await connection.close(timeout=10)


class _Reader:
    """Reads one store."""

    def __init__(self, connection: "asyncpg.Connection[Row]", tell: Callable[[Report], None], batch: int) -> None:
        self._connection = connection
        self._tell = tell
        self._batch = batch
        self._report = Report()

    async def read(self) -> Report:
        """Read shards, tasks and attempts."""
        await self._read_shards()
        await self._read_tasks()
        await self._read_attempts()
        return self._report

    async def _read_shards(self) -> None:
        findings: set[Finding] = set()
        for look in range(2):
            shards = [ShardRow(*row) for row in await self._connection.fetch(_SQL["shards"])]
            found = set(soundness.of_shards(shards))
            findings = findings & found if look else found
        self._report.shards = len(shards)
        self._report.add(sorted(findings, key=lambda finding: (finding.shard or 0, finding.detail)))

    async def _read_tasks(self) -> None:
        after: tuple[Any, ...] = ("", "")
        while found := await self._connection.fetch(_SQL["next_tasks"], *after, self._batch):
            self._report.tasks += len(found)
            self._report.set_aside += sum(row["failure_reason"] == FailureReason.RECORD_CORRUPT for row in found)
            suspects = [row for row in found if soundness.of_task(row)]
            if suspects:
                keys = [[row["namespace"] for row in suspects], [row["task_id"] for row in suspects]]
                await self._look_again(soundness.of_task, suspects, "these_tasks", keys)
            after = (found[-1]["namespace"], found[-1]["task_id"])
            self._tell(self._report)

    async def _read_attempts(self) -> None:
        after: tuple[Any, ...] = ("", "", 0)
        while found := await self._connection.fetch(_SQL["next_attempts"], *after, self._batch):
            self._report.attempts += len(found)
            suspects = [row for row in found if soundness.of_attempt(row)]
            if suspects:
                keys = [[row[name] for row in suspects] for name in ("namespace", "task_id", "number")]
                await self._look_again(soundness.of_attempt, suspects, "these_attempts", keys)
            after = (found[-1]["namespace"], found[-1]["task_id"], found[-1]["number"])
            self._tell(self._report)

    async def _look_again(
        self, rules: Callable[[Row], list[Finding]], suspects: Sequence[Row], statement: str, keys: list[list[Any]]
    ) -> None:
        """Report what is still wrong with rows, of that which was wrong with them at the first look."""
        before = {(finding.rule, finding.key) for row in suspects for finding in rules(row)}
        for row in await self._connection.fetch(_SQL[statement], *keys):
            self._report.add([finding for finding in rules(row) if (finding.rule, finding.key) in before])
