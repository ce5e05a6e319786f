"""Faults of Postgres: restarted, killed, cut off, frozen, read-only. The node lives through all of them, unaided."""

import os
import signal
from datetime import timedelta

import pytest
from faults.cluster import Cluster, children_of, frozen, parent_of
from faults.recording_client import Ask

from duecourse import client as sdk
from duecourse.model import bounds
from duecourse.server.storage.embedded import EmbeddedPostgres

_DEADLINE = timedelta(seconds=20)
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
    ended = 0
    async with cluster.load():
        for _ in range(60 if is_long else 6):
            await cluster.clock.sleep(bounds.SECOND)
            ours = f"SELECT pg_terminate_backend(pid) FROM ({OURS}) ours"
            ended += len(await cluster.store.fetch(ours))
        assert ended > 6, "there was no connection to end"
    await cluster.recovers("ended connections")
    await cluster.settle()
    left = await cluster.store.fetch(OURS)
    assert len(left) <= 8, "connections leak"


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
        assert '"reason": "unknown"' in cluster.node.log.read_text(), "no answer was lost"
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


async def postmaster_of(cluster: Cluster) -> int:
    (row,) = await cluster.store.fetch("SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'")
    return parent_of(row["pid"])
