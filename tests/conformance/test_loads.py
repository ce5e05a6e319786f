"""What a node reads to lead a shard: held tasks, buckets, lanes, single tasks, the oldest due."""

import random
from collections.abc import Sequence

from conformance import writes
from conformance.harness import Harness
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import WAITING, DueKey, Lane, ShardId, Task, TaskKey
from duecourse.server.core.writes import Insert
from duecourse.server.storage import CorruptRecord, LaneRequest, Loaded, LoadedBuckets

NOW = writes.NOW
S0 = ShardId(0)
END = NOW + 1_000 * bounds.SECOND


def keys(tasks: Sequence[Task]) -> list[TaskKey]:
    return [task.key for task in tasks]


def in_order(tasks: Sequence[Task]) -> list[TaskKey]:
    return keys(sorted(tasks, key=due_key))


def due_key(task: Task) -> DueKey:
    assert task.progress.due_time is not None
    return DueKey(task.progress.due_time, task.sequence)


async def test_held_tasks_are_those_that_are_leased_or_running(harness: Harness) -> None:
    fence, elsewhere = await harness.lead(0, 1)
    _waiting, leased, running, lost, ended = await harness.insert(fence, 5)
    [foreign] = await harness.insert(elsewhere)
    await harness.apply(fence, *(writes.grant(task, fence) for task in (leased, running, lost, ended)))
    await harness.apply(elsewhere, writes.grant(foreign, elsewhere))
    await harness.apply(fence, writes.start(running), writes.loss(lost), writes.success(ended))
    loaded = await harness.store.load_held([S0])
    assert set(keys(loaded.tasks)) == {leased.key, running.key}
    assert {task.key: task.progress for task in loaded.tasks} == {
        leased.key: leased.progress,
        running.key: running.progress,
    }
    assert set(keys((await harness.store.load_held([S0, ShardId(1)])).tasks)) == {leased.key, running.key, foreign.key}
    assert await harness.store.load_held([]) == Loaded([], [])


