"""One shard whose writes and reads are answered at once, for tests of what it decides."""

from dataclasses import fields
from typing import Any

import pytest
from core.builders import START, a_holder, a_submission, at
from core.model_store import ModelStore

from duecourse.model import bounds
from duecourse.model.instants import Micros, Now
from duecourse.server.core import events
from duecourse.server.core.effects import Answer, Effects
from duecourse.server.core.lease import Holder, Lease
from duecourse.server.core.shard import Shard, ShardOptions
from duecourse.server.core.task import Attempt, Policy, Progress, ShardId, TaskKey, TaskState
from duecourse.server.core.writes import Write

LEASE: Micros = bounds.DEFAULT_LEASE
POLICY = Policy(jitter=0.0)

HELD = (TaskState.LEASED, TaskState.RUNNING)
ENDED = (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED)


class OneShard:
    """See the module's docstring. `out` keeps all effects but writes and reads."""

    def __init__(self, head: int = bounds.HEAD, horizon: Micros = bounds.HOUR) -> None:
        self.store = ModelStore()
        self.elapsed: Micros = 0
        self.holder = a_holder()
        self.out = Effects()
        self.holds_commits = False
        """Keep writes in `waiting` until `commit` is called."""
        self.waiting: list[Write] = []
        self._head = head
        self._horizon = horizon
        self._tokens = iter(range(1, 1_000_000))
        self.take_over()

    # Its life.

    def now(self) -> Now:
        return at(START + self.elapsed, self.elapsed)

    def take_over(self) -> None:
        """Begin a new term: on another node, say."""
        number = ShardId(0)
        fence, sequence, raises = self.store.raise_epoch(number, self.now().latest)
        horizon = self.now().latest + self._horizon
        self.waiting = []
        self.shard = Shard(fence, sequence, horizon, ShardOptions("node", head=self._head), self.now())
        snapshot = self.store.snapshot()
        self.handle(events.HeldLoaded(snapshot.held(number), raises))
        tasks, cut = snapshot.buckets(number, 0, horizon, self._head)
        self.handle(events.BucketsLoaded(tasks, cut))

    def handle(self, event: events.Event) -> None:
        """Handle an event and all that follows from it."""
        out = Effects()
        self.shard.handle(event, self.now(), out)
        self.shard.collect_loads(out)
        self.carry_out(out)

    def carry_out(self, out: Effects) -> None:
        """Write and read what is asked for, and keep all other effects."""
        snapshot_of = self.store.snapshot
        writes, task_reads, attempt_reads = out.writes, out.task_reads, out.attempt_reads
        lane_loads = out.lane_loads
        out.writes, out.task_reads, out.attempt_reads, out.lane_loads = [], [], [], []
        for spec in fields(Effects):
            kept, more = getattr(self.out, spec.name), getattr(out, spec.name)
            setattr(self.out, spec.name, kept + more)
        self.waiting += writes
        if not self.holds_commits:
            self.commit()
        for _, key in task_reads:
            self.handle(events.TasksRead([(key, snapshot_of().task(key))]))
        for _, end in attempt_reads:
            self.handle(events.AttemptRead(end, snapshot_of().attempt(end.key, end.lease_token)))
        for load in lane_loads:
            tasks, is_end = snapshot_of().lane(load.shard, load.lane, load.after, load.due_before, load.limit)
            self.handle(events.LaneLoaded(load.lane, load.version, tasks, is_end))

    def commit(self) -> None:
        """Commit what waits."""
        while self.waiting:
            writes, self.waiting = self.waiting, []
            answer = self.store.commit(self.shard.fence, writes, self.now().earliest)
            assert answer is not None, "the term is over"
            self.handle(answer)
            if self.holds_commits:
                return

    def pass_time(self, duration: Micros, *, is_renewed: bool = True) -> None:
        """Let time pass, with ticks; the worker is heard all the while unless it is said to be silent."""
        while duration > 0:
            step = min(duration, bounds.LONGEST_SLEEP // 2)
            duration -= step
            self.elapsed += step
            if is_renewed:
                self.holder.renewed_at = self.elapsed
            self.handle(events.Tick())

    # What happens to it.

    def submit(
        self, task_id: str = "task", delay: Micros = 0, policy: Policy = POLICY, fingerprint: bytes = b"same"
    ) -> Answer:
        answer = self.answer(self.submit_only(task_id, delay, policy, fingerprint))
        assert answer is not None, "not answered"
        return answer

    def submit_only(
        self, task_id: str = "task", delay: Micros = 0, policy: Policy = POLICY, fingerprint: bytes = b"same"
    ) -> object:
        """Submit a task; returns the origin, whose answer may come later."""
        origin = object()
        submission = a_submission(task_id, delay=delay, policy=policy, fingerprint=fingerprint)
        self.handle(events.Submit([(submission, origin)]))
        return origin

    def cancel(
        self,
        task_id: str = "task",
        wait: Micros = 0,
        request_id: str = "",
        fingerprint: bytes = b"cancel",
        revision: int | None = None,
    ) -> object:
        """Cancel; returns the origin, whose answer may come later."""
        origin = object()
        key = TaskKey("default", task_id)
        self.handle(events.Cancel(key, request_id, fingerprint, revision, wait, origin))
        return origin

    def answer(self, origin: Any) -> Answer | None:
        """Return what an origin was answered."""
        answers = [answer for answered, answer in self.out.answers if answered is origin]
        assert len(answers) <= 1, "answered twice"
        return answers[0] if answers else None

    def grant(self, task_id: str = "task", holder: Holder | None = None) -> bytes:
        """Give a ready task to a worker; returns the token."""
        token = next(self._tokens).to_bytes(16, "big")
        task = self.shard.near.tasks[TaskKey("default", task_id)]
        self.handle(events.Grant(task, holder or self.holder, token, LEASE, 1))
        for assignment in self.out.assignments:
            assignment.lease.assignment_number = 1
        return token

    def start(self, token: bytes, task_id: str = "task") -> None:
        self.handle(events.Start(TaskKey("default", task_id), token, self.now().latest))

    def report(self, token: bytes, progress: str, task_id: str = "task") -> None:
        """Say how far a handler has come."""
        self.handle(events.Report(TaskKey("default", task_id), token, progress))

    def end(
        self,
        token: bytes,
        kind: events.OutcomeKind,
        task_id: str = "task",
        digest: bytes | None = None,
        retry_after: Micros | None = None,
        start_time: Micros | None = None,
    ) -> Any:
        """Say how an attempt ended; returns the verdict, None while there is none."""
        before = len(self.out.verdicts)
        key = TaskKey("default", task_id)
        event = events.End(key, token, self.holder, kind, digest or kind.encode(), start_time, retry_after=retry_after)
        self.handle(event)
        verdicts = self.out.verdicts[before:]
        assert len(verdicts) <= 1
        return verdicts[0][2] if verdicts else None

    def hold(self, *tokens: bytes, has_started: bool = False, last: int = 1, is_complete: bool = True) -> None:
        """Let the worker list what it holds."""
        leases: dict[bytes, tuple[TaskKey | None, bool]] = {
            token: (TaskKey("default", "task"), has_started) for token in tokens
        }
        self.handle(events.Hold(self.holder, leases, last, is_complete))

    def new_stream(self) -> None:
        """Let the worker go on with another stream."""
        self.holder.is_open = False
        self.holder = a_holder(self.holder.stream_id + 1)
        self.holder.renewed_at = self.elapsed

    # What is to be seen.

    def progress(self, task_id: str = "task") -> Progress:
        return self.store.rows[TaskKey("default", task_id)].progress

    def attempt(self, task_id: str = "task") -> Attempt:
        attempt = self.progress(task_id).attempt
        assert attempt is not None
        return attempt

    def lease(self, task_id: str = "task") -> Lease:
        return self.shard.leases.by_task[TaskKey("default", task_id)]

    def is_ready(self, task_id: str = "task") -> bool:
        task = self.shard.near.tasks.get(TaskKey("default", task_id))
        return task is not None and task.is_ready


def waiting(policy: Policy = POLICY) -> OneShard:
    """Return a task that is due."""
    shard = OneShard()
    shard.submit(policy=policy)
    return shard


def held(state: TaskState, policy: Policy = POLICY) -> tuple[OneShard, bytes]:
    """Return a task in a state, and the token of its lease."""
    shard = waiting(policy)
    token = shard.grant()
    if state is TaskState.RUNNING:
        shard.start(token)
    assert shard.progress().state is state
    return shard, token


def retrying(policy: Policy = POLICY) -> OneShard:
    """Return a task that has failed once."""
    shard, token = held(TaskState.RUNNING, policy)
    shard.end(token, events.OutcomeKind.RETRYABLE)
    assert shard.progress().state is TaskState.RETRY_WAIT
    return shard


def ended(state: TaskState) -> tuple[OneShard, bytes]:
    """Return a task that has ended, and the token of its attempt."""
    shard, token = held(TaskState.RUNNING)
    match state:
        case TaskState.SUCCEEDED:
            shard.end(token, events.OutcomeKind.SUCCEEDED)
        case TaskState.FAILED:
            shard.end(token, events.OutcomeKind.NON_RETRYABLE)
        case _:
            shard.cancel()
            shard.end(token, events.OutcomeKind.CANCELLED)
    assert shard.progress().state is state
    return shard, token


def any_state() -> list[Any]:
    """Return what makes a task, for each state."""
    return [
        pytest.param(lambda: waiting(), id="pending"),
        pytest.param(lambda: retrying(), id="retry_wait"),
        *(pytest.param(lambda state=state: held(state)[0], id=state) for state in HELD),
        *(pytest.param(lambda state=state: ended(state)[0], id=state) for state in ENDED),
    ]
