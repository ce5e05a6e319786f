"""Tasks and writes as the core makes them, for the conformance suite."""

import itertools
from collections.abc import Iterable, Mapping

from duecourse.model import bounds, slots
from duecourse.model.instants import Micros
from duecourse.server.core import lifecycle
from duecourse.server.core.fence import Fence
from duecourse.server.core.lease import Holder
from duecourse.server.core.task import (
    DEFAULT_POLICY,
    Attempt,
    AttemptOutcome,
    Lane,
    Policy,
    ShardId,
    Submission,
    Task,
    TaskKey,
)
from duecourse.server.core.writes import Insert, Update
from duecourse.server.storage import Committed, ShardBatch, TaskStore

NOW: Micros = 1_800_000_000 * bounds.SECOND
LANE = Lane("default", "mail", "send", 0, "")
NODE = "node-1"

_numbers = itertools.count(1)


def lane(fairness_key: str = "", *, queue: str = "mail", priority: int = 0, namespace: str = "default") -> Lane:
    return Lane(namespace, queue, "send", priority, fairness_key)


def task_id_in(shard: int, shards: int, namespace: str = "default") -> str:
    """Find an id that a shard holds."""
    while True:
        task_id = f"task-{next(_numbers):08}"
        if slots.shard_of_slot(slots.slot_of(namespace, task_id), shards) == shard:
            return task_id


def insert(
    shards: int,
    shard: int = 0,
    *,
    task_id: str | None = None,
    lane: Lane = LANE,
    run_at: Micros = NOW,
    sequence: int | None = None,
    policy: Policy = DEFAULT_POLICY,
    payload: bytes = b"payload",
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Insert:
    number = next(_numbers)
    task_id = task_id or task_id_in(shard, shards, lane.namespace)
    uid = number.to_bytes(16, "big")
    submission = Submission(
        lane.namespace,
        task_id,
        slots.slot_of(lane.namespace, task_id),
        ShardId(shard),
        lane,
        uid,
        run_at,
        0,
        policy,
        payload,
        content_type,
        dict(headers or {}),
        dict(labels or {}),
        b"\x01" + uid,
    )
    task = Task(
        TaskKey(lane.namespace, task_id),
        ShardId(shard),
        lane,
        uid,
        number if sequence is None else sequence,
        run_at,
        NOW,
        policy,
        lifecycle.submitted(run_at),
    )
    return Insert(submission, task, None)


def grant(task: Task, fence: Fence, at: Micros = NOW, worker: str = "worker-1") -> Update:
    token = next(_numbers).to_bytes(16, "big")
    holder = Holder(1, task.namespace, worker, "incarnation-1", 0)
    progress = lifecycle.granted(task, holder, token, NODE, fence, at)
    return Update(task, progress, archive=task.progress.attempt, is_grant=True)


def success(task: Task, at: Micros = NOW, result: tuple[bytes, str] | None = None) -> Update:
    return Update(task, lifecycle.succeeded(task.progress, at, at - 1, b"digest"), result=result)


def start(task: Task, at: Micros = NOW) -> Update:
    return Update(task, lifecycle.started(task.progress, at))


def give_back(task: Task, at: Micros = NOW) -> Update:
    return Update(task, lifecycle.returned(task.progress, at))


def loss(task: Task, at: Micros = NOW) -> Update:
    return Update(task, lifecycle.failed(task, at, AttemptOutcome.LEASE_LOST, is_lost=True, digest=None))


def batch(fence: Fence, *writes: Insert | Update) -> ShardBatch:
    return ShardBatch(
        fence,
        [write for write in writes if isinstance(write, Insert)],
        [write for write in writes if isinstance(write, Update)],
    )


def batches(fences: Mapping[ShardId, Fence], writes: Iterable[Insert | Update]) -> list[ShardBatch]:
    """Sort writes by their shards."""
    by_shard: dict[ShardId, list[Insert | Update]] = {}
    for write in writes:
        by_shard.setdefault(write.task.shard, []).append(write)
    return [batch(fences[shard], *of_shard) for shard, of_shard in by_shard.items()]


async def apply(store: TaskStore, fence: Fence, *writes: Insert | Update) -> None:
    """Commit writes that must all be applied, and take their progress over as a shard does."""
    answer = (await store.commit([batch(fence, *writes)]))[fence.shard]
    assert isinstance(answer, Committed), answer
    assert not answer.taken
    assert not answer.mismatched
    for write in writes:
        if isinstance(write, Update):
            write.task.progress = write.progress


async def find_attempt(store: TaskStore, key: TaskKey, lease_token: bytes) -> Attempt | None:
    """Find one attempt."""
    (attempt,) = await store.find_attempts([(key, lease_token)])
    return attempt
