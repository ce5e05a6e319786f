"""Rows that no version has written, and how values become bytes."""

import dataclasses
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from conformance import writes
from hypothesis import given
from hypothesis import strategies as st
from integration.postgres_side import Side, side_of
from services.postgres import SHARDS

from duecourse.model import bounds
from duecourse.server.core.fence import Fence
from duecourse.server.core.task import DEFAULT_POLICY, Answer, Delivery, Lane, Policy, ShardId, Task
from duecourse.server.storage import (
    Committed,
    CorruptRecord,
    Raised,
    RaiseRequest,
    ShardBatch,
    TaskQuery,
    codec,
)
from duecourse.server.storage.postgres import PostgresStore

DAMAGES = [
    "state = 'gone'",
    "state = ''",
    "state = 'succeeded'",
    "state = 'leased'",
    "due_time = -5",
    "end_time = 5",
    "revision = 0",
    "round = 0",
    "attempts_used = 3",
    "returns_in_row = -1",
    "priority = 11",
    "sequence = -1",
    "run_at = -1",
    "policy = '\\xff'",
    "policy = '\\x08e90f'",
    "answers = '\\x0a'",
    "failure_reason = 'bad luck'",
    "lease_token = 'x'",
    "lease_token = 'x', outcome = 'nonsense'",
    "state = 'retry_wait', lease_token = 'x', failure_type = 'Error'",
    "run_at = 9000000000000000000",
    "create_time = 9000000000000000000",
    "round = 2147483647",
    "attempt_count = 2147483647",
    "returns_in_row = 2147483647",
]
_OF_A_HELD_ONE = [
    *(f"{column} = NULL" for column in ("attempt_number", "attempt_round", "worker", "incarnation", "node", "epoch")),
    *(f"{column} = NULL" for column in ("fencing_token", "lease_time", "sign_of_life")),
    "failure_type = 'Error'",
    "state = 'running'",
]


@pytest_asyncio.fixture
async def store(postgres_dsn: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_dsn)
    await store.open()
    yield store
    await store.close()


@pytest_asyncio.fixture
async def side(postgres_dsn: str) -> AsyncIterator[Side]:
    async with side_of(postgres_dsn) as side:
        await side.connection.execute("ALTER TABLE duecourse.task DROP CONSTRAINT task_state_check")
        yield side


async def lead(store: PostgresStore) -> Fence:
    raised = (await store.raise_epochs("solo", [RaiseRequest(ShardId(0), b"h")], writes.NOW))[ShardId(0)]
    assert isinstance(raised, Raised)
    return raised.fence


async def test_a_damaged_row_is_told_apart_and_can_be_set_aside(store: PostgresStore, side: Side) -> None:
    fence = await lead(store)
    for damage in DAMAGES:
        good, bad = writes.insert(SHARDS, 0), writes.insert(SHARDS, 0)
        await writes.apply(store, fence, good, bad)
        changed = await side.connection.execute(
            f"UPDATE duecourse.task SET {damage} WHERE task_id = $1", bad.task.task_id
        )
        assert changed == "UPDATE 1"
        found, damaged = await store.load_tasks([good.task.key, bad.task.key])
        assert isinstance(found, Task), damage
        assert isinstance(damaged, CorruptRecord), damage
        assert damaged.key == bad.task.key
        assert isinstance(await store.read_task(bad.task.key, full=True), CorruptRecord)
        loaded = await store.load_buckets([ShardId(0)], 0, writes.NOW + 1, 1_000)
        assert good.task.key in [task.key for task in loaded.tasks], damage
        is_done = await store.set_aside(fence, damaged, writes.NOW)
        assert is_done is (damage != "end_time = 5")


@pytest.mark.parametrize("damage", _OF_A_HELD_ONE)
async def test_a_damaged_row_of_a_task_that_is_held_is_told_apart_and_can_be_set_aside(
    store: PostgresStore, side: Side, damage: str
) -> None:
    fence = await lead(store)
    good, bad = writes.insert(SHARDS, 0), writes.insert(SHARDS, 0)
    await writes.apply(store, fence, good, bad)
    await writes.apply(store, fence, writes.grant(good.task, fence), writes.grant(bad.task, fence))
    assert await side.connection.execute(
        f"UPDATE duecourse.task SET {damage} WHERE task_id = $1", bad.task.task_id
    ) == ("UPDATE 1")
    loaded = await store.load_held([ShardId(0)])
    assert [task.key for task in loaded.tasks] == [good.task.key]
    [record] = loaded.corrupt
    assert record.key == bad.task.key
    assert isinstance(await store.read_task(bad.task.key, full=True), CorruptRecord)
    assert await store.set_aside(fence, record, writes.NOW) is True
    assert await store.set_aside(fence, record, writes.NOW) is False


async def test_what_tells_of_a_damaged_row_tells_no_lease_token(store: PostgresStore, side: Side) -> None:
    fence = await lead(store)
    insert = writes.insert(SHARDS, 0)
    await writes.apply(store, fence, insert)
    grant = writes.grant(insert.task, fence)
    await writes.apply(store, fence, grant)
    await side.connection.execute("UPDATE duecourse.task SET state = 'failed', due_time = NULL, end_time = 5")
    [record] = await store.load_tasks([insert.task.key])
    assert isinstance(record, CorruptRecord)
    assert grant.progress.attempt is not None
    assert repr(grant.progress.attempt.lease_token)[2:10] not in record.detail


