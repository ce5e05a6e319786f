"""Faults of Postgres: restarted, killed, frozen, read-only, full, and so on. The node lives through all, unaided."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import asyncpg
import pytest
from faults.cluster import SETTLED, Cluster, children_of, parent_of
from faults.recording_client import Ask
from services.freezing import frozen
from services.postgres import SHARDS, server_on
from services.waiting import until

from duecourse import client as sdk
from duecourse.cli.launcher.children import Nursery
from duecourse.model import bounds
from duecourse.server.storage.embedded import EmbeddedPostgres
from duecourse.server.storage.migrate import migrate

_Guest: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

_DEADLINE = timedelta(seconds=20)
_DISK_BYTES = 192 * 1024 * 1024
_FILLING = "filling"
_REFUSE_SOME = """
    CREATE FUNCTION audit.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF random() < 0.2 THEN RAISE EXCEPTION USING ERRCODE = 'serialization_failure'; END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON duecourse.task FOR EACH STATEMENT EXECUTE FUNCTION audit.refuse();
"""
OURS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'duecourse' AND datname = current_database()"


async def _end(server: EmbeddedPostgres, how: str, postmaster: int, cluster: Cluster) -> None:
    match how:
        case "fast":
            await server.stop()
        case "immediate":
            await server.kill()
        case "kill -9":
            os.kill(postmaster, signal.SIGKILL)
            while server.is_running:
                await cluster.clock.sleep(bounds.MILLISECOND)


@pytest.mark.parametrize("how", ["fast", "immediate", "kill -9"])
async def test_a_postgres_that_is_restarted_costs_nothing_but_time(
    cluster_on_own_postgres: Cluster, own_postgres: EmbeddedPostgres, how: str, is_long: bool
) -> None:
    cluster = cluster_on_own_postgres
    node = cluster.node.child.pid
    cluster.start_worker()
    async with cluster.load(), cluster.client() as client:
        for _ in range(5 if is_long else 1):
            await cluster.recovers("the start")
            await _end(own_postgres, how, await postmaster_of(cluster), cluster)
            await cluster.refuses(client, _DEADLINE)
            await own_postgres.start()
            await cluster.recovers(f"restart, {how}")
    await cluster.settle()
    assert cluster.node.child.pid == node


async def test_a_node_with_nothing_to_do_notices_that_postgres_is_back(
    cluster_on_own_postgres: Cluster, own_postgres: EmbeddedPostgres, is_long: bool
) -> None:
    cluster = cluster_on_own_postgres
    async with cluster.client(timedelta(seconds=10)) as client:
        for number in range(10 if is_long else 1):
            await own_postgres.stop()
            await cluster.refuses(client, _DEADLINE, times=20)
            await own_postgres.start()
            began = cluster.clock.elapsed()
            (answer,) = await client.submit(*cluster.ask_many(f"back-{number}", 1, bounds.SECOND))
            assert isinstance(answer, sdk.SubmittedTask), answer
            print(f"taken again after {(cluster.clock.elapsed() - began) // bounds.MILLISECOND} ms")
    cluster.start_worker()
    await cluster.settle()


async def test_a_postgres_that_is_away_for_long_is_waited_for(
    cluster_on_own_postgres: Cluster, own_postgres: EmbeddedPostgres, is_long: bool
) -> None:
    cluster = cluster_on_own_postgres
    cluster.start_worker()
    async with cluster.load():
        await cluster.recovers("the start")
        await _lose_an_answer(cluster, own_postgres)
        # Long enough for the node to have tried many times to raise the terms that ended with a lost answer.
        await cluster.clock.sleep((180 if is_long else 30) * bounds.SECOND)
        await own_postgres.start()
        assert cluster.node.child.is_running, f"the node gave up: {cluster.node.end_of_log()}"
        await cluster.recovers("a long absence")
    await cluster.settle()


async def _lose_an_answer(cluster: Cluster, server: EmbeddedPostgres) -> None:
    """Kill Postgres, again and again until it was in the middle of a commit; it stays away."""
    for _ in range(30):
        await server.kill()
        for _ in range(20):
            if '"reason": "unknown"' in cluster.node.log.read_text():
                return
            await cluster.clock.sleep(50 * bounds.MILLISECOND)
        await server.start()
        await cluster.recovers("a kill between commits")
    pytest.fail("no answer was lost")


async def test_connections_that_are_ended_every_second_are_replaced(cluster: Cluster, is_long: bool) -> None:
    cluster.start_worker()
    async with cluster.load():
        await end_connections(cluster, 60 if is_long else 6, least=7)
    await cluster.recovers("ended connections")
    await cluster.settle()
    left = await cluster.store.fetch(OURS)
    assert len(left) <= 8, "connections leak"


async def end_connections(cluster: Cluster, rounds: int, least: int) -> None:
    """End the nodes' connections every second, so many times, and on until so many were ended."""
    ended = number = 0
    while number < rounds or ended < least:
        # Nodes that get no time to run have not connected again.
        assert number < rounds + 30, "there was no connection to end"
        await cluster.clock.sleep(bounds.SECOND)
        ended += len(await cluster.store.fetch(f"SELECT pg_terminate_backend(pid) FROM ({OURS}) ours"))
        number += 1


