"""What a commit stores, and what it answers."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from conformance import writes
from conformance.harness import Harness
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duecourse.model import bounds
from duecourse.server.core import lifecycle
from duecourse.server.core.fence import Fence
from duecourse.server.core.task import Answer, AttemptOutcome, Epoch, Failure, Lane, Policy, ShardId, Task, TaskState
from duecourse.server.core.writes import Update, Write
from duecourse.server.storage import Committed, Existing, Refused

NOTHING = Committed({}, set(), {})

LABELS = st.dictionaries(
    st.text("abc.-", min_size=1, max_size=9), st.text(max_size=9).filter(lambda text: "\0" not in text)
)


async def test_an_empty_commit_has_no_answers(harness: Harness) -> None:
    assert await harness.store.commit([]) == {}


async def test_a_batch_without_writes_checks_the_fence(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    assert await harness.commit(fence) == NOTHING


async def test_a_new_task_is_read_as_it_was_written(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    policy = Policy(7, 2, 1.5, 9, 0.25, 1_000_000, writes.NOW + 1, writes.NOW + 2, True)
    insert = writes.insert(
        harness.shards,
        lane=writes.lane("tenant-7", queue="other", priority=-10),
        run_at=writes.NOW + 12_345_678,
        policy=policy,
        headers={"trace": "a\0b", "": "\N{SNOWMAN}"},
        labels={"team": 'quote " and \\ \N{SNOWMAN}'},
    )
    await harness.apply(fence, insert)
    stored = await harness.read(insert.task)
    for name in ("key", "shard", "lane", "uid", "sequence", "run_at", "create_time", "policy", "progress"):
        assert getattr(stored.task, name) == getattr(insert.task, name), name
    assert stored.payload == b"payload"
    assert stored.content_type == "application/json"
    assert stored.headers == insert.submission.headers
    assert stored.labels == insert.submission.labels
    assert stored.result is None
    assert stored.attempts == []


async def test_tasks_that_share_a_lane_or_a_policy_are_read_as_they_were_written(harness: Harness) -> None:
    """What is the same throughout a commit is sent once."""
    [fence] = await harness.lead(0)
    lane = writes.lane("tenant-7", queue="other", priority=7)
    policy = Policy(max_attempts=3)
    inserts = [
        writes.insert(harness.shards, lane=lane, policy=policy, headers={"a": "b"} if number else {}, labels={"c": "d"})
        for number in range(3)
    ]
    await harness.apply(fence, *inserts)
    for insert in inserts:
        stored = await harness.read(insert.task)
        assert (stored.task.lane, stored.task.policy, stored.task.uid) == (lane, policy, insert.task.uid)
        assert (stored.headers, stored.labels) == (insert.submission.headers, insert.submission.labels)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=2_000), st.text(max_size=20), st.dictionaries(st.text(max_size=9), st.text(max_size=9)), LABELS
)
async def test_payload_headers_labels_and_result_are_exact(
    harness: Harness, payload: bytes, content_type: str, headers: dict[str, str], labels: dict[str, str]
) -> None:
    [fence] = await harness.lead(0)
    insert = writes.insert(harness.shards, payload=payload, content_type=content_type, headers=headers, labels=labels)
    await harness.apply(fence, insert)
    grant = writes.grant(insert.task, fence)
    answer = await harness.commit(fence, grant)
    assert isinstance(answer, Committed)
    delivery = answer.deliveries[0]
    assert delivery
    assert (delivery.payload, delivery.content_type, delivery.headers) == (payload, content_type, headers)
    insert.task.progress = grant.progress
    await harness.apply(fence, writes.success(insert.task, result=(payload, content_type)))
    stored = await harness.read(insert.task)
    assert (stored.payload, stored.labels, stored.result) == (payload, labels, (payload, content_type))


async def test_the_largest_payload_and_result_are_exact(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    payload = bytes(range(256)) * (bounds.MAX_PAYLOAD_BYTES // 256)
    insert = writes.insert(harness.shards, payload=payload)
    await harness.apply(fence, insert)
    await harness.apply(fence, writes.grant(insert.task, fence))
    await harness.apply(fence, writes.success(insert.task, result=(payload[: bounds.MAX_RESULT_BYTES], "a/b")))
    stored = await harness.read(insert.task)
    assert stored.payload == payload
    assert stored.result == (payload[: bounds.MAX_RESULT_BYTES], "a/b")


async def test_a_taken_id_is_reported_and_left_alone(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    first, second, third, fourth = (writes.insert(harness.shards) for _ in range(4))
    await harness.apply(fence, first, third)
    before = [await harness.read(insert.task) for insert in (first, third)]
    again = writes.insert(harness.shards, task_id=first.task.task_id, payload=b"another")
    once_more = writes.insert(harness.shards, task_id=third.task.task_id, payload=b"another")
    answer = await harness.commit(fence, second, again, fourth, once_more)
    assert answer == Committed(
        {
            1: Existing(first.task.uid, first.submission.fingerprint),
            3: Existing(third.task.uid, third.submission.fingerprint),
        },
        set(),
        {},
    )
    after = [await harness.read(insert.task) for insert in (first, third)]
    for was, now in zip(before, after, strict=True):
        assert (now.payload, now.task.uid, now.task.progress) == (was.payload, was.task.uid, was.task.progress)
    assert (await harness.read(second.task)).task.uid == second.task.uid
    assert (await harness.read(fourth.task)).task.uid == fourth.task.uid


async def test_the_same_insert_twice_finds_itself(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    insert = writes.insert(harness.shards)
    await harness.apply(fence, insert)
    answer = await harness.commit(fence, insert)
    assert answer == Committed({0: Existing(insert.task.uid, insert.submission.fingerprint)}, set(), {})


async def test_the_same_id_in_another_namespace_is_another_task(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    insert = writes.insert(harness.shards)
    elsewhere = writes.insert(harness.shards, task_id=insert.task.task_id, lane=writes.lane(namespace="other"))
    await harness.apply(fence, insert, elsewhere)
    assert (await harness.read(insert.task)).task.uid != (await harness.read(elsewhere.task)).task.uid


async def test_a_grant_opens_an_attempt_and_brings_the_delivery(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    insert = writes.insert(harness.shards, payload=b"\0\1", content_type="a/b", headers={"h": "v"})
    await harness.apply(fence, insert)
    grant = writes.grant(insert.task, fence, at=writes.NOW + 5)
    answer = await harness.commit(fence, grant)
    assert isinstance(answer, Committed)
    [(index, delivery)] = answer.deliveries.items()
    assert index == 0
    assert delivery
    assert (delivery.payload, delivery.content_type, delivery.headers) == (b"\0\1", "a/b", {"h": "v"})
    stored = await harness.read(insert.task)
    assert stored.task.progress == grant.progress
    assert stored.attempts == [grant.progress.attempt]


async def test_every_transition_is_read_as_it_was_written(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    [task] = await harness.insert(fence)
    answers = (Answer("request", b"f", 1, False, True), Answer("another", b"", 0, True, False))
    steps: list[Callable[[], Update]] = [
        lambda: writes.grant(task, fence),
        lambda: writes.start(task),
        lambda: Update(task, lifecycle.renewed(task.progress, writes.NOW + 9, replace(fence, epoch=Epoch(77)), None)),
        lambda: Update(task, lifecycle.renewed(task.progress, writes.NOW + 9, fence, None, "half\0 \N{SNOWMAN}")),
        lambda: Update(
            task,
            lifecycle.failed(
                task,
                writes.NOW + 10,
                AttemptOutcome.FAILED,
                failure=Failure("Error\0", "what\0ever \N{SNOWMAN}"),
                digest=b"\0d",
            ),
        ),
        lambda: writes.grant(task, fence, at=writes.NOW + 20, worker="worker-2"),
        lambda: writes.give_back(task, writes.NOW + 21),
        lambda: writes.grant(task, fence, at=writes.NOW + 30),
        lambda: writes.loss(task, writes.NOW + 31),
        lambda: writes.grant(task, fence, at=writes.NOW + 40),
        lambda: Update(task, lifecycle.cancel_requested(task.progress, answers)),
        lambda: writes.success(task, writes.NOW + 50, result=(b"", "x/y")),
    ]
    for step in steps:
        update = step()
        await harness.apply(fence, update)
        stored = await harness.read(task)
        assert stored.task.progress == update.progress
    assert stored.result == (b"", "x/y")
    assert [attempt.outcome for attempt in stored.attempts] == [
        AttemptOutcome.FAILED,
        AttemptOutcome.RETURNED,
        AttemptOutcome.LEASE_LOST,
        AttemptOutcome.SUCCEEDED,
    ]
    assert [attempt.progress for attempt in stored.attempts] == ["half\0 \N{SNOWMAN}", "", "", ""]
    assert stored.task.progress.answers == answers


async def test_what_a_handler_said_stays_with_its_attempt_alone(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    tasks = quiet, failing, succeeding = await harness.insert(fence, 3)
    await harness.apply(fence, *(writes.grant(task, fence) for task in tasks))
    words = [(quiet, ""), (failing, "half"), (succeeding, "nearly")]
    await harness.apply(
        fence, *(Update(task, lifecycle.renewed(task.progress, writes.NOW, fence, None, said)) for task, said in words)
    )
    await harness.apply(fence, writes.loss(quiet), writes.loss(failing), writes.success(succeeding))
    await harness.apply(fence, *(writes.grant(task, fence) for task in (quiet, failing)))
    said = {task.key: [attempt.progress for attempt in (await harness.read(task)).attempts] for task in tasks}
    assert said == {quiet.key: ["", ""], failing.key: ["half", ""], succeeding.key: ["nearly"]}
    lost = (await harness.read(failing)).attempts[0]
    assert await writes.find_attempt(harness.store, failing.key, lost.lease_token) == lost


async def test_what_one_of_many_lacks_it_does_not_get_from_the_others(harness: Harness) -> None:
    """A commit sends only once what its writes share."""
    fences = await harness.lead(0, 1)
    lanes = [writes.lane("a"), writes.lane(""), writes.lane("a", queue="other", namespace="elsewhere", priority=3)]
    inserts = [
        writes.insert(harness.shards, number % 2, lane=lanes[number % 3], content_type=("a/b", "")[number % 2])
        for number in range(12)
    ]
    by_shard = _by_shard(fences)
    await _apply_all(harness, by_shard, inserts)
    tasks = [insert.task for insert in inserts]
    grants = [
        writes.grant(task, by_shard[task.shard], writes.NOW + number % 2, f"worker-{number % 3}")
        for number, task in enumerate(tasks)
    ]
    await _apply_all(harness, by_shard, grants)
    ends = [writes.success(task, writes.NOW + number % 3) for number, task in enumerate(tasks)]
    for end in ends[1::2]:
        assert end.progress.attempt is not None
        end.progress.attempt = replace(end.progress.attempt, outcome_digest=None, start_time=None)
    await _apply_all(harness, by_shard, ends)
    for insert in inserts:
        stored = await harness.read(insert.task)
        assert stored.task.lane == insert.task.lane
        assert stored.content_type == insert.submission.content_type
        assert stored.task.progress == insert.task.progress


async def test_an_update_of_another_revision_is_reported_alone(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    granted, outdated, gone, ended, plain = await harness.insert(fence, 5)
    await harness.apply(fence, writes.grant(ended, fence), writes.grant(plain, fence))
    missing = writes.insert(harness.shards).task
    outdated.progress = replace(outdated.progress, revision=5)
    gone.progress = replace(gone.progress, revision=0)
    before = await harness.read(outdated)
    answer = await harness.commit(
        fence,
        writes.grant(outdated, fence),
        writes.grant(granted, fence),
        Update(missing, lifecycle.cancelled(missing.progress, writes.NOW, ())),
        writes.success(ended),
        Update(gone, lifecycle.cancelled(gone.progress, writes.NOW, ())),
        writes.start(plain),
        writes.grant(missing, fence),
    )
    assert isinstance(answer, Committed)
    assert answer.mismatched == {0, 2, 4, 6}
    assert set(answer.deliveries) == {1}
    after = await harness.read(outdated)
    assert after.task.progress == before.task.progress
    assert (await harness.read(granted)).task.progress.state is TaskState.LEASED
    assert (await harness.read(ended)).task.progress.state is TaskState.SUCCEEDED
    assert (await harness.read(plain)).task.progress.state is TaskState.RUNNING


async def test_the_same_updates_twice_do_not_match(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    first, second, third = await harness.insert(fence, 3)
    await harness.apply(fence, writes.grant(first, fence), writes.grant(second, fence))
    await harness.apply(fence, writes.loss(first), writes.loss(second))
    await harness.apply(fence, writes.grant(first, fence), writes.grant(second, fence))
    updates = [writes.success(first), writes.loss(second), writes.grant(third, fence)]
    again = [replace(update) for update in updates]
    assert isinstance(await harness.commit(fence, *updates), Committed)
    before = await harness.snapshot()
    assert await harness.commit(fence, *again) == Committed({}, {0, 1, 2}, {})
    assert await harness.snapshot() == before


async def test_the_attempt_of_an_update_that_did_not_match_is_not_kept(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    first, second = await harness.insert(fence, 2)
    await harness.apply(fence, writes.grant(first, fence), writes.grant(second, fence))
    await harness.apply(fence, writes.loss(first), writes.loss(second))
    second.progress = replace(second.progress, revision=77)
    answer = await harness.commit(fence, writes.grant(first, fence), writes.grant(second, fence))
    assert isinstance(answer, Committed)
    assert answer.mismatched == {1}
    assert len((await harness.read(first)).attempts) == 2
    assert len((await harness.read(second)).attempts) == 1


async def test_of_returned_attempts_the_last_ones_are_kept(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    task, other = await harness.insert(fence, 2)
    await harness.apply(fence, writes.grant(task, fence), writes.grant(other, fence))
    await harness.apply(fence, writes.loss(task), writes.give_back(other))
    kept = bounds.MAX_RETURNED_RECORDS
    for _ in range(kept + 5):
        await harness.apply(fence, writes.grant(task, fence))
        await harness.apply(fence, writes.give_back(task))
    await harness.apply(fence, writes.grant(task, fence), writes.grant(other, fence))
    outcomes = [attempt.outcome for attempt in (await harness.read(task)).attempts]
    assert outcomes == [AttemptOutcome.LEASE_LOST, *[AttemptOutcome.RETURNED] * kept, None]
    numbers = [attempt.number for attempt in (await harness.read(task)).attempts]
    assert numbers == [1, *range(numbers[-1] - kept, numbers[-1] + 1)]
    assert len((await harness.read(other)).attempts) == 2


async def test_refused_data_is_found_by_splitting_and_harms_nobody_else(harness: Harness) -> None:
    fences = await harness.lead(0, 1)
    good = [writes.insert(harness.shards, shard) for shard in (0, 0, 1)]
    culprit = writes.insert(harness.shards, 0, labels={"k": "\0"})
    before = await harness.snapshot()
    together = writes.batches(_by_shard(fences), [good[0], culprit, *good[1:]])
    refused = await harness.store.commit(together)
    assert all(isinstance(answer, Refused) and answer.is_data for answer in refused.values())
    assert await harness.snapshot() == before
    alone = await harness.commit(fences[0], culprit)
    assert isinstance(alone, Refused)
    assert alone.is_data
    answers = await harness.store.commit(writes.batches(_by_shard(fences), good))
    assert answers == {fence.shard: NOTHING for fence in fences}


@pytest.mark.parametrize("part", ["task_id", "queue", "fairness_key"])
async def test_a_zero_character_in_a_name_is_refused_as_data(harness: Harness, part: str) -> None:
    [fence] = await harness.lead(0)
    lane = _unfit_lane(part)
    bad = writes.insert(harness.shards, task_id="a\0b" if part == "task_id" else None, lane=lane)
    before = await harness.snapshot()
    answer = await harness.commit(fence, writes.insert(harness.shards), bad)
    assert isinstance(answer, Refused)
    assert answer.is_data
    assert await harness.snapshot() == before


async def test_many_writes_of_all_kinds_commit_at_once(harness: Harness) -> None:
    fences = await harness.lead(*range(harness.shards))
    by_shard = _by_shard(fences)
    inserts = [writes.insert(harness.shards, number % harness.shards) for number in range(400)]
    await _apply_all(harness, by_shard, inserts)
    tasks = [insert.task for insert in inserts]
    await _apply_all(harness, by_shard, [writes.grant(task, by_shard[task.shard]) for task in tasks[:300]])
    more = [writes.insert(harness.shards, number % harness.shards) for number in range(100)]
    mixture: list[Write] = [
        *more,
        *(
            writes.success(task, result=(b"r", "a/b") if number % 2 else None)
            for number, task in enumerate(tasks[:100])
        ),
        *(writes.loss(task) for task in tasks[100:200]),
        *(writes.start(task) for task in tasks[200:300]),
        *(writes.grant(task, by_shard[task.shard]) for task in tasks[300:]),
    ]
    await _apply_all(harness, by_shard, mixture)
    expected = {task.key: task.progress for task in [*tasks, *(insert.task for insert in more)]}
    found = await harness.store.load_tasks(list(expected))
    assert {task.key: task.progress for task in found if isinstance(task, Task)} == expected


async def _apply_all(harness: Harness, fences: dict[ShardId, Fence], all_writes: Sequence[Write]) -> None:
    answers = await harness.store.commit(writes.batches(fences, all_writes))
    for answer in answers.values():
        assert isinstance(answer, Committed)
        assert not answer.taken
        assert not answer.mismatched
    for write in all_writes:
        if isinstance(write, Update):
            write.task.progress = write.progress


def _by_shard(fences: list[Fence]) -> dict[ShardId, Fence]:
    return {fence.shard: fence for fence in fences}


def _unfit_lane(part: str) -> Lane:
    if part == "queue":
        return writes.lane(queue="a\0b")
    return writes.lane("a\0b" if part == "fairness_key" else "")
