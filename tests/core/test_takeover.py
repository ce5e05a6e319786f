"""A takeover at every step of a task's way: the term ends there, another one begins, and all promises hold.

The scenario is a script of steps. It runs once whole, and then once for each step and each way in which a term can end:
the commit under way was applied or not and its answer is lost, or another node has raised the epoch already.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from core.builders import a_submission
from core.model_node import Node, shard_of
from core.model_worker import Held, Stream, Up, Worker
from core.world import World

from duecourse.model import bounds
from duecourse.server.core import errors
from duecourse.server.core.effects import Cancelled, CancelResult, Submitted
from duecourse.server.core.events import OutcomeKind
from duecourse.server.core.task import Policy, TaskKey, TaskState

SUCCEEDS = TaskKey("default", "a succeeds")
RETRIED = TaskKey("default", "b is retried")
PREVENTED = TaskKey("default", "c is cancelled while it waits")
REQUESTED = TaskKey("default", "d is cancelled while it runs")
RETURNED = TaskKey("default", "e is cancelled before it starts")
SHARD = shard_of(SUCCEEDS)
ALL = (SUCCEEDS, RETRIED, PREVENTED, REQUESTED, RETURNED)
POLICY = Policy(max_attempts=3, initial_backoff=bounds.SECOND, jitter=0.0)

ENDS = ("unknown, applied", "unknown, not applied", "unknown, applied late", "stale")


@dataclass
class Script:
    """The scenario, one step at a time, as far as it gets."""

    world: World
    worker: Worker
    stream: Stream

    @classmethod
    def begin(cls) -> "Script":
        world = World()
        worker = world.add_worker()
        for node in world.nodes:
            world.open(worker, node)
        script = cls(world, worker, worker.streams["a"])
        script.talk()
        script.stream.say(Up("credit", credit=10), world.elapsed)
        script.talk()
        return script

    @property
    def node(self) -> Node:
        return self.world.nodes[0]

    def steps(self) -> Iterator[None]:
        """Go the way of the scenario; yields after each step."""
        for key in ALL:
            delay = 20 * bounds.SECOND if key == PREVENTED else 0
            self.world.submit(self.node, a_submission(key.task_id, delay=delay, policy=POLICY, shard=SHARD))
        yield
        yield from self._go_on()
        self.world.cancel(self.node, PREVENTED, 0)
        yield from self._go_on()
        for key in (SUCCEEDS, RETRIED, REQUESTED):
            self._with(key, self._start)
            yield from self._go_on()
        self.world.cancel(self.node, REQUESTED, bounds.SECOND, "request")
        self.world.cancel(self.node, RETURNED, bounds.SECOND)
        yield from self._go_on()
        self._with(SUCCEEDS, lambda held: self._conclude(held, OutcomeKind.SUCCEEDED))
        self._with(RETRIED, lambda held: self._conclude(held, OutcomeKind.RETRYABLE))
        self._with(RETURNED, lambda held: self._conclude(held, OutcomeKind.RETURNED))
        yield from self._go_on()
        self._with(REQUESTED, lambda held: self._conclude(held, OutcomeKind.CANCELLED))
        yield from self._go_on()
        self.world.advance(2 * bounds.SECOND)
        yield from self._go_on()
        self._with(RETRIED, self._start)
        self._with(RETRIED, lambda held: self._conclude(held, OutcomeKind.SUCCEEDED))
        yield from self._go_on()

    def _go_on(self) -> Iterator[None]:
        """Bring what was said on its way to the end, in the smallest steps."""
        while True:
            self.talk()
            self.node.turn(self.world.now())
            yield
            shard = self.node.shards[SHARD]
            if self.node.pending.get(shard):
                self.node.send(shard)
                yield
                self.node.apply(self.node.commits[shard], self.world.now())
                yield
                self.node.answer(self.node.commits[shard])
            elif self.node.reads:
                read = self.node.reads[0]
                self.node.look(read, self.world.store.snapshot(), self.world.now().earliest)
                yield
                self.node.bring(read)
            elif any(stream.up or stream.down for stream in self.worker.streams.values()):
                continue
            else:
                return

    def talk(self) -> None:
        """Let worker and node hear each other."""
        for stream in self.worker.streams.values():
            while stream.up or stream.down:
                while stream.up:
                    stream.node.hear(stream, self.world.now())
                stream.node.turn(self.world.now())
                while stream.down:
                    self.worker.receive(stream, self.world.elapsed)

    def _with(self, key: TaskKey, act: Callable[[Held], None]) -> None:
        for held in [held for held in self.worker.held.values() if held.key == key]:
            act(held)

    def _start(self, held: Held) -> None:
        self.world.start(self.worker, held)
        self.worker.say_started(held, self.stream, self.world.elapsed)

    def _conclude(self, held: Held, kind: OutcomeKind) -> None:
        self.worker.conclude(held, kind, kind.encode())
        self.world.send_outcome(self.worker, held, self.stream)


def count_steps() -> int:
    return sum(1 for _ in Script.begin().steps())


def end_the_term(script: Script, end: str) -> None:
    """End the term of the first node, and begin one on the other."""
    world = script.world
    shard = script.node.shards[SHARD]
    commit = script.node.commits.get(shard)
    if end == "stale":
        world.take(world.nodes[1], SHARD)
        world.check()
        world.finish_takings()
        return
    if commit is not None:
        if end == "unknown, applied":
            script.node.apply(commit, world.now())
        script.node.lose(commit)
        if end == "unknown, applied late":
            script.node.apply(commit, world.now())
    world.take(world.nodes[1], SHARD)
    if commit is not None:
        script.node.apply(commit, world.now())
    world.check()
    world.finish_takings()


def test_the_scenario_goes_as_it_is_meant_to_without_a_takeover() -> None:
    script = Script.begin()
    for _ in script.steps():
        script.world.check()
    rows = script.world.store.rows
    assert {key: rows[key].progress.state for key in ALL} == {
        SUCCEEDS: TaskState.SUCCEEDED,
        RETRIED: TaskState.SUCCEEDED,
        PREVENTED: TaskState.CANCELLED,
        REQUESTED: TaskState.CANCELLED,
        RETURNED: TaskState.CANCELLED,
    }
    assert rows[RETRIED].progress.attempt_count == 2
    answers = [origin.answers[0] for origin in script.world.origins if origin.submission is None]
    results = [answer.result for answer in answers if isinstance(answer, Cancelled)]
    assert results == [CancelResult.PREVENTED, CancelResult.REQUESTED, CancelResult.PREVENTED]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("step", range(count_steps()))
def test_a_takeover_at_any_step_keeps_every_promise(step: int, end: str) -> None:
    script = Script.begin()
    for number, _ in enumerate(script.steps()):
        script.world.check()
        if number == step:
            break
    end_the_term(script, end)
    script.world.check()
    script.world.settle()
    rows = script.world.store.rows
    for origin in script.world.origins:
        (answer,) = origin.answers
        if origin.submission is not None and not isinstance(answer, Submitted):
            assert isinstance(answer, errors.OutcomeUncertain | errors.NoLeader)
            continue
        if isinstance(answer, Cancelled):
            assert rows[origin.key].progress.state in (TaskState.CANCELLED, TaskState.SUCCEEDED)
        assert origin.key in rows
    for row in rows.values():
        assert row.progress.attempts_used <= POLICY.max_attempts


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("step", range(0, count_steps(), 3))
def test_a_second_takeover_while_the_first_one_loads_keeps_every_promise(step: int, end: str) -> None:
    script = Script.begin()
    for number, _ in enumerate(script.steps()):
        if number == step:
            break
    world = script.world
    world.take(world.nodes[1], SHARD)
    world.load(world.takings[0])
    world.check()
    world.take(world.nodes[0], SHARD)
    world.finish_takings()
    world.check()
    if SHARD in script.node.shards:
        end_the_term(script, end)
    world.check()
    world.settle()