@pytest.mark.parametrize(
    "labels", ["[1]", '{"a": 1}', '"x"', "[" * 2_000 + "]" * 2_000], ids=["list", "number", "text", "deep"]
)
async def test_labels_of_another_shape_spoil_only_their_task(store: PostgresStore, side: Side, labels: str) -> None:
    fence = await lead(store)
    good, bad = writes.insert(SHARDS, 0), writes.insert(SHARDS, 0)
    await writes.apply(store, fence, good, bad)
    await side.connection.execute("UPDATE duecourse.task SET labels = $2 WHERE task_id = $1", bad.task.task_id, labels)
    page = await store.list_tasks(TaskQuery("default", None, frozenset(), None, None), "", 10)
    assert [stored.task.key for stored in page.tasks] == [good.task.key]
    assert [record.key for record in page.corrupt] == [bad.task.key]


@pytest.mark.parametrize("column", ["headers", "content_type"])
async def test_a_grant_of_what_does_not_decode_is_told_apart(store: PostgresStore, side: Side, column: str) -> None:
    fence = await lead(store)
    good, bad = writes.insert(SHARDS, 0), writes.insert(SHARDS, 0)
    await writes.apply(store, fence, good, bad)
    await side.connection.execute(f"UPDATE duecourse.task SET {column} = '\\xff' WHERE task_id = $1", bad.task.task_id)
    batch = ShardBatch(fence, [], [writes.grant(good.task, fence), writes.grant(bad.task, fence)])
    answer = (await store.commit([batch]))[ShardId(0)]
    assert isinstance(answer, Committed)
    assert isinstance(answer.deliveries[0], Delivery)
    assert answer.deliveries[1] is False


async def test_a_damaged_payload_row_spoils_only_itself(store: PostgresStore, side: Side) -> None:
    fence = await lead(store)
    for column in ("headers", "content_type"):
        insert = writes.insert(SHARDS, 0)
        await writes.apply(store, fence, insert)
        await side.connection.execute(
            f"UPDATE duecourse.task SET {column} = '\\xff' WHERE task_id = $1", insert.task.task_id
        )
        assert isinstance(await store.read_task(insert.task.key, full=False), CorruptRecord)


async def test_an_attempt_that_does_not_decode_is_as_good_as_none(store: PostgresStore, side: Side) -> None:
    fence = await lead(store)
    insert = writes.insert(SHARDS, 0)
    await writes.apply(store, fence, insert)
    await writes.apply(store, fence, writes.grant(insert.task, fence))
    attempt = insert.task.progress.attempt
    assert attempt is not None
    await writes.apply(store, fence, writes.loss(insert.task))
    await writes.apply(store, fence, writes.grant(insert.task, fence))
    assert await writes.find_attempt(store, insert.task.key, attempt.lease_token) is not None
    await side.connection.execute("UPDATE duecourse.attempt SET outcome = 'nonsense'")
    assert await writes.find_attempt(store, insert.task.key, attempt.lease_token) is None


POLICIES = st.builds(
    Policy,
    st.integers(1, bounds.MAX_MAX_ATTEMPTS),
    st.integers(1, bounds.MAX_BACKOFF),
    st.floats(0.5, bounds.MAX_BACKOFF_MULTIPLIER),
    st.integers(1, bounds.MAX_BACKOFF),
    st.floats(0, 1),
    st.integers(1, bounds.MAX_ATTEMPT_TIMEOUT),
    st.none() | st.integers(0, codec.LAST_INSTANT),
    st.none() | st.integers(0, codec.LAST_INSTANT),
    st.booleans(),
)


@given(POLICIES)
def test_a_policy_is_decoded_as_it_was(policy: Policy) -> None:
    data = codec.policy_to_bytes(policy)
    assert codec.policy_of(data) == policy
    assert codec.policy_of(bytes(bytearray(data))) is codec.policy_of(data)


def test_the_default_policy_is_no_bytes_and_one_object() -> None:
    assert codec.policy_to_bytes(DEFAULT_POLICY) == codec.policy_to_bytes(dataclasses.replace(DEFAULT_POLICY)) == b""
    assert codec.policy_of(b"") is DEFAULT_POLICY


@given(st.dictionaries(st.text(), st.text()))
def test_strings_are_decoded_as_they_were(entries: dict[str, str]) -> None:
    assert codec.strings_of(codec.strings_to_bytes(entries)) == entries


@given(st.lists(st.builds(Answer, st.text(), st.binary(), st.integers(0, 1_000), st.booleans(), st.booleans())))
def test_answers_are_decoded_as_they_were(answers: list[Answer]) -> None:
    assert codec.answers_of(codec.answers_to_bytes(tuple(answers))) == tuple(answers)


@pytest.mark.parametrize(
    ("lane", "expected"),
    [
        (writes.LANE, -1_822_247_065_898_074_569),
        (writes.lane("tenant", queue="other", priority=-3), -1_494_169_477_777_268_665),
    ],
)
def test_the_hash_of_a_lane_is_the_same_for_ever(lane: Lane, expected: int) -> None:
    assert codec.lane_hash(lane) == expected
