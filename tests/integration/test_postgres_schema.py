"""Migrations, the checks a node makes at its start, and what the schema was laid out for."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from conformance import writes
from integration.postgres_side import Side, side_of
from services.postgres import SHARDS
from services.waiting import eventually

from duecourse.model import bounds, slots
from duecourse.server.core.task import DueKey, ShardId
from duecourse.server.storage import (
    Committed,
    LaneRequest,
    Raised,
    RaiseRequest,
    StoreRefused,
    StoreUnavailable,
    migrate,
)
from duecourse.server.storage.embedded import EmbeddedPostgres
from duecourse.server.storage.postgres import PostgresStore


@pytest_asyncio.fixture
async def side(postgres_dsn: str) -> AsyncIterator[Side]:
    async with side_of(postgres_dsn) as side:
        yield side


async def refusal(dsn: str) -> str:
    with pytest.raises(StoreRefused) as refused:
        await PostgresStore(dsn).open()
    return str(refused.value)


async def drop(side: Side) -> None:
    await side.connection.execute("SET client_min_messages = error; DROP SCHEMA duecourse CASCADE")


async def test_a_second_run_finds_nothing_to_do(postgres_dsn: str) -> None:
    report = await migrate.migrate(postgres_dsn, 99)
    assert report == migrate.MigrationReport((), migrate.SCHEMA_VERSION, SHARDS)


async def test_two_runs_at_once_do_the_work_once(postgres_dsn: str, side: Side) -> None:
    await drop(side)
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(migrate.migrate(postgres_dsn, 5)) for _ in range(4)]
    applied = [run.result().applied for run in runs if run.result().applied]
    assert [len(names) for names in applied] == [migrate.SCHEMA_VERSION]
    assert {run.result().shards for run in runs} == {5}


@pytest.mark.parametrize("shards", [1, 3, 64, 1_000])
async def test_the_first_run_writes_the_shards_that_the_slot_hash_names(
    postgres_dsn: str, side: Side, shards: int
) -> None:
    await drop(side)
    assert (await migrate.migrate(postgres_dsn, shards)).shards == shards
    store = PostgresStore(postgres_dsn)
    await store.open()
    rows = await store.shards()
    await store.close()
    for row in rows:
        for slot in (row.slot_from, row.slot_until - 1):
            assert slots.shard_of_slot(slot, shards) == row.shard
    assert sum(row.slot_until - row.slot_from for row in rows) == bounds.SLOTS


async def test_a_number_of_shards_that_cannot_be_is_refused(postgres_dsn: str) -> None:
    for shards in (0, -1, bounds.SLOTS + 1):
        with pytest.raises(ValueError, match="shards"):
            await migrate.migrate(postgres_dsn, shards)


async def test_an_altered_migration_is_refused(postgres_dsn: str, side: Side) -> None:
    await side.connection.execute("UPDATE duecourse.migration SET checksum = 'other' WHERE number = 2")
    with pytest.raises(StoreRefused, match="0002_"):
        await migrate.migrate(postgres_dsn)


async def test_an_interrupted_run_is_taken_up_again(postgres_dsn: str, side: Side) -> None:
    await drop(side)
    await migrate.migrate(postgres_dsn)
    await side.connection.execute(
        "DELETE FROM duecourse.migration WHERE number = 4; UPDATE duecourse.schema SET version = 3;"
        "DROP TABLE duecourse.clock;"
        "DROP FUNCTION duecourse.reference_time, duecourse.accept_clock, duecourse.confirm_clock"
    )
    report = await migrate.migrate(postgres_dsn)
    assert report.applied == ("0004_clock.sql",)


async def test_an_older_schema_is_refused_with_what_to_do(postgres_dsn: str, side: Side) -> None:
    await side.connection.execute("UPDATE duecourse.schema SET version = version - 1")
    assert "duecourse store migrate" in await refusal(postgres_dsn)


async def test_an_empty_database_is_refused_with_what_to_do(postgres_dsn: str, side: Side) -> None:
    await drop(side)
    assert "duecourse store migrate" in await refusal(postgres_dsn)


async def test_a_database_without_shards_is_refused_with_what_to_do(postgres_dsn: str, side: Side) -> None:
    await side.connection.execute("DELETE FROM duecourse.shard")
    assert "duecourse store migrate" in await refusal(postgres_dsn)


async def test_a_schema_for_newer_nodes_is_refused_with_what_to_do(postgres_dsn: str, side: Side) -> None:
    await side.connection.execute("UPDATE duecourse.schema SET version = version + 2, min_node_version = version + 1")
    assert "newer Duecourse" in await refusal(postgres_dsn)
    await side.connection.execute(
        "INSERT INTO duecourse.migration (number, name, checksum) VALUES (99, '0099_later.sql', '')"
    )
    with pytest.raises(StoreRefused, match="newer"):
        await migrate.migrate(postgres_dsn)


async def test_a_newer_schema_that_still_serves_this_version_is_used(postgres_dsn: str, side: Side) -> None:
    await side.connection.execute("UPDATE duecourse.schema SET version = version + 1")
    store = PostgresStore(postgres_dsn)
    await store.open()
    assert len(await store.shards()) == SHARDS
    await store.close()


def test_a_server_that_is_too_old_is_refused() -> None:
    with pytest.raises(StoreRefused, match="Postgres 14"):
        migrate.check_server(14)
    migrate.check_server(15)


async def test_a_database_that_is_not_there_cannot_be_migrated(postgres_server: EmbeddedPostgres) -> None:
    with pytest.raises(StoreUnavailable, match="no_such_database"):
        await migrate.migrate(postgres_server.dsn_of("no_such_database"))


async def test_a_grant_touches_no_index(postgres_dsn: str, side: Side) -> None:
    store = PostgresStore(postgres_dsn)
    await store.open()
    raised = (await store.raise_epochs("solo", [RaiseRequest(ShardId(0), b"h")], writes.NOW))[ShardId(0)]
    assert isinstance(raised, Raised)
    inserts = [writes.insert(SHARDS, 0, payload=bytes(200)) for _ in range(300)]
    await writes.apply(store, raised.fence, *inserts)
    await writes.apply(store, raised.fence, *(writes.grant(insert.task, raised.fence) for insert in inserts))
    await store.close()

    async def updates_are_counted() -> bool:
        return bool(await side.connection.fetchval(f"SELECT n_tup_upd >= 300 FROM {_STATISTICS}"))

    await eventually(updates_are_counted)
    hot = await side.connection.fetchval(f"SELECT n_tup_hot_upd FROM {_STATISTICS}")
    # All tasks of a page were granted at once; it has room for a second version of most of them.
    assert hot >= 240


async def test_no_read_of_a_leader_goes_through_the_whole_table(postgres_dsn: str, side: Side) -> None:
    store = PostgresStore(postgres_dsn)
    await store.open()
    raised = await store.raise_epochs("solo", [RaiseRequest(ShardId(n), b"h") for n in range(SHARDS)], writes.NOW)
    fences = [answer.fence for answer in raised.values() if isinstance(answer, Raised)]
    for fence in fences:
        shard = fence.shard
        inserts = [writes.insert(SHARDS, shard, run_at=writes.NOW + n * bounds.SECOND) for n in range(200)]
        await writes.apply(store, fence, *inserts)
        await writes.apply(store, fence, *(writes.grant(insert.task, fence) for insert in inserts[:20]))
    before = await side.connection.fetchval(f"SELECT seq_scan FROM {_STATISTICS}")
    shards = [ShardId(n) for n in range(SHARDS)]
    end = writes.NOW + 100 * bounds.SECOND
    for _ in range(8):
        assert len((await store.load_held(shards)).tasks) == 20 * SHARDS
        assert len((await store.load_buckets(shards, 0, end, 10)).cut) == SHARDS
        [lane] = await store.load_lanes([LaneRequest(ShardId(0), writes.LANE, DueKey(0, 0), end, 7)])
        assert len(lane.tasks) == 7
        assert len((await store.load_oldest_due(shards, end, 5)).tasks) == 5 * SHARDS
        assert isinstance((await store.commit([writes.batch(fences[0])]))[ShardId(0)], Committed)
    await store.close()

    async def sessions_have_ended() -> bool:
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'duecourse'"
        return not await side.connection.fetchval(query + " AND datname = current_database()")

    await eventually(sessions_have_ended)
    assert await side.connection.fetchval(f"SELECT seq_scan FROM {_STATISTICS}") == before


_STATISTICS = "pg_stat_user_tables WHERE schemaname = 'duecourse' AND relname = 'task'"
