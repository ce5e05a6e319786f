"""The fence under concurrency: locks, not luck, order raises and writes."""

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio
from conformance import writes
from integration.postgres_side import Side, side_of
from services.postgres import SHARDS

from duecourse.server.core.fence import Fence
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.storage import (
    CommitAnswer,
    Committed,
    Raised,
    RaiseRefused,
    RaiseRequest,
    Refused,
    ShardBatch,
    Stale,
    StoreUnavailable,
)
from duecourse.server.storage.postgres import PostgresStore

SHARD = ShardId(0)


@pytest_asyncio.fixture
async def store(postgres_dsn: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_dsn)
    await store.open()
    yield store
    await store.close()


@pytest_asyncio.fixture
async def side(postgres_dsn: str) -> AsyncIterator[Side]:
    async with side_of(postgres_dsn) as side:
        yield side


async def lead(store: PostgresStore) -> Fence:
    raised = (await store.raise_epochs("solo", [RaiseRequest(SHARD, b"holder")], writes.NOW))[SHARD]
    assert isinstance(raised, Raised)
    return raised.fence


async def commit_patiently(store: PostgresStore, batch: ShardBatch) -> CommitAnswer:
    """Commit as a node does: again while the store refuses for reasons of its own."""
    while True:
        answer = (await store.commit([batch]))[batch.fence.shard]
        if not isinstance(answer, Refused) or answer.is_data:
            return answer


async def raise_patiently(store: PostgresStore, holder: bytes) -> Raised | RaiseRefused:
    while True:
        try:
            return (await store.raise_epochs("solo", [RaiseRequest(SHARD, holder)], writes.NOW))[SHARD]
        except StoreUnavailable:
            continue


async def test_a_raise_waits_for_a_write_under_the_term_that_it_ends(store: PostgresStore, side: Side) -> None:
    fence = await lead(store)
    async with asyncio.TaskGroup() as group, side.connection.transaction():
        await side.connection.execute("SELECT FROM duecourse.shard WHERE shard = 0 FOR SHARE")
        raising = group.create_task(raise_patiently(store, b"successor"))
        await side.until_waiting()
        assert (await store.shards())[0].epoch == fence.epoch
        assert not raising.done()
    raised = raising.result()
    assert isinstance(raised, Raised)
    assert raised.fence == Fence(SHARD, Epoch(fence.epoch + 1), b"successor")


async def test_a_write_that_waits_for_a_raise_finds_its_term_over(store: PostgresStore, side: Side) -> None:
    fence = await lead(store)
    batch = writes.batch(fence, writes.insert(SHARDS, 0, lane=writes.lane(queue="new")))
    async with asyncio.TaskGroup() as group, side.connection.transaction():
        await side.connection.execute("UPDATE duecourse.shard SET epoch = 99, holder = 'other' WHERE shard = 0")
        committing = group.create_task(commit_patiently(store, batch))
        await side.until_waiting()
    assert committing.result() == Stale(Epoch(99), b"other")
    assert await side.count("task") == await side.count("queue") == 0


async def test_a_write_that_waits_for_a_raise_that_is_undone_goes_through(store: PostgresStore, side: Side) -> None:
    fence = await lead(store)
    batch = writes.batch(fence, writes.insert(SHARDS, 0))
    async with asyncio.TaskGroup() as group:
        transaction = side.connection.transaction()
        await transaction.start()
        await side.connection.execute("UPDATE duecourse.shard SET epoch = 99 WHERE shard = 0")
        committing = group.create_task(commit_patiently(store, batch))
        await side.until_waiting()
        await transaction.rollback()
    assert isinstance(committing.result(), Committed)


async def test_no_lock_is_waited_for_longer_than_a_second(store: PostgresStore, side: Side) -> None:
    fence = await lead(store)
    async with side.connection.transaction():
        await side.connection.execute("SELECT FROM duecourse.shard WHERE shard = 0 FOR UPDATE")
        answer = (await store.commit([writes.batch(fence, writes.insert(SHARDS, 0))]))[SHARD]
    assert isinstance(answer, Refused)
    assert not answer.is_data
    assert await side.count("task") == 0


async def test_many_leaders_in_a_row_never_write_under_an_old_term(store: PostgresStore, side: Side) -> None:
    """Each writes until it is stale; every task stands under the epoch that was current when it was stored."""
    rounds = 12
    applied: dict[int, int] = {}

    async def write_until_stale(fence: Fence) -> None:
        number = 0
        while True:
            insert = writes.insert(SHARDS, 0, sequence=fence.epoch * 1_000_000 + number)
            answer = await commit_patiently(store, writes.batch(fence, insert))
            if isinstance(answer, Stale):
                assert answer.epoch > fence.epoch
                return
            assert isinstance(answer, Committed)
            number += 1
            applied[fence.epoch] = number

    async with asyncio.TaskGroup() as group:
        for number in range(rounds):
            raised = await raise_patiently(store, b"holder-%d" % number)
            assert isinstance(raised, Raised)
            group.create_task(write_until_stale(raised.fence))
            for _ in range(5):
                await store.shards()
        await raise_patiently(store, b"last")
    rows = await side.connection.fetch("SELECT sequence / 1000000, count(*) FROM duecourse.task GROUP BY 1")
    assert dict(map(tuple, rows)) == applied
    order = await side.connection.fetch("SELECT sequence FROM duecourse.task ORDER BY xmin::text::bigint, sequence")
    epochs = [row[0] // 1_000_000 for row in order]
    assert epochs == sorted(epochs)


async def test_two_commits_that_create_the_same_queues_do_not_hinder_each_other(
    store: PostgresStore, side: Side
) -> None:
    raised = await store.raise_epochs("solo", [RaiseRequest(ShardId(n), b"h") for n in range(SHARDS)], writes.NOW)
    fences = [answer.fence for answer in raised.values() if isinstance(answer, Raised)]
    names = [f"queue-{number}" for number in range(30)]

    async def fill(fence: Fence, queues: list[str]) -> None:
        inserts = [writes.insert(SHARDS, fence.shard, lane=writes.lane(queue=queue)) for queue in queues]
        assert isinstance(await commit_patiently(store, writes.batch(fence, *inserts)), Committed)

    async with asyncio.TaskGroup() as group:
        for number, fence in enumerate(fences):
            group.create_task(fill(fence, names if number % 2 else names[::-1]))
    assert await side.count("queue") == len(names)
    assert await side.count("task") == len(names) * SHARDS
