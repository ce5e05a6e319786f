"""`fsck` finds every kind of damage, and nothing in a store that is sound."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from conformance import writes
from integration.postgres_side import Side, side_of
from services.postgres import SHARDS

from duecourse.model import bounds
from duecourse.server.core.fence import Fence
from duecourse.server.core.task import ShardId, Task
from duecourse.server.storage import Raised, RaiseRequest, StoreRefused, StoreUnavailable, fsck
from duecourse.server.storage.postgres import PostgresStore
from duecourse.server.storage.soundness import Rule


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


async def lead(store: PostgresStore, shard: int = 0) -> Fence:
    raised = (await store.raise_epochs("solo", [RaiseRequest(ShardId(shard), b"h")], writes.NOW))[ShardId(shard)]
    assert isinstance(raised, Raised)
    return raised.fence


async def fill(store: PostgresStore) -> dict[str, Task]:
    """Make a task of every kind, in the first shard."""
    fence = await lead(store)
    made: dict[str, Task] = {}
    for kind in ("pending", "leased", "running", "retry", "twice", "succeeded", "returned"):
        insert = writes.insert(SHARDS, 0, headers={"a": "b"}, labels={"c": "d"}, sequence=len(made))
        await writes.apply(store, fence, insert)
        made[kind] = insert.task
    for kind in ("leased", "running", "retry", "twice", "succeeded"):
        await writes.apply(store, fence, writes.grant(made[kind], fence))
    await writes.apply(store, fence, writes.start(made["running"]))
    for kind in ("retry", "twice"):
        await writes.apply(store, fence, writes.loss(made[kind]))
    await writes.apply(store, fence, writes.grant(made["twice"], fence))
    await writes.apply(store, fence, writes.success(made["succeeded"], result=(b"done", "text/plain")))
    for _ in range(bounds.MAX_RETURNED_RECORDS + 3):
        await writes.apply(store, fence, writes.grant(made["returned"], fence))
        await writes.apply(store, fence, writes.give_back(made["returned"]))
    return made


DAMAGES = {
    "slot = slot + 1": Rule.PLACE,
    "shard = 3": Rule.PLACE,
    "shard = 77": Rule.PLACE,
    "lane_hash = lane_hash + 1": Rule.LANE,
    "queue = 'gone', lane_hash = lane_hash": Rule.QUEUE,
    "due_time = NULL": Rule.STATE,
    "end_time = 5": Rule.STATE,
    "state = 'succeeded'": Rule.STATE,
    "state = 'leased'": Rule.STATE,
    "failure_reason = 'non_retryable'": Rule.STATE,
    "lease_token = 'x'": Rule.STATE,
    "attempt_count = 1": Rule.STATE,
    "worker = 'somebody'": Rule.STATE,
    "attempt_end_time = 7": Rule.STATE,
    "policy = '\\xff'": Rule.RECORD,
    "headers = '\\xff'": Rule.RECORD,
    "content_type = '\\xff'": Rule.RECORD,
    "result_type = '\\xff'": Rule.RECORD,
    "answers = '\\x0a'": Rule.RECORD,
    "priority = 11": Rule.RECORD,
    "epoch = 99": Rule.TERM,
    "sequence = 9 * 4294967296": Rule.TERM,
}


async def test_a_sound_store_is_told_so(store: PostgresStore, postgres_dsn: str) -> None:
    made = await fill(store)
    told: list[int] = []
    report = await fsck.check(postgres_dsn, lambda report: told.append(report.tasks), batch=3)
    assert report.findings == []
    assert report.is_sound
    assert (report.shards, report.tasks) == (SHARDS, len(made))
    assert report.attempts == 1 + bounds.MAX_RETURNED_RECORDS
    assert told[:3] == [3, 6, 7]


async def test_an_empty_store_is_sound(postgres_dsn: str) -> None:
    assert (await fsck.check(postgres_dsn)).is_sound


@pytest.mark.parametrize(("damage", "rule"), DAMAGES.items())
async def test_damage_to_a_task_is_found(
    store: PostgresStore, side: Side, postgres_dsn: str, damage: str, rule: Rule
) -> None:
    made = await fill(store)
    key = made["pending"].key
    await side.connection.execute(f"UPDATE duecourse.task SET {damage} WHERE task_id = $1", key.task_id)
    report = await fsck.check(postgres_dsn, batch=3)
    assert rule in report.broken
    assert {finding.key for finding in report.findings} == {key}


@pytest.mark.parametrize(
    ("kind", "damage", "rule"),
    [
        ("leased", "outcome = 'failed', attempt_end_time = 5", Rule.STATE),
        ("leased", "state = 'running'", Rule.STATE),
        ("leased", "attempt_number = 2", Rule.STATE),
        ("leased", "node = NULL", Rule.STATE),
        ("leased", "epoch = 99", Rule.TERM),
        ("leased", "due_time = due_time + 3600000000", Rule.HELD),
        ("running", "start_time = NULL", Rule.STATE),
        ("succeeded", "due_time = 5", Rule.STATE),
        ("succeeded", "end_time = NULL", Rule.STATE),
        ("succeeded", "state = 'failed'", Rule.STATE),
        ("twice", "fencing_token = 1", Rule.ATTEMPTS),
        ("returned", "attempts_used = 6", Rule.ATTEMPTS),
        ("twice", "attempt_count = 3, attempt_number = 3", Rule.ATTEMPTS),
        ("twice", "attempt_count = 2147483647, attempt_number = 2147483647", Rule.ATTEMPTS),
    ],
)
async def test_damage_to_a_task_with_attempts_is_found(
    store: PostgresStore, side: Side, postgres_dsn: str, kind: str, damage: str, rule: Rule
) -> None:
    made = await fill(store)
    key = made[kind].key
    await side.connection.execute(f"UPDATE duecourse.task SET {damage} WHERE task_id = $1", key.task_id)
    report = await fsck.check(postgres_dsn)
    assert rule in report.broken
    assert {finding.key for finding in report.findings} == {key}


@pytest.mark.parametrize(
    ("kind", "damage", "rule"),
    [
        ("twice", "DELETE FROM duecourse.attempt", Rule.ATTEMPTS),
        ("twice", "UPDATE duecourse.attempt SET number = 2", Rule.ATTEMPTS),
        ("twice", "UPDATE duecourse.attempt SET outcome = NULL", Rule.ATTEMPTS),
        ("twice", "UPDATE duecourse.attempt SET end_time = NULL", Rule.ATTEMPTS),
        ("twice", "UPDATE duecourse.attempt SET outcome = 'nonsense'", Rule.RECORD),
        ("twice", "UPDATE duecourse.attempt SET epoch = 99", Rule.TERM),
        ("twice", "DELETE FROM duecourse.task", Rule.ORPHAN),
        ("returned", "DELETE FROM duecourse.attempt a", Rule.ATTEMPTS),
    ],
)
async def test_damage_to_attempts_is_found(
    store: PostgresStore, side: Side, postgres_dsn: str, kind: str, damage: str, rule: Rule
) -> None:
    made = await fill(store)
    key = made[kind].key
    await side.connection.execute(f"{damage} WHERE task_id = $1", key.task_id)
    report = await fsck.check(postgres_dsn)
    assert rule in report.broken
    assert {finding.key for finding in report.findings} == {key}


async def test_a_task_that_the_due_index_lacks_is_found(store: PostgresStore, side: Side, postgres_dsn: str) -> None:
    await fill(store)
    is_kept_up = "UPDATE pg_index SET indisready = $1 WHERE indexrelid = 'duecourse.task_due'::regclass"
    await side.connection.execute(is_kept_up, False)
    lost = writes.insert(SHARDS, 0, sequence=100)
    await writes.apply(store, await lead(store), lost)
    await side.connection.execute(is_kept_up, True)
    assert lost.task.key not in [
        task.key for task in (await store.load_buckets([ShardId(0)], 0, writes.NOW + 1, 100)).tasks
    ]
    report = await fsck.check(postgres_dsn)
    assert report.broken == {Rule.DUE: 1}
    assert [finding.key for finding in report.findings] == [lost.task.key]


async def test_of_what_was_handed_back_only_the_oldest_may_be_missing(
    store: PostgresStore, side: Side, postgres_dsn: str
) -> None:
    made = await fill(store)
    await side.connection.execute(
        "DELETE FROM duecourse.attempt WHERE task_id = $1 AND number = 10", made["returned"].task_id
    )
    report = await fsck.check(postgres_dsn)
    assert report.broken == {Rule.ATTEMPTS: 1}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("DELETE FROM duecourse.shard WHERE shard = 3", "slots 6144 to 8191 belong to no shard"),
        ("DELETE FROM duecourse.shard WHERE shard = 7", "the last slot of the shards is 14335"),
        ("DELETE FROM duecourse.shard WHERE shard > 0 OR shard = 0", "the last slot of the shards is -1"),
        ("UPDATE duecourse.shard SET slot_from = 6000 WHERE shard = 3", "slots 6000 to 6143 belong to two shards"),
        (
            "UPDATE duecourse.shard SET coordination = 'other', epoch = 1, holder = 'x' WHERE shard = 3",
            "different coordinations: other, solo",
        ),
        ("UPDATE duecourse.shard SET coordination = '' WHERE shard = 0", "this is no term"),
        ("UPDATE duecourse.shard SET epoch = 0 WHERE shard = 0", "this is no term"),
        ("UPDATE duecourse.shard SET epoch = -1 WHERE shard = 0", "this is no term"),
    ],
)
async def test_damage_to_shards_is_found(
    store: PostgresStore, side: Side, postgres_dsn: str, damage: str, said: str
) -> None:
    await lead(store)
    await side.connection.execute(damage)
    if "OR shard = 0" in damage:
        with pytest.raises(StoreRefused, match="no shards"):
            await fsck.check(postgres_dsn)
        return
    report = await fsck.check(postgres_dsn)
    assert report.broken == {Rule.SHARDS: len(report.findings)}
    assert any(said in finding.detail for finding in report.findings)


async def test_a_store_that_was_bound_to_a_cluster_is_sound(store: PostgresStore, postgres_dsn: str) -> None:
    await store.bind("c0ffee")
    assert (await fsck.check(postgres_dsn)).is_sound
    await store.bind("solo", is_forced=True)
    await lead(store)
    await store.bind("c0ffee", is_forced=True)
    assert (await fsck.check(postgres_dsn)).is_sound


async def test_what_was_set_aside_is_counted_and_no_finding(
    store: PostgresStore, side: Side, postgres_dsn: str
) -> None:
    made = await fill(store)
    await side.connection.execute(
        "UPDATE duecourse.task SET policy = '\\xff' WHERE task_id = $1", made["leased"].task_id
    )
    (damaged,) = (await store.load_held([ShardId(0)])).corrupt
    fence = await lead(store)
    assert await store.set_aside(fence, damaged, writes.NOW) is True
    report = await fsck.check(postgres_dsn)
    assert report.is_sound
    assert report.set_aside == 1


async def test_a_report_holds_a_bounded_number_of_findings_and_counts_all(
    store: PostgresStore, side: Side, postgres_dsn: str
) -> None:
    fence = await lead(store)
    await writes.apply(store, fence, *(writes.insert(SHARDS, 0, sequence=n) for n in range(fsck.MOST_SHOWN + 1)))
    await side.connection.execute("UPDATE duecourse.task SET lane_hash = 1")
    report = await fsck.check(postgres_dsn, batch=300)
    assert report.broken == {Rule.LANE: fsck.MOST_SHOWN + 1}
    assert len(report.findings) == fsck.MOST_SHOWN


async def test_nothing_is_found_in_a_store_that_changes_meanwhile(store: PostgresStore, postgres_dsn: str) -> None:
    fence = await lead(store)
    made = [writes.insert(SHARDS, 0, sequence=number) for number in range(20)]
    await writes.apply(store, fence, *made)
    reports: list[fsck.Report] = []

    async def change() -> None:
        nonlocal fence
        while len(reports) < 10:
            fence = await lead(store)
            await writes.apply(store, fence, *(writes.grant(insert.task, fence) for insert in made))
            await writes.apply(store, fence, *(writes.give_back(insert.task) for insert in made))

    async def check() -> None:
        while len(reports) < 10:
            reports.append(await fsck.check(postgres_dsn, batch=7))

    async with asyncio.TaskGroup() as group:
        group.create_task(change(), name="change")
        group.create_task(check(), name="check")
    assert [report.findings for report in reports] == [[]] * 10


async def test_a_store_that_cannot_be_reached_is_told() -> None:
    with pytest.raises(StoreUnavailable, match="cannot connect"):
        await fsck.check("postgresql://u@127.0.0.1:1/x")


async def test_a_store_that_takes_connections_and_is_silent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsck, "_CONNECT_SECONDS", 0.5)
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, pytest.raises(StoreUnavailable, match="cannot connect: no answer in time"):
        await fsck.check(f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/x")


def run_command(dsn: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "duecourse.cli.main", "store", "fsck", *options]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"DUECOURSE_POSTGRES_DSN": dsn}, timeout=60
    )


async def test_the_command_tells_what_it_read(store: PostgresStore, postgres_dsn: str) -> None:
    await fill(store)
    ended = await asyncio.to_thread(run_command, postgres_dsn)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr == f"the store is sound: read {SHARDS} shards, 7 tasks, 17 earlier attempts\n"


async def test_the_command_ends_with_1_and_names_what_is_wrong(
    store: PostgresStore, side: Side, postgres_dsn: str
) -> None:
    made = await fill(store)
    task_id = made["pending"].task_id
    await side.connection.execute("UPDATE duecourse.task SET lane_hash = 1 WHERE task_id = $1", task_id)
    ended = await asyncio.to_thread(run_command, postgres_dsn)
    assert ended.returncode == 1
    assert ended.stdout.startswith(f"lane\t0\tdefault\t{task_id}\tthe hash of its lane is ")
    assert ended.stderr.endswith("error: the store is not sound: 1 lane\n")
    told = await asyncio.to_thread(run_command, postgres_dsn, "--json")
    finding, summary = map(json.loads, told.stdout.splitlines())
    assert (finding["rule"], finding["task_id"], finding["shard"]) == ("lane", task_id, 0)
    assert summary == {
        "is_sound": False,
        "shards": SHARDS,
        "tasks": 7,
        "attempts": 17,
        "set_aside": 0,
        "broken": {"lane": 1},
    }
