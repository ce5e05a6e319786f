"""The core against everything that can happen around it, in any order: Hypothesis looks for an order that breaks it.

Two ways of looking: Hypothesis, which finds the shortest order that breaks something; and random walks, which take
likely steps more often and so go deeper. `DUECOURSE_LONG=1` looks for long, at random; without it the same orders are
tried each time, in seconds.
"""

import inspect
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from core.builders import START, a_lane, a_submission
from core.model_node import Commit, Node, Read, shard_of
from core.model_worker import Held, Stream, Up, Worker
from core.world import SHARDS, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.events import OutcomeKind
from duecourse.server.core.task import TERMINAL, Policy, TaskKey

_T = TypeVar("_T")

IDS = ("a", "b", "c", "d", "e", "f", "x", "y", "z")
LANES = (a_lane(), a_lane(), a_lane("r"), a_lane(priority=5, fairness_key="k"))
POLICIES = (
    Policy(),
    Policy(),
    Policy(max_attempts=1),
    Policy(max_attempts=2, attempt_timeout=2 * bounds.SECOND, initial_backoff=bounds.MIN_BACKOFF),
    Policy(max_attempts=3, initial_backoff=bounds.MIN_BACKOFF, max_backoff=bounds.MIN_BACKOFF, fail_when_lost=True),
    Policy(start_deadline=START + 10 * bounds.SECOND, completion_deadline=START + 40 * bounds.SECOND),
)
DELAYS: tuple[Micros, ...] = (0, 0, bounds.MILLISECOND, bounds.SECOND, 12 * bounds.SECOND, 25 * bounds.SECOND)
PASSING: tuple[Micros, ...] = (
    bounds.MILLISECOND,
    700 * bounds.MILLISECOND,
    3 * bounds.SECOND,
    11 * bounds.SECOND,
    31 * bounds.SECOND,
)
ENDS = (
    OutcomeKind.SUCCEEDED,
    OutcomeKind.RETRYABLE,
    OutcomeKind.RETRYABLE,
    OutcomeKind.NON_RETRYABLE,
    OutcomeKind.TIMED_OUT,
    OutcomeKind.CANCELLED,
)

picks = st.integers(0, 11)
flags = st.booleans()


def _pick(items: Sequence[_T], pick: int) -> _T | None:
    return items[pick % len(items)] if items else None


class ShardMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    # Clients.

    @rule(node=picks, ids=st.lists(st.sampled_from(IDS), min_size=1, max_size=6), lane=picks, policy=picks, delay=picks)
    def submit(self, node: int, ids: list[str], lane: int, policy: int, delay: int) -> None:
        for task_id in ids:
            submission = a_submission(
                task_id,
                delay=DELAYS[delay % len(DELAYS)],
                lane=LANES[lane % len(LANES)],
                policy=POLICIES[policy % len(POLICIES)],
                shard=shard_of(TaskKey("default", task_id)),
                uid=f"{task_id} {len(self.world.origins)}".encode(),
                fingerprint=f"{lane % 2}".encode(),
            )
            self.world.submit(self._node(node), submission)

    @rule(node=picks, task_id=st.sampled_from(IDS), wait=picks, request_id=st.sampled_from(("", "", "one", "two")))
    def cancel(self, node: int, task_id: str, wait: int, request_id: str) -> None:
        key = TaskKey("default", task_id)
        self.world.cancel(self._node(node), key, (0, bounds.SECOND)[wait % 2], request_id)

    @rule(pick=picks)
    def purge(self, pick: int) -> None:
        ended = [key for key, row in self.world.store.rows.items() if row.progress.state in TERMINAL]
        key = _pick([key for key in ended if self.world.is_at_rest(key)], pick)
        if key is not None:
            self.world.forget(key)

    # Nodes.

    @rule(node=picks)
    def turn(self, node: int) -> None:
        self._node(node).turn(self.world.now())

    @rule(node=picks, pick=picks)
    def send(self, node: int, pick: int) -> None:
        shard = _pick(list(self._node(node).shards.values()), pick)
        if shard is not None:
            self._node(node).send(shard)

    @rule(pick=picks)
    def apply(self, pick: int) -> None:
        found = _pick([entry for entry in self._commits() if not entry[1].is_sent], pick)
        if found is not None:
            found[0].apply(found[1], self.world.now())

    @rule(pick=picks)
    def apply_late(self, pick: int) -> None:
        lost = [(node, commit) for node in self.world.nodes for commit in node.lost_commits if not commit.is_sent]
        found = _pick(lost, pick)
        if found is not None:
            found[0].apply(found[1], self.world.now())

    @rule(pick=picks, now=flags)
    def answer(self, pick: int, now: bool) -> None:
        found = _pick([entry for entry in self._commits() if entry[1].is_sent], pick)
        if found is not None:
            found[0].answer(found[1])
            if now:
                found[0].turn(self.world.now())

    @rule(pick=picks)
    def lose(self, pick: int) -> None:
        found = _pick(self._commits(), pick)
        if found is not None:
            found[0].lose(found[1])

    @rule(pick=picks, culprit=picks)
    def refuse(self, pick: int, culprit: int) -> None:
        found = _pick([entry for entry in self._commits() if not entry[1].is_sent and entry[1].writes], pick)
        if found is not None:
            found[0].refuse(found[1], culprit)

    @rule(node=picks, number=picks)
    def take(self, node: int, number: int) -> None:
        self.world.take(self._node(node), SHARDS[number % 2])

    @rule(pick=picks)
    def take_again(self, pick: int) -> None:
        found = _pick([(node, number) for node in self.world.nodes for number in node.ended], pick)
        if found is not None:
            self.world.take(*found)

    @rule(pick=picks)
    def load(self, pick: int) -> None:
        taking = _pick(self.world.takings, pick)
        if taking is not None:
            self.world.load(taking)

    @rule(node=picks)
    def check_terms(self, node: int) -> None:
        self._node(node).check()
        self._node(node).beat()

    @rule(pick=picks)
    def look(self, pick: int) -> None:
        found = _pick([entry for entry in self._reads() if entry[1].event is None], pick)
        if found is not None:
            found[0].look(found[1], self.world.store.snapshot(), self.world.now().earliest)

    @rule(pick=picks, now=flags)
    def bring(self, pick: int, now: bool) -> None:
        found = _pick([entry for entry in self._reads() if entry[1].event is not None], pick)
        if found is not None:
            found[0].bring(found[1])
            if now:
                found[0].turn(self.world.now())

    @rule(node=picks)
    def audit(self, node: int) -> None:
        for shard in self._node(node).shards.values():
            self._node(node).reads.append(Read(shard, None))

    @rule(node=picks)
    def flow(self, node: int) -> None:
        """Let everything that a node does go on for a step, without a fault."""
        self.world.run_node(self._node(node))
        for stream in self.world.streams():
            while stream.down:
                stream.worker.receive(stream, self.world.elapsed)

    # Workers.

    @rule()
    def add_worker(self) -> None:
        if len(self.world.workers) < 3:
            worker = self.world.add_worker()
            for node in self.world.nodes:
                self.world.open(worker, node).say(Up("credit", credit=3), self.world.elapsed)

    @rule(pick=picks, node=picks)
    def open(self, pick: int, node: int) -> None:
        worker = _pick(self.world.workers, pick)
        if worker is not None:
            self.world.open(worker, self._node(node))

    @rule(pick=picks, credit=st.integers(-4, 4))
    def credit(self, pick: int, credit: int) -> None:
        stream = _pick(self.world.streams(), pick)
        if stream is not None:
            stream.say(Up("credit", credit=credit), self.world.elapsed)

    @rule(pick=picks, count=st.integers(1, 4), now=flags)
    def hear(self, pick: int, count: int, now: bool) -> None:
        stream = _pick([stream for stream in self.world.streams() if stream.up], pick)
        if stream is not None:
            for _ in range(min(count, len(stream.up))):
                stream.node.hear(stream, self.world.now())
            if now:
                stream.node.turn(self.world.now())

    @rule(pick=picks, count=st.integers(1, 4))
    def receive(self, pick: int, count: int) -> None:
        stream = _pick([stream for stream in self.world.streams() if stream.down], pick)
        if stream is not None:
            for _ in range(min(count, len(stream.down))):
                stream.worker.receive(stream, self.world.elapsed)

    @rule(pick=picks, told=flags)
    def start(self, pick: int, told: bool) -> None:
        elapsed = self.world.elapsed
        found = _pick([entry for entry in self._held() if entry[0].may_start(entry[1], elapsed)], pick)
        if found is not None:
            self.world.start(*found)
            if told:
                self._say_started(found[0], found[1], pick)

    @rule(pick=picks, stream=picks)
    def say_started(self, pick: int, stream: int) -> None:
        found = _pick([entry for entry in self._held() if entry[1].has_started], pick)
        if found is not None:
            self._say_started(found[0], found[1], stream)

    @rule(pick=picks, kind=picks)
    def finish(self, pick: int, kind: int) -> None:
        found = _pick([entry for entry in self._held() if entry[1].has_started and entry[1].outcome is None], pick)
        if found is not None:
            end = ENDS[kind % len(ENDS)]
            found[0].conclude(found[1], end, end.encode())

    @rule(pick=picks)
    def give_back(self, pick: int) -> None:
        found = _pick([entry for entry in self._held() if not entry[1].has_started and entry[1].outcome is None], pick)
        if found is not None:
            found[0].conclude(found[1], OutcomeKind.RETURNED, b"returned")

    @rule(pick=picks, stream=picks, retry_after=st.sampled_from((None, 0, bounds.SECOND)))
    def send_outcome(self, pick: int, stream: int, retry_after: Micros | None) -> None:
        found = _pick([entry for entry in self._held() if entry[1].outcome is not None], pick)
        if found is not None:
            on = _pick([stream for stream in found[0].streams.values() if stream.is_usable], stream)
            if on is not None:
                self.world.send_outcome(found[0], found[1], on, retry_after)

    @rule(pick=picks)
    def beat(self, pick: int) -> None:
        stream = _pick(self.world.streams(), pick)
        if stream is not None:
            stream.worker.beat(stream, self.world.elapsed)

    @rule(pick=picks, known=flags)
    def close(self, pick: int, known: bool) -> None:
        stream = _pick([stream for stream in self.world.streams() if stream.is_joined], pick)
        if stream is not None:
            stream.node.close(stream, is_unsent_known=known)

    @rule(pick=picks)
    def crash(self, pick: int) -> None:
        worker = _pick(self.world.workers, pick)
        if worker is not None:
            self.world.crash(worker)

    @rule(pick=picks, lie=picks)
    def lie(self, pick: int, lie: int) -> None:
        """Let a worker's library be at fault."""
        found = _pick(self._held(), pick)
        if found is not None:
            self.world.lie(found[0], found[1], lie % 4)

    # Time.

    @rule(passing=picks)
    def advance(self, passing: int) -> None:
        self.world.advance(PASSING[passing % len(PASSING)])

    @rule(passing=picks)
    def freeze(self, passing: int) -> None:
        self.world.freeze(PASSING[passing % len(PASSING)])

    @invariant()
    def it_holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.settle()

    # Helpers.

    def _node(self, pick: int) -> Node:
        # One node leads most of the time.
        return self.world.nodes[pick // 8]

    def _commits(self) -> list[tuple[Node, Commit]]:
        return [(node, commit) for node in self.world.nodes for commit in node.commits.values()]

    def _reads(self) -> list[tuple[Node, Read]]:
        return [(node, read) for node in self.world.nodes for read in node.reads]

    def _held(self) -> list[tuple[Worker, Held]]:
        return [(worker, held) for worker in self.world.workers for held in worker.held.values()]

    def _say_started(self, worker: Worker, held: Held, pick: int) -> None:
        stream: Stream | None = _pick([stream for stream in worker.streams.values() if stream.is_usable], pick)
        if stream is not None:
            worker.say_started(held, stream, self.world.elapsed)


_is_long = bool(os.environ.get("DUECOURSE_LONG"))
pytestmark = pytest.mark.timeout(0 if _is_long else 120)

TestShardMachine = ShardMachine.TestCase
TestShardMachine.settings = settings(
    max_examples=4_000 if _is_long else 100,
    stateful_step_count=120 if _is_long else 50,
    derandomize=not _is_long,
    database=None,
    suppress_health_check=list(HealthCheck),
)

WEIGHTS = {
    "submit": 3.0,
    "cancel": 2.0,
    "purge": 0.5,
    "turn": 2.0,
    "send": 3.0,
    "apply": 3.0,
    "apply_late": 1.0,
    "answer": 3.0,
    "lose": 0.3,
    "refuse": 0.3,
    "take": 0.3,
    "take_again": 1.0,
    "load": 2.0,
    "check_terms": 1.0,
    "look": 2.0,
    "bring": 2.0,
    "audit": 0.5,
    "flow": 2.0,
    "add_worker": 1.0,
    "open": 0.5,
    "credit": 1.5,
    "hear": 3.0,
    "receive": 3.0,
    "start": 2.0,
    "say_started": 0.5,
    "finish": 2.0,
    "give_back": 1.0,
    "send_outcome": 2.0,
    "beat": 1.5,
    "close": 0.5,
    "crash": 0.2,
    "lie": 0.3,
    "advance": 2.0,
    "freeze": 0.3,
}
DRAWS: dict[str, Callable[[random.Random], Any]] = {
    "ids": lambda rng: [rng.choice(IDS) for _ in range(rng.randint(1, 6))],
    "task_id": lambda rng: rng.choice(IDS),
    "request_id": lambda rng: rng.choice(("", "", "one", "two")),
    "retry_after": lambda rng: rng.choice((None, 0, bounds.SECOND)),
    "credit": lambda rng: rng.randint(-4, 4),
    "count": lambda rng: rng.randint(1, 4),
    "now": lambda rng: rng.random() < 0.5,
    "told": lambda rng: rng.random() < 0.5,
    "known": lambda rng: rng.random() < 0.5,
}


def _any_pick(rng: random.Random) -> int:
    return rng.randrange(12)


def walk(seed: int, steps: int) -> None:
    """Take steps at random; the seed names the walk."""
    rng = random.Random(seed)
    machine = ShardMachine()
    for name in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=steps):
        step = getattr(machine, name)
        arguments = list(inspect.signature(getattr(ShardMachine, name)).parameters)[1:]
        step(**{argument: DRAWS.get(argument, _any_pick)(rng) for argument in arguments})
        machine.it_holds()
    machine.teardown()


@pytest.mark.parametrize("first", range(0, 40_000 if _is_long else 960, 40))
def test_forty_random_walks_keep_every_promise(first: int) -> None:
    for seed in range(first, first + 40):
        try:
            walk(seed, 120)
        except Exception as error:
            error.add_note(f"walk({seed}, 120)")
            raise