async def test_held_tasks_are_found_whenever_they_were_due(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    hour = 3_600 * bounds.SECOND
    times = [NOW + 50 * hour, 0, NOW, NOW - 50 * hour, NOW + hour, NOW + 51 * hour, NOW + 51 * hour + 1]
    tasks = []
    for run_at in times:
        insert = writes.insert(harness.shards, run_at=run_at)
        await harness.apply(fence, insert)
        await harness.apply(fence, writes.grant(insert.task, fence))
        tasks.append(insert.task)
        assert set(keys((await harness.store.load_held([S0])).tasks)) == set(keys(tasks))
    together = [writes.insert(harness.shards, run_at=NOW + number * hour) for number in (60, 90, 30)]
    await harness.apply(fence, *together)
    await harness.apply(fence, *(writes.grant(insert.task, fence) for insert in together))
    tasks += [insert.task for insert in together]
    assert set(keys((await harness.store.load_held([S0])).tasks)) == set(keys(tasks))


async def test_buckets_hold_what_waits_in_their_range(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    times = [NOW - 1, NOW, NOW + 5, NOW + bounds.BUCKET, NOW + 2 * bounds.BUCKET - 1, NOW + 2 * bounds.BUCKET]
    inserts = [writes.insert(harness.shards, run_at=run_at) for run_at in times]
    await harness.apply(fence, *inserts)
    loaded = await harness.store.load_buckets([S0], NOW, NOW + 2 * bounds.BUCKET, 10)
    assert set(keys(loaded.tasks)) == {insert.task.key for insert in inserts[1:5]}
    assert loaded.cut == {}
    middle = await harness.store.load_buckets([S0], NOW + 3, NOW + 6, 10)
    assert keys(middle.tasks) == [inserts[2].task.key]
    assert await harness.store.load_buckets([ShardId(1)], 0, END, 10) == LoadedBuckets([], [], {})


async def test_buckets_leave_out_what_is_held_or_has_ended(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    waiting, held, ended, retried = await harness.insert(fence, 4)
    await harness.apply(fence, *(writes.grant(task, fence) for task in (held, ended, retried)))
    await harness.apply(fence, writes.success(ended), writes.loss(retried))
    loaded = await harness.store.load_buckets([S0], 0, END, 10)
    assert set(keys(loaded.tasks)) == {waiting.key, retried.key}
    assert loaded.cut == {}


async def test_a_lane_of_thousands_is_cut_and_does_not_stand_before_another(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    crowd = [writes.insert(harness.shards, lane=writes.lane("crowd"), run_at=NOW + number) for number in range(3_000)]
    await harness.apply(fence, *crowd)
    quiet = [writes.insert(harness.shards, lane=writes.lane(f"quiet-{number}"), run_at=NOW) for number in range(50)]
    await harness.apply(fence, *quiet)
    loaded = await harness.store.load_buckets([S0], 0, END, 20)
    of_crowd = [task for task in loaded.tasks if task.lane == crowd[0].task.lane]
    assert in_order(of_crowd)[:20] == [insert.task.key for insert in crowd[:20]]
    assert {insert.task.key for insert in quiet} <= set(keys(loaded.tasks))
    assert loaded.cut == {(S0, crowd[0].task.lane): due_key(crowd[19].task)}


async def test_a_lane_that_just_fits_is_not_cut(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    await harness.insert(fence, 20)
    loaded = await harness.store.load_buckets([S0], 0, END, 20)
    assert len(loaded.tasks) == 20
    assert loaded.cut == {}
    assert len((await harness.store.load_buckets([S0], 0, END, 19)).cut) == 1


async def test_a_backlog_over_many_buckets_is_cut_as_a_whole(harness: Harness) -> None:
    """What is loaded is bounded however long the scheduler was away."""
    [fence] = await harness.lead(0)
    backlog = [writes.insert(harness.shards, run_at=NOW - number * bounds.BUCKET // 3) for number in range(300)]
    await harness.apply(fence, *backlog)
    loaded = await harness.store.load_buckets([S0], 0, END, 16)
    oldest = sorted((insert.task for insert in backlog), key=due_key)[:16]
    cut = loaded.cut[S0, writes.LANE]
    assert in_order([task for task in loaded.tasks if due_key(task) <= cut]) == keys(oldest)
    assert len(loaded.tasks) < 100


async def test_lanes_are_read_on_in_order(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    source = random.Random(4)
    wanted, other = writes.lane("wanted"), writes.lane("other")
    inserts = [
        writes.insert(
            harness.shards,
            lane=wanted if number % 3 else other,
            run_at=NOW + source.randrange(20) * bounds.SECOND,
            sequence=10_000 - number,
        )
        for number in range(300)
    ]
    await harness.apply(fence, *inserts)
    expected = in_order([insert.task for insert in inserts if insert.task.lane == wanted])
    after = DueKey(0, 0)
    found: list[TaskKey] = []
    while True:
        [loaded] = await harness.store.load_lanes([LaneRequest(S0, wanted, after, END, 37)])
        assert loaded.corrupt == []
        found += keys(loaded.tasks)
        if len(loaded.tasks) < 37:
            break
        after = due_key(loaded.tasks[-1])
    assert found == expected


async def test_lanes_end_at_the_given_instant_and_skip_what_does_not_wait(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    tasks = await harness.insert(fence, 6)
    later = writes.insert(harness.shards, run_at=NOW + 1)
    await harness.apply(fence, later)
    await harness.apply(fence, writes.grant(tasks[0], fence), writes.grant(tasks[3], fence))
    await harness.apply(fence, writes.success(tasks[3]))
    first, second = await harness.store.load_lanes(
        [
            LaneRequest(S0, writes.LANE, DueKey(0, 0), NOW + 1, 10),
            LaneRequest(S0, writes.LANE, due_key(tasks[4]), NOW + 2, 10),
        ]
    )
    assert keys(first.tasks) == keys([tasks[1], tasks[2], tasks[4], tasks[5]])
    assert keys(second.tasks) == [tasks[5].key, later.task.key]
    assert await harness.store.load_lanes([]) == []


async def test_many_lanes_and_shards_are_read_in_one_call(harness: Harness) -> None:
    fences = await harness.lead(0, 1)
    lanes = [writes.lane(f"tenant-{number}", priority=number % 5) for number in range(40)]
    inserts = [
        writes.insert(harness.shards, fence.shard, lane=lane, run_at=NOW + number * bounds.BUCKET)
        for fence in fences
        for lane in lanes
        for number in range(4)
    ]
    for batch in writes.batches({fence.shard: fence for fence in fences}, inserts):
        await harness.apply(batch.fence, *batch.inserts)
    requests = [LaneRequest(fence.shard, lane, DueKey(NOW, 2**62), END, 2) for lane in lanes for fence in fences]
    for request, loaded in zip(requests, await harness.store.load_lanes(requests), strict=True):
        of_lane = [i.task for i in inserts if (i.task.shard, i.task.lane) == (request.shard, request.lane)]
        assert keys(loaded.tasks) == in_order(of_lane)[1:3]
    loaded_buckets = await harness.store.load_buckets([S0, ShardId(1)], 0, NOW + 1, 10)
    assert len(loaded_buckets.tasks) == 80


async def test_single_tasks_come_in_the_order_of_their_keys(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    first, second = await harness.insert(fence, 2)
    nowhere = TaskKey("default", "nowhere")
    found = await harness.store.load_tasks([second.key, nowhere, first.key, second.key])
    assert [task and task.key for task in found] == [second.key, None, first.key, second.key]
    assert await harness.store.load_tasks([]) == []


async def test_the_oldest_due_come_from_all_lanes(harness: Harness) -> None:
    fences = await harness.lead(0, 1)
    source = random.Random(7)
    inserts: list[Insert] = []
    for fence in fences:
        for number in range(120):
            lane = writes.lane(f"tenant-{source.randrange(5)}")
            run_at = NOW - source.randrange(100) * bounds.SECOND
            inserts.append(writes.insert(harness.shards, fence.shard, lane=lane, run_at=run_at, sequence=number))
    for batch in writes.batches({fence.shard: fence for fence in fences}, inserts):
        await harness.apply(batch.fence, *batch.inserts)
    loaded = await harness.store.load_oldest_due([S0, ShardId(1)], NOW - 10 * bounds.SECOND, 30)
    for fence in fences:
        of_shard = [i.task for i in inserts if i.task.shard == fence.shard and i.task.run_at < NOW - 10 * bounds.SECOND]
        assert set(keys(loaded.tasks)) & set(keys(of_shard)) == set(in_order(of_shard)[:30])
    assert len(loaded.tasks) == 60
    assert len((await harness.store.load_oldest_due([S0], END, 1_000)).tasks) == 120
    assert (await harness.store.load_oldest_due([S0], 0, 10)).tasks == []


async def test_a_record_that_does_not_decode_stops_nobody_else(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    first, bad, last, held, bad_held = await harness.insert(fence, 5)
    await harness.apply(fence, writes.grant(held, fence), writes.grant(bad_held, fence))
    await harness.spoil(bad.key)
    await harness.spoil(bad_held.key)
    buckets = await harness.store.load_buckets([S0], 0, END, 10)
    [lane] = await harness.store.load_lanes([LaneRequest(S0, writes.LANE, DueKey(0, 0), END, 10)])
    oldest = await harness.store.load_oldest_due([S0], END, 10)
    for found in (buckets, lane, oldest):
        assert set(keys(found.tasks)) == {first.key, last.key}
        assert [(record.shard, record.key, record.revision) for record in found.corrupt] == [(S0, bad.key, 1)]
    loaded = await harness.store.load_held([S0])
    assert keys(loaded.tasks) == [held.key]
    assert [(record.key, record.revision) for record in loaded.corrupt] == [(bad_held.key, 2)]
    single = await harness.store.load_tasks([bad.key, first.key])
    assert isinstance(single[0], CorruptRecord)
    assert isinstance(single[1], Task)


async def test_what_lies_behind_a_head_that_does_not_decode_is_read_on(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    first, second, last = await harness.insert(fence, 3)
    await harness.spoil(first.key)
    await harness.spoil(second.key)
    loaded = await harness.store.load_buckets([S0], 0, END, 2)
    assert [record.key for record in loaded.corrupt] == [first.key, second.key]
    [after] = loaded.cut.values()
    [lane] = await harness.store.load_lanes([LaneRequest(S0, writes.LANE, after, END, 10)])
    assert keys(lane.tasks) == [last.key]


_LANES = [writes.lane("a"), writes.lane("b"), writes.lane("a", priority=1)]
_PLACES = st.lists(
    st.tuples(st.sampled_from(_LANES), st.integers(0, 45 * bounds.SECOND), st.integers(0, 3), st.booleans()),
    max_size=40,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(_PLACES, st.integers(0, 30 * bounds.SECOND), st.integers(0, 50 * bounds.SECOND), st.integers(1, 6))
async def test_a_load_is_complete_up_to_its_cuts(
    harness: Harness, places: list[tuple[Lane, Micros, int, bool]], start: Micros, length: Micros, head: int
) -> None:
    """Cut heads and what is read on after them are together all that waits, in order, whatever lies in the range."""
    shard = ShardId(random.Random(str(places)).randrange(harness.shards))
    [fence] = await harness.lead(shard)
    inserts = [
        writes.insert(harness.shards, shard, lane=lane, run_at=NOW + offset, sequence=sequence * 1_000 + number)
        for number, (lane, offset, sequence, _) in enumerate(places)
    ]
    await harness.apply(fence, *inserts)
    held = [insert.task for insert, place in zip(inserts, places, strict=True) if place[3]]
    await harness.apply(fence, *(writes.grant(task, fence) for task in held))
    due_from, due_before = NOW + start, NOW + start + length
    loaded = await harness.store.load_buckets([shard], due_from, due_before, head)
    for lane in _LANES:
        waiting = [
            insert.task
            for insert in inserts
            if insert.task.lane == lane
            and insert.task.progress.state in WAITING
            and due_from <= insert.task.run_at < due_before
        ]
        found = [task for task in loaded.tasks if task.lane == lane and task.key in {i.task.key for i in inserts}]
        cut = loaded.cut.get((shard, lane))
        if cut is None:
            assert in_order(found) == in_order(waiting)
            continue
        complete = [task for task in found if due_key(task) <= cut]
        assert len(complete) == head
        [rest] = await harness.store.load_lanes([LaneRequest(shard, lane, cut, due_before, 1_000)])
        assert in_order(complete) + keys(rest.tasks) == in_order(waiting)
    await harness.apply(fence, *(writes.success(task) for task in held))
    left = [insert.task for insert in inserts if insert.task.progress.state in WAITING]
    await harness.apply(fence, *(writes.grant(task, fence) for task in left))
    await harness.apply(fence, *(writes.success(task) for task in left))
