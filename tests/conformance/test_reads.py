"""What clients read: single tasks, lists, attempts by token."""

from collections.abc import Sequence

from conformance import writes
from conformance.harness import Harness

from duecourse.model.instants import Micros
from duecourse.server.core.task import Task, TaskKey, TaskState
from duecourse.server.storage import CorruptRecord, TaskPage, TaskQuery

NOW = writes.NOW


def query(
    queue: str | None = None,
    states: Sequence[TaskState] = (),
    run_at_from: Micros | None = None,
    run_at_before: Micros | None = None,
) -> TaskQuery:
    return TaskQuery("default", queue, frozenset(states), run_at_from, run_at_before)


def ids(page: TaskPage) -> list[str]:
    return [stored.task.task_id for stored in page.tasks]


def by_id(tasks: Sequence[Task]) -> list[str]:
    return sorted(task.task_id for task in tasks)


async def test_a_task_that_is_not_there_is_none(harness: Harness) -> None:
    assert await harness.store.read_task(TaskKey("default", "nowhere"), full=True) is None


async def test_payload_result_and_attempts_are_read_only_if_wanted(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    insert = writes.insert(harness.shards, headers={"h": "v"}, labels={"l": "v"})
    await harness.apply(fence, insert)
    await harness.apply(fence, writes.grant(insert.task, fence))
    await harness.apply(fence, writes.success(insert.task, result=(b"r", "a/b")))
    brief = await harness.store.read_task(insert.task.key, full=False)
    assert brief is not None
    assert not isinstance(brief, CorruptRecord)
    assert (brief.payload, brief.result, brief.attempts) == (b"", None, [])
    assert (brief.headers, brief.labels, brief.content_type) == ({"h": "v"}, {"l": "v"}, "application/json")
    assert brief.task.progress == insert.task.progress
    full = await harness.read(insert.task)
    assert (full.payload, full.result, full.attempts) == (b"payload", (b"r", "a/b"), [insert.task.progress.attempt])


async def test_a_record_that_does_not_decode_is_told_apart(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    good, bad = await harness.insert(fence, 2)
    await harness.spoil(bad.key)
    found = await harness.store.read_task(bad.key, full=True)
    assert isinstance(found, CorruptRecord)
    assert (found.shard, found.key, found.revision) == (0, bad.key, 1)
    page = await harness.store.list_tasks(query(), "", 10)
    assert ids(page) == [good.task_id]
    assert [record.key for record in page.corrupt] == [bad.key]


async def test_an_attempt_is_found_by_its_token_open_or_ended(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    task, other = await harness.insert(fence, 2)
    tokens = []
    for _ in range(3):
        await harness.apply(fence, writes.grant(task, fence))
        assert task.progress.attempt is not None
        tokens.append(task.progress.attempt.lease_token)
        if len(tokens) < 3:
            await harness.apply(fence, writes.loss(task))
    for number, token in enumerate(tokens, start=1):
        attempt = await writes.find_attempt(harness.store, task.key, token)
        assert attempt is not None
        assert (attempt.number, attempt.lease_token) == (number, token)
        assert (attempt.outcome is None) == (number == 3)
    assert await writes.find_attempt(harness.store, other.key, tokens[0]) is None
    assert await writes.find_attempt(harness.store, task.key, b"unknown") is None
    many = await harness.store.find_attempts([(task.key, tokens[1]), (other.key, tokens[0]), (task.key, tokens[0])])
    assert [attempt and attempt.lease_token for attempt in many] == [tokens[1], None, tokens[0]]
    assert await writes.find_attempt(harness.store, TaskKey("default", "nowhere"), tokens[0]) is None


async def test_a_list_pages_through_all_shards_in_the_order_of_ids(harness: Harness) -> None:
    fences = await harness.lead(*range(harness.shards))
    tasks = [task for fence in fences for task in await harness.insert(fence, 7)]
    after, found = "", list[str]()
    pages = 0
    while True:
        page = await harness.store.list_tasks(query(), after, 10)
        found += ids(page)
        pages += 1
        if page.next_after is None:
            break
        assert len(page.tasks) == 10
        after = page.next_after
    assert found == by_id(tasks)
    assert pages == 6
    assert (await harness.store.list_tasks(query(), found[-1], 10)) == TaskPage([], [], None)


async def test_a_list_keeps_to_queue_states_and_times(harness: Harness) -> None:
    [fence] = await harness.lead(0)
    mail = await harness.insert(fence, 4)
    video = [writes.insert(harness.shards, lane=writes.lane(queue="video"), run_at=NOW + n) for n in range(3)]
    foreign = writes.insert(harness.shards, lane=writes.lane(namespace="other"))
    await harness.apply(fence, *video, foreign)
    await harness.apply(fence, writes.grant(mail[0], fence), writes.grant(mail[1], fence))
    await harness.apply(fence, writes.success(mail[1]))
    videos = [insert.task for insert in video]

    async def listed(wanted: TaskQuery) -> list[str]:
        return ids(await harness.store.list_tasks(wanted, "", 100))

    assert await listed(query("mail")) == by_id(mail)
    assert await listed(query("video")) == by_id(videos)
    assert await listed(query("none")) == []
    assert await listed(query("mail", [TaskState.LEASED, TaskState.SUCCEEDED])) == by_id(mail[:2])
    assert await listed(query(None, [TaskState.PENDING])) == by_id([*mail[2:], *videos])
    assert await listed(query(None, (), NOW + 1)) == by_id(videos[1:])
    assert await listed(query(None, (), NOW + 1, NOW + 2)) == by_id(videos[1:2])
    assert await listed(query(None, (), None, NOW)) == []
    assert await listed(query()) == by_id([*mail, *videos])
