"""Tasks, submissions and what belongs to them, with every field that a test does not care for filled in."""

from duecourse.model import bounds
from duecourse.model.instants import Micros, Now
from duecourse.server.core.fence import Fence
from duecourse.server.core.lease import Holder
from duecourse.server.core.lifecycle import submitted
from duecourse.server.core.task import (
    DEFAULT_POLICY,
    Epoch,
    Lane,
    Policy,
    Progress,
    ShardId,
    Submission,
    Task,
    TaskKey,
)

START: Micros = 1_700_000_000 * bounds.SECOND
"""When the tests' time begins."""

FENCE = Fence(ShardId(0), Epoch(1), b"holder of a term")


def a_lane(queue: str = "q", task_type: str = "t", priority: int = 0, fairness_key: str = "") -> Lane:
    return Lane("default", queue, task_type, priority, fairness_key)


LANE = a_lane()


def a_task(
    task_id: str = "task",
    due_time: Micros = START,
    sequence: int = 0,
    lane: Lane = LANE,
    policy: Policy = DEFAULT_POLICY,
    shard: int = 0,
    progress: Progress | None = None,
) -> Task:
    return Task(
        TaskKey(lane.namespace, task_id),
        ShardId(shard),
        lane,
        task_id.encode(),
        sequence,
        due_time,
        min(due_time, START),
        policy,
        progress or submitted(due_time),
    )


def a_submission(
    task_id: str = "task",
    run_at: Micros | None = None,
    delay: Micros = 0,
    lane: Lane = LANE,
    policy: Policy = DEFAULT_POLICY,
    shard: int = 0,
    uid: bytes = b"",
    fingerprint: bytes = b"same",
) -> Submission:
    return Submission(
        lane.namespace,
        task_id,
        0,
        ShardId(shard),
        lane,
        uid or task_id.encode(),
        run_at,
        delay,
        policy,
        task_id.encode(),
        "text/plain",
        {},
        {},
        fingerprint,
    )


def a_holder(stream_id: int = 1, worker: str = "worker", incarnation: str = "incarnation") -> Holder:
    return Holder(stream_id, "default", worker, incarnation, 0)


def at(utc: Micros, elapsed: Micros | None = None, uncertainty: Micros = 0) -> Now:
    """Read a clock that is uncertain by so much."""
    return Now(utc - uncertainty, utc + uncertainty, utc - START if elapsed is None else elapsed)
