"""A stale leader writes nothing, by whatever method; and how terms begin."""

import inspect
import itertools
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from conformance import writes
from conformance.harness import Harness, older, stale_forms

from duecourse.model import slots
from duecourse.server.core.fence import Fence
from duecourse.server.core.task import Epoch, ShardId, Task
from duecourse.server.storage import (
    Committed,
    CorruptRecord,
    Raised,
    RaiseRefused,
    RaiseRequest,
    ShardBatch,
    Stale,
    TaskStore,
)

READS = frozenset(
    (
        "shards",
        "load_held",
        "load_buckets",
        "load_lanes",
        "load_tasks",
        "load_oldest_due",
        "find_attempts",
        "read_task",
        "list_tasks",
    )
)
LIFE = frozenset(("open", "close"))
RAISES = frozenset(("raise_epochs",))
BY_HAND = frozenset(("bind",))
"""Fenced by nothing: whoever forces it has stopped all nodes."""
CLOCK = frozenset(("read_clock", "accept_clock", "confirm_clock"))


async def _commit_inserts(harness: Harness, fence: Fence, tasks: Sequence[Task]) -> object:
    new_queue = writes.insert(harness.shards, fence.shard, lane=writes.lane(queue="never-seen"))
    return await harness.commit(fence, new_queue)


async def _commit_updates(harness: Harness, fence: Fence, tasks: Sequence[Task]) -> object:
    waiting, running, lost = tasks
    retried = replace(lost, progress=writes.loss(lost).progress)
    return await harness.commit(
        fence,
        writes.grant(waiting, fence),
        writes.success(running, result=(b"1", "application/json")),
        replace(writes.loss(lost), archive=retried.progress.attempt),
    )


async def _purge(harness: Harness, fence: Fence, tasks: Sequence[Task]) -> object:
    return await harness.store.purge(fence, writes.NOW * 2, 100)


async def _set_aside(harness: Harness, fence: Fence, tasks: Sequence[Task]) -> object:
    record = CorruptRecord(fence.shard, tasks[0].key, tasks[0].progress.revision, "test")
    return await harness.store.set_aside(fence, record, writes.NOW)


STALE_CASES: Mapping[str, Sequence[Callable[[Harness, Fence, Sequence[Task]], Awaitable[object]]]] = {
    "commit": (_commit_inserts, _commit_updates),
    "purge": (_purge,),
    "set_aside": (_set_aside,),
}


def _methods() -> set[str]:
    return {name for name, _ in inspect.getmembers(TaskStore, inspect.isfunction) if not name.startswith("_")}


def test_every_method_of_the_contract_is_known_to_be_a_read_or_has_a_stale_case() -> None:
    assert _methods() == READS | LIFE | RAISES | BY_HAND | CLOCK | set(STALE_CASES)


def test_every_method_that_takes_a_fence_has_a_stale_case() -> None:
    for name in _methods() - set(STALE_CASES):
        taken = typing.get_type_hints(getattr(TaskStore, name))
        del taken["return"]
        assert not {Fence, Sequence[ShardBatch]} & set(taken.values()), f"{name} writes, but has no stale case"


@pytest.mark.parametrize("method", sorted(STALE_CASES))
async def test_a_stale_leader_changes_nothing(harness: Harness, method: str) -> None:
    [fence] = await harness.lead(0)
    waiting, running, lost, ended = await harness.insert(fence, 4)
    await harness.apply(fence, *(writes.grant(task, fence) for task in (running, lost, ended)))
    await harness.apply(fence, writes.success(ended))
    before = await harness.snapshot()
    for stale in stale_forms(fence):
        for case in STALE_CASES[method]:
            assert await case(harness, stale, (waiting, running, lost)) == Stale(fence.epoch, fence.holder)
            assert await harness.snapshot() == before


@pytest.mark.parametrize("method", sorted(STALE_CASES))
async def test_a_leader_whose_shard_was_taken_over_changes_nothing(harness: Harness, method: str) -> None:
    [fence] = await harness.lead(0)
    waiting, running, lost = await harness.insert(fence, 3)
    await harness.apply(fence, writes.grant(running, fence), writes.grant(lost, fence))
    [newer] = await harness.lead(0, holder=b"successor")
    before = await harness.snapshot()
    for case in STALE_CASES[method]:
        assert await case(harness, fence, (waiting, running, lost)) == Stale(newer.epoch, newer.holder)
    assert await harness.snapshot() == before


@pytest.mark.parametrize("method", sorted(STALE_CASES))
async def test_the_current_leader_is_not_refused_by_the_same_writes(harness: Harness, method: str) -> None:
    [fence] = await harness.lead(0)
    waiting, running, lost = await harness.insert(fence, 3)
    await harness.apply(fence, writes.grant(running, fence), writes.grant(lost, fence))
    for case in STALE_CASES[method]:
        assert not isinstance(await case(harness, fence, (waiting, running, lost)), Stale)