@pytest.mark.parametrize("who", ["the node's backends", "the whole server"])
async def test_a_frozen_postgres_is_answered_unavailable_and_lived_through(
    cluster_on_own_postgres: Cluster, who: str, is_long: bool
) -> None:
    cluster = cluster_on_own_postgres
    node = cluster.node.child.pid
    cluster.start_worker()
    async with cluster.client() as client:
        await cluster.recovers("the start")
        for number in range(5 if is_long else 1):
            # Nothing is under way at first: a backend that is frozen in the middle of a commit keeps its locks.
            await cluster.comes_to_rest()
            await client.submit(*cluster.ask_many(f"due-{number}", 100, 4 * bounds.SECOND, after=2 * bounds.SECOND))
            postmaster = await postmaster_of(cluster)
            if who == "the whole server":
                pids = [postmaster, *children_of(postmaster)]
            else:
                pids = [row["pid"] for row in await cluster.store.fetch(OURS)]
            assert pids, "there is nothing to freeze"
            with frozen(*pids):
                if who == "the whole server":
                    await cluster.refuses(client, _DEADLINE)
                else:
                    # New connections are taken: what was in flight may be refused, what comes later is not.
                    await cluster.clock.sleep(6 * bounds.SECOND)
                    await cluster.recovers("frozen backends, still frozen")
            await cluster.recovers(f"a freeze of {who}")
        # Whichever missed its answer first: the others go over new connections then.
        signs = ('"reason": "unknown"', "terms_not_checked", "clock_not_read")
        assert any(sign in cluster.node.log.read_text() for sign in signs), "no answer was lost"
    await cluster.settle()
    assert cluster.node.child.pid == node


async def test_backends_that_are_frozen_in_the_middle_of_commits_are_lived_through(
    cluster_on_own_postgres: Cluster, is_long: bool
) -> None:
    cluster = cluster_on_own_postgres
    node = cluster.node.child.pid
    cluster.start_worker(slots=500)
    holding = 0
    async with cluster.load(batch=200, pause=bounds.MILLISECOND):
        await cluster.recovers("the start")
        for _ in range(20 if is_long else 1):
            backends = await cluster.store.fetch(f"{OURS} AND backend_xid IS NOT NULL")
            pids = [row["pid"] for row in backends or await cluster.store.fetch(OURS)]
            with frozen(*pids):
                # What they hold is held for as long as they are frozen: shards may wait until then, and no longer.
                await cluster.clock.sleep(7 * bounds.SECOND)
                holding += bool(await cluster.store.fetch(f"{OURS} AND wait_event_type = 'Lock'"))
            await cluster.recovers("a freeze in the middle of commits")
    print(f"locks were held {holding} times")
    await cluster.settle()
    assert cluster.node.child.pid == node


