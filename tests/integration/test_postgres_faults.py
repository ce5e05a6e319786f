"""What the store answers when Postgres is stopped, frozen, read-only or full, and that it goes on by itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
import pytest_asyncio
from conformance import writes
from integration.postgres_side import Side, side_of
from services.freezing import frozen
from services.postgres import SHARDS, server_on
from services.tcp_proxy import Postgres, TcpProxy
from services.waiting import eventually
from structlog.testing import capture_logs

from duecourse.model import bounds
from duecourse.server.core.fence import Fence
from duecourse.server.core.task import ShardId
from duecourse.server.storage import (
    CommitAnswer,
    Committed,
    Raised,
    RaiseRequest,
    Refused,
    ShardBatch,
    StoreUnavailable,
    Unknown,
)
from duecourse.server.storage.embedded import EmbeddedPostgres
from duecourse.server.storage.migrate import migrate
from duecourse.server.storage.postgres import PostgresStore
from duecourse.timing.clock import SystemClock

SHARD = ShardId(0)
SHORT = 2 * bounds.SECOND
"""A time-out of commits that is waited for, and within which others come through on a machine that is busy."""


class Leader:
    """A store and one term."""

    def __init__(self, store: PostgresStore, fence: Fence) -> None:
        self.store = store
        self.fence = fence

    def batch(self) -> ShardBatch:
        return writes.batch(self.fence, writes.insert(SHARDS, 0))

    async def commit(self, batch: ShardBatch | None = None) -> CommitAnswer:
        return (await self.store.commit([batch or self.batch()]))[SHARD]

    async def commits_again(self) -> bool:
        return isinstance(await self.commit(), Committed)

    async def reads_again(self) -> bool:
        try:
            return len(await self.store.shards()) == SHARDS
        except StoreUnavailable:
            return False


@contextlib.asynccontextmanager
async def leading(dsn: str, commit_timeout: int = bounds.COMMIT_TIMEOUT) -> AsyncIterator[Leader]:
    store = PostgresStore(dsn, commit_timeout=commit_timeout)
    await store.open()
    raised = (await store.raise_epochs("solo", [RaiseRequest(SHARD, b"holder")], writes.NOW))[SHARD]
    assert isinstance(raised, Raised)
    leader = Leader(store, raised.fence)
    # The second one creates no queue any more; from then on every commit is one round trip.
    for _ in range(2):
        await eventually(leader.commits_again)
    try:
        yield leader
    finally:
        await store.close()


@pytest_asyncio.fixture
async def leader(postgres_dsn: str) -> AsyncIterator[Leader]:
    async with leading(postgres_dsn) as leader:
        yield leader


@pytest_asyncio.fixture
async def side(postgres_dsn: str) -> AsyncIterator[Side]:
    async with side_of(postgres_dsn) as side:
        yield side


async def test_a_commit_whose_backend_is_terminated_is_unknown(leader: Leader, side: Side) -> None:
    # The server ends the wait for the lock after a moment; on a slow machine that may come before our blow.
    async def answered_unknown() -> bool:
        async with side.connection.transaction():
            await side.connection.execute("LOCK TABLE duecourse.task IN EXCLUSIVE MODE")
            async with terminating(side):
                answer = await leader.commit()
        assert isinstance(answer, Unknown | Refused)
        return isinstance(answer, Unknown)

    await eventually(answered_unknown)
    await eventually(leader.commits_again)


@contextlib.asynccontextmanager
async def terminating(side: Side) -> AsyncIterator[None]:
    """Terminate the first process that waits for a lock meanwhile."""

    async def strike() -> None:
        await side.terminate(await side.until_waiting())

    async with asyncio.TaskGroup() as group:
        group.create_task(strike())
        yield


async def test_a_commit_on_a_frozen_backend_is_unknown_in_time_and_may_land_later(postgres_dsn: str) -> None:
    async with leading(postgres_dsn, SHORT) as leader, side_of(postgres_dsn) as side:
        [pid] = await side.commit_backends()
        batch = leader.batch()
        with frozen(pid):
            answer = await leader.commit(batch)
            assert isinstance(answer, Unknown)
            # Another connection serves the next one at once.
            assert await leader.commits_again()

        async def has_landed_or_gone() -> bool:
            return pid not in await side.commit_backends()

        await eventually(has_landed_or_gone)
        # Either way the store holds it at most once.
        again = await leader.commit(batch)
        assert isinstance(again, Committed)


async def test_connections_that_were_forgotten_on_the_way_cost_one_time_out_for_all(postgres_dsn: str) -> None:
    target = urlsplit(postgres_dsn)
    assert target.hostname is not None
    assert target.port is not None
    clock = SystemClock()
    async with TcpProxy(target.hostname, target.port, Postgres) as proxy:
        through = target._replace(netloc=f"{target.netloc.rpartition('@')[0]}@{proxy.endpoint}").geturl()
        async with leading(through, SHORT) as leader:
            assert await leader.reads_again()
            await leader.store.load_held([SHARD])
            proxy.forget()
            assert isinstance(await leader.commit(), Unknown)
            assert proxy.faults["forgotten"] >= 3
            began = clock.elapsed()
            assert await leader.commits_again()
            assert await leader.reads_again()
            await leader.store.load_held([SHARD])
            # A read that is not answered is given up after 5 s.
            assert clock.elapsed() - began < 5 * bounds.SECOND


async def test_idle_connections_that_were_terminated_are_replaced(leader: Leader, side: Side) -> None:
    for pid in await side.commit_backends():
        await side.terminate(pid)

    async def are_gone() -> bool:
        return not await side.commit_backends()

    await eventually(are_gone)
    await eventually(leader.commits_again)
    assert await leader.reads_again()


async def test_a_dropped_table_is_a_refusal_of_the_store_not_of_the_data(leader: Leader, side: Side) -> None:
    await side.connection.execute("ALTER TABLE duecourse.attempt RENAME TO attempt_away")
    await side.connection.execute("ALTER TABLE duecourse.queue RENAME TO queue_away")
    batch = writes.batch(leader.fence, writes.insert(SHARDS, 0, lane=writes.lane(queue="new")))
    answer = await leader.commit(batch)
    assert isinstance(answer, Refused)
    assert not answer.is_data
    await side.connection.execute("ALTER TABLE duecourse.queue_away RENAME TO queue")
    assert isinstance(await leader.commit(batch), Committed)


async def test_a_read_only_server_refuses_and_is_left_until_it_serves_again(own_postgres: EmbeddedPostgres) -> None:
    async with leading(own_postgres.dsn) as leader, side_of(own_postgres.dsn) as side:
        await side.connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await side.connection.execute("SELECT pg_reload_conf()")

        async def is_refused() -> bool:
            answer = await leader.commit()
            assert not isinstance(answer, Unknown)
            return isinstance(answer, Refused)

        await eventually(is_refused)
        refused = await leader.commit()
        assert isinstance(refused, Refused)
        assert not refused.is_data
        with pytest.raises(StoreUnavailable):
            await leader.store.purge(leader.fence, 1, 1)
        # Nor are reads served by it: a standby may lag behind.
        with pytest.raises(StoreUnavailable):
            await leader.store.shards()
        await side.connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
        await side.connection.execute("SELECT pg_reload_conf()")
        await eventually(leader.commits_again)
        await eventually(leader.reads_again)


async def test_what_was_committed_survives_a_crash_of_the_server(own_postgres: EmbeddedPostgres) -> None:
    async with leading(own_postgres.dsn) as leader:
        batches = [leader.batch() for _ in range(20)]
        for batch in batches:
            assert isinstance(await leader.commit(batch), Committed)
        await own_postgres.kill()
        for _ in range(3):
            assert isinstance(await leader.commit(), Refused | Unknown)
            with pytest.raises(StoreUnavailable):
                await leader.store.shards()
        await own_postgres.start()
        await eventually(leader.commits_again)
        await eventually(leader.reads_again)
        found = await leader.store.load_tasks([batch.inserts[0].task.key for batch in batches])
        assert None not in found


async def test_a_restart_in_good_order_is_gone_through(own_postgres: EmbeddedPostgres) -> None:
    async with leading(own_postgres.dsn) as leader:
        await own_postgres.stop()
        answer = await leader.commit()
        assert isinstance(answer, Refused | Unknown)
        await own_postgres.start()
        await eventually(leader.commits_again)


async def test_a_server_without_room_for_connections_refuses(tmp_path: Path) -> None:
    settings = {"max_connections": "6", "superuser_reserved_connections": "0", "shared_buffers": "16MB"}
    async with server_on(tmp_path, settings) as server:
        await migrate(server.dsn, SHARDS)
        async with leading(server.dsn) as leader, contextlib.AsyncExitStack() as guests:
            guest = None
            with contextlib.suppress(asyncpg.TooManyConnectionsError):
                while True:
                    guest = await asyncpg.connect(server.dsn, timeout=10)
                    guests.callback(guest.terminate)
            assert guest is not None
            with pytest.raises(StoreUnavailable):
                await leader.store.shards()
            # The connection that it has already still serves.
            assert await leader.commits_again()
            guest.terminate()
            await eventually(leader.reads_again)


async def test_a_server_that_is_not_there_is_unavailable(own_postgres: EmbeddedPostgres) -> None:
    await own_postgres.stop()
    store = PostgresStore(own_postgres.dsn)
    with pytest.raises(StoreUnavailable):
        await store.open()


async def test_commits_wait_for_the_disk_where_the_default_does_not(postgres_dsn: str, side: Side) -> None:
    name = await side.connection.fetchval("SELECT current_database()")
    await side.connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    await side.connection.execute(
        "CREATE TABLE seen AS SELECT ''::text AS setting WHERE false;"
        "CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO public.seen VALUES (current_setting('synchronous_commit')); RETURN NEW; END $$;"
        "CREATE TRIGGER look BEFORE INSERT ON duecourse.task FOR EACH ROW EXECUTE FUNCTION look()"
    )
    async with leading(postgres_dsn):
        rows = await side.connection.fetch("SELECT DISTINCT setting FROM seen")
        assert [row[0] for row in rows] == ["on"]


async def test_a_store_says_at_its_start_what_could_lose_acknowledged_tasks(tmp_path: Path) -> None:
    settings = {"fsync": "off", "shared_buffers": "32MB"}
    async with server_on(tmp_path, settings) as server:
        await migrate(server.dsn, 1)
        store = PostgresStore(server.dsn)
        with capture_logs() as events:
            await store.open()
        await store.close()
    assert [(event["event"], event["log_level"]) for event in events] == [("store_weak", "warning")]
    assert "fsync" in events[0]["detail"]