async def test_a_fence_of_a_shard_that_does_not_exist_is_stale(harness: Harness) -> None:
    before = await harness.snapshot()
    nowhere = Fence(ShardId(harness.shards), Epoch(1), b"holder")
    assert await harness.commit(nowhere, writes.insert(harness.shards)) == Stale(Epoch(0), b"")
    assert await harness.store.purge(nowhere, writes.NOW, 1) == Stale(Epoch(0), b"")
    assert await harness.snapshot() == before


async def test_in_a_mixed_batch_only_the_stale_shard_is_left_out(harness: Harness) -> None:
    fences = await harness.lead(0, 1, 2)
    inserts = [writes.insert(harness.shards, fence.shard) for fence in fences]
    batches = [writes.batch(fence, insert) for fence, insert in zip(fences, inserts, strict=True)]
    batches[1].fence = older(fences[1])
    answers = await harness.store.commit(batches)
    assert answers[ShardId(0)] == answers[ShardId(2)] == Committed({}, set(), {})
    assert answers[ShardId(1)] == Stale(fences[1].epoch, fences[1].holder)
    found = await harness.store.load_tasks([insert.task.key for insert in inserts])
    assert [task is not None for task in found] == [True, False, True]


async def test_the_shards_cover_all_slots(harness: Harness) -> None:
    rows = await harness.store.shards()
    assert [row.shard for row in rows] == list(range(harness.shards))
    assert rows[0].slot_from == 0
    assert rows[-1].slot_until == slots.first_slot(harness.shards, harness.shards)
    for row, following in itertools.pairwise(rows):
        assert row.slot_until == following.slot_from


async def test_raises_grow_strictly_and_their_sequences_never_overlap(harness: Harness) -> None:
    highest = -1
    epoch = 0
    for number in range(20):
        answers = await harness.store.raise_epochs("solo", [RaiseRequest(ShardId(3), b"%d" % number)], number)
        raised = answers[ShardId(3)]
        assert isinstance(raised, Raised)
        assert raised.fence.epoch > epoch
        assert raised.first_sequence > highest
        assert raised.raises == tuple(range(number + 1))[-16:]
        epoch, highest = raised.fence.epoch, raised.first_sequence + 2**32 - 1
    [row] = [row for row in await harness.store.shards() if row.shard == 3]
    assert (row.coordination, row.epoch, row.holder) == ("solo", epoch, b"19")


async def test_a_given_epoch_must_exceed_the_row(harness: Harness) -> None:
    async def raised_to(epoch: int) -> Raised | RaiseRefused:
        request = RaiseRequest(ShardId(0), b"h", Epoch(epoch))
        return (await harness.store.raise_epochs("cluster", [request], writes.NOW))[ShardId(0)]

    assert isinstance(await raised_to(1_000_000), Raised)
    before = await harness.snapshot()
    for epoch in (1_000_000, 999_999, 1, 0):
        assert await raised_to(epoch) == RaiseRefused("cluster", Epoch(1_000_000), b"h")
    assert await harness.snapshot() == before
    assert isinstance(await raised_to(1_000_001), Raised)


async def test_a_row_of_another_coordination_refuses_the_raise(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    before = await harness.snapshot()
    answers = await harness.store.raise_epochs("cluster", [RaiseRequest(ShardId(0), b"other")], writes.NOW)
    assert answers == {ShardId(0): RaiseRefused("solo", fence.epoch, fence.holder)}
    assert await harness.snapshot() == before


async def test_a_raise_only_over_listed_holders_spares_others(harness: Harness) -> None:
    [fence] = await harness.lead(0, holder=b"first")

    async def raised_over(*holders: bytes) -> Raised | RaiseRefused:
        request = RaiseRequest(ShardId(0), b"second", None, holders)
        return (await harness.store.raise_epochs("solo", [request], writes.NOW))[ShardId(0)]

    assert await raised_over() == RaiseRefused("solo", fence.epoch, b"first")
    assert await raised_over(b"third", b"") == RaiseRefused("solo", fence.epoch, b"first")
    assert isinstance(await raised_over(b"third", b"first"), Raised)


async def test_a_refused_raise_does_not_keep_others_from_theirs(harness: Harness) -> None:
    await harness.lead(1)
    requests = [
        RaiseRequest(ShardId(2), b"h"),
        RaiseRequest(ShardId(1), b"h", None, ()),
        RaiseRequest(ShardId(0), b"h", Epoch(7)),
        RaiseRequest(ShardId(harness.shards), b"h"),
    ]
    answers = await harness.store.raise_epochs("solo", requests, writes.NOW)
    assert isinstance(answers[ShardId(0)], Raised)
    assert isinstance(answers[ShardId(1)], RaiseRefused)
    assert isinstance(answers[ShardId(2)], Raised)
    assert answers[ShardId(harness.shards)] == RaiseRefused("", Epoch(0), b"")
