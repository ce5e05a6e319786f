"""What is taken out: tasks that ended long ago, and records that do not decode."""

from conformance import writes
from conformance.harness import Harness

from duecourse.server.core.task import ShardId, Task, TaskKey
from duecourse.server.storage import CorruptRecord

NOW = writes.NOW


async def test_a_purge_takes_the_longest_ended_with_their_attempts(harness: Harness) -> None:
    fence, elsewhere = await harness.lead(0, 1)
    tasks = await harness.insert(fence, 6)
    [foreign] = await harness.insert(elsewhere)
    await harness.apply(elsewhere, writes.grant(foreign, elsewhere))
    await harness.apply(elsewhere, writes.success(foreign, NOW - 100))
    tokens = []
    for number, task in enumerate(tasks[:4]):
        await harness.apply(fence, writes.grant(task, fence))
        assert task.progress.attempt is not None
        tokens.append(task.progress.attempt.lease_token)
        await harness.apply(fence, writes.loss(task))
        await harness.apply(fence, writes.grant(task, fence))
        await harness.apply(fence, writes.success(task, NOW + 10 - number))
    await harness.apply(fence, writes.grant(tasks[4], fence))

    assert await harness.store.purge(fence, NOW + 7, 10) == 0
    assert await harness.store.purge(fence, NOW + 10, 2) == 2
    assert await left(harness, tasks) == [tasks[0].key, tasks[1].key, tasks[4].key, tasks[5].key]
    assert await writes.find_attempt(harness.store, tasks[3].key, tokens[3]) is None
    assert await writes.find_attempt(harness.store, tasks[1].key, tokens[1]) is not None
    assert await harness.store.purge(fence, NOW + 10, 10) == 1
    assert await harness.store.purge(fence, NOW + 11, 10) == 1
    assert await harness.store.purge(fence, NOW * 2, 10) == 0
    assert await left(harness, [*tasks, foreign]) == [tasks[4].key, tasks[5].key, foreign.key]


async def test_a_purged_id_is_free_again(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    [task] = await harness.insert(fence)
    await harness.apply(fence, writes.grant(task, fence))
    await harness.apply(fence, writes.loss(task))
    await harness.apply(fence, writes.grant(task, fence))
    await harness.apply(fence, writes.success(task))
    assert await harness.store.purge(fence, NOW * 2, 10) == 1
    again = writes.insert(harness.shards, task_id=task.task_id)
    await harness.apply(fence, again)
    await harness.apply(fence, writes.grant(again.task, fence))
    assert len((await harness.read(again.task)).attempts) == 1


async def test_a_record_is_set_aside_for_good(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    good, waiting, held = await harness.insert(fence, 3)
    await harness.apply(fence, writes.grant(held, fence))
    await harness.spoil(waiting.key)
    await harness.spoil(held.key)
    records = (await harness.store.load_buckets([ShardId(0)], 0, NOW + 1, 10)).corrupt
    records += (await harness.store.load_held([ShardId(0)])).corrupt
    assert [record.key for record in records] == [waiting.key, held.key]
    for record in records:
        assert await harness.store.set_aside(fence, record, NOW + 5) is True
        assert await harness.store.set_aside(fence, record, NOW + 5) is False
    assert [task.key for task in (await harness.store.load_buckets([ShardId(0)], 0, NOW + 1, 10)).tasks] == [good.key]
    assert (await harness.store.load_held([ShardId(0)])).corrupt == []
    assert await harness.store.purge(fence, NOW + 6, 10) == 2
    assert await left(harness, [good, waiting, held]) == [good.key]


async def test_a_record_that_has_changed_is_not_set_aside(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    [task] = await harness.insert(fence)
    outdated = CorruptRecord(task.shard, task.key, task.progress.revision, "test")
    await harness.apply(fence, writes.grant(task, fence))
    before = await harness.snapshot()
    assert await harness.store.set_aside(fence, outdated, NOW) is False
    gone = CorruptRecord(task.shard, TaskKey("default", "nowhere"), 1, "test")
    assert await harness.store.set_aside(fence, gone, NOW) is False
    assert await harness.snapshot() == before
    await harness.apply(fence, writes.success(task))
    before = await harness.snapshot()
    ended = CorruptRecord(task.shard, task.key, task.progress.revision, "test")
    assert await harness.store.set_aside(fence, ended, NOW) is False
    assert await harness.snapshot() == before


async def left(harness: Harness, tasks: list[Task]) -> list[TaskKey]:
    found = await harness.store.load_tasks([task.key for task in tasks])
    return [task.key for task in found if isinstance(task, Task)]