async def test_a_read_only_postgres_is_answered_unavailable_until_it_takes_writes_again(
    cluster_on_own_postgres: Cluster,
) -> None:
    cluster = cluster_on_own_postgres
    cluster.start_worker()
    async with cluster.client() as client:
        await client.submit(*cluster.ask_many("meanwhile", 100, 4 * bounds.SECOND))
        await cluster.recovers("the start")
        await cluster.store.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await cluster.store.execute("SELECT pg_reload_conf()")
        await cluster.refuses(client, _DEADLINE)
        await client.submit(Ask("later"), timeout=timedelta(seconds=1))
        await cluster.store.execute("ALTER SYSTEM RESET default_transaction_read_only")
        await cluster.store.execute("SELECT pg_reload_conf()")
        await cluster.recovers("read-only")
    await cluster.settle()


async def test_a_long_transaction_that_holds_back_vacuum_makes_nothing_late(cluster: Cluster, is_long: bool) -> None:
    cluster.start_worker()
    async with AsyncExitStack() as guests:
        guest = await asyncpg.connect(cluster.store.dsn, timeout=10)
        guests.callback(guest.terminate)
        await guest.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM duecourse.task")
        async with cluster.load():
            await cluster.recovers("the start")
            await cluster.clock.sleep((600 if is_long else 6) * bounds.SECOND)
            async with asyncio.timeout(SETTLED / bounds.SECOND):
                while (kept := await _dead_rows(cluster)) <= 1_000:
                    await cluster.clock.sleep(bounds.SECOND)
            print(f"{kept} dead rows are kept")
            assert await cluster.recovers("dead rows that are kept") < 5 * bounds.SECOND
    await cluster.settle()


async def _dead_rows(cluster: Cluster) -> int:
    """Have all dead rows removed that may be, and return how many are left."""
    await cluster.store.execute("VACUUM duecourse.task")
    (kept,) = await cluster.store.fetch(
        "SELECT n_dead_tup AS rows FROM pg_stat_user_tables WHERE relid = 'duecourse.task'::regclass"
    )
    return int(kept["rows"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk that can be filled, where that is allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES},mode=755", "duecourse-test", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("what", ["data", "log"])
async def test_a_full_disk_of_postgres_is_answered_unavailable_until_there_is_room(
    small_disk: Path, tmp_path: Path, nursery: Nursery, source: random.Random, what: str, is_long: bool
) -> None:
    settings = {"max_wal_size": "48MB", "min_wal_size": "32MB", "shared_buffers": "16MB"}
    async with server_on(small_disk, settings) as server:
        await migrate(server.dsn, SHARDS)
        async with Cluster(tmp_path / "cluster", server.dsn, nursery, source) as cluster:
            cluster.start_worker()
            async with cluster.load(), cluster.client() as client:
                for _ in range(5 if is_long else 1):
                    await cluster.recovers("the start")
                    _fill(small_disk)
                    if what == "log":
                        await _use_up_log(cluster)
                    await cluster.refuses(client, _DEADLINE)
                    (small_disk / _FILLING).unlink()
                    await _until_it_serves(server, cluster)
                    await cluster.recovers("a full disk")
            await cluster.settle()


def _fill(disk: Path) -> None:
    with (disk / _FILLING).open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4_096))
    assert shutil.disk_usage(disk).free == 0, "the fault did not fire"


async def _until_it_serves(server: EmbeddedPostgres, cluster: Cluster) -> None:
    """Start a server again that has ended or is about to: it does if it cannot write its log."""
    async with asyncio.timeout(SETTLED / bounds.SECOND):
        while True:
            await server.start()
            try:
                await cluster.store.fetch("SELECT")
                return
            except TimeoutError:
                # It was seen to take connections and to say nothing more.
                await server.kill()
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await cluster.clock.sleep(50 * bounds.MILLISECOND)


async def _use_up_log(cluster: Cluster) -> None:
    with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        for _ in range(20):
            await cluster.store.execute("SELECT pg_switch_wal(); SELECT pg_logical_emit_message(true, 'fill', 'log')")


async def test_without_a_connection_left_the_node_waits_and_goes_on(cluster_on_own_postgres: Cluster) -> None:
    cluster = cluster_on_own_postgres
    node = cluster.node.child.pid
    cluster.start_worker()
    async with cluster.load(), cluster.client() as client, AsyncExitStack() as guests:
        await cluster.recovers("the start")
        others = await _take_connections(cluster, guests)
        await cluster.recovers("all connections taken but its own")
        room = await others[0].fetchval("SHOW max_connections")
        while len(others) < int(room):
            await others[0].execute(f"SELECT pg_terminate_backend(pid) FROM ({OURS}) ours")
            others += await _take_connections(cluster, guests)
        await cluster.refuses(client, _DEADLINE)
        # What it is refused first may be that its connections were ended.
        await until(lambda: "53300" in cluster.node.log.read_text(), SETTLED)
        await guests.aclose()
        await cluster.recovers("the loss of all connections")
    await cluster.settle()
    assert cluster.node.child.pid == node


async def _take_connections(cluster: Cluster, guests: AsyncExitStack) -> list[_Guest]:
    """Be another client, that takes all connections that are left."""
    taken: list[_Guest] = []
    while True:
        try:
            connection = await asyncpg.connect(cluster.store.dsn, timeout=10)
        except asyncpg.TooManyConnectionsError:
            return taken
        guests.callback(connection.terminate)
        taken.append(connection)


async def test_commits_that_fail_to_serialize_are_made_again_whole(cluster: Cluster, is_long: bool) -> None:
    cluster.start_worker()
    await cluster.store.execute(_REFUSE_SOME)
    async with cluster.load(), asyncio.timeout(bounds.MINUTE / bounds.SECOND):
        while len(_refused_by(cluster, "40001")) < (100 if is_long else 10):
            await cluster.recovers("a serialization failure")
    await cluster.store.execute("DROP TRIGGER refuse ON duecourse.task")
    await cluster.settle()
    assert not cluster.node.logged("term_ended"), "a refusal cost a term"


async def test_a_commit_that_is_the_victim_of_a_deadlock_is_made_again(
    cluster_on_own_postgres: Cluster, is_long: bool
) -> None:
    cluster = cluster_on_own_postgres
    cluster.start_worker()
    # Sooner than the node gives up waiting for a lock.
    await cluster.store.execute("ALTER SYSTEM SET deadlock_timeout = '300ms'")
    await cluster.store.execute("SELECT pg_reload_conf()")
    wanted = 20 if is_long else 2
    async with cluster.load(), asyncio.timeout(bounds.MINUTE / bounds.SECOND), AsyncExitStack() as guests:
        await cluster.recovers("the start")
        guest = await asyncpg.connect(cluster.store.dsn, timeout=10)
        guests.callback(guest.terminate)
        await guest.execute("SET deadlock_timeout = '10s'")
        while len(_refused_by(cluster, "40P01")) < wanted:
            async with guest.transaction():
                # Commits lock them the other way round.
                for shard in reversed(range(SHARDS)):
                    await guest.execute("SELECT FROM duecourse.shard WHERE shard = $1 FOR UPDATE", shard)
                    while not await guest.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                        await cluster.clock.sleep(bounds.MILLISECOND)
            # Else the next one would meet the same commit again.
            await cluster.recovers("a deadlock")
    await cluster.settle()
    assert not cluster.node.logged("term_ended"), "a refusal cost a term"


def _refused_by(cluster: Cluster, sqlstate: str) -> list[str]:
    refusals = [line["detail"] for line in cluster.node.logged("store_refuses")]
    return [detail for detail in refusals if sqlstate in detail]


async def postmaster_of(cluster: Cluster) -> int:
    (row,) = await cluster.store.fetch("SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'")
    return parent_of(row["pid"])
