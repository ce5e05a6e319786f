"""Heads and cursors against a store that is read late, in pieces, while it changes: nothing that is due is lost."""

import random
from dataclasses import replace

import pytest
from core.builders import LANE, START, a_lane, a_task

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.effects import LaneLoad
from duecourse.server.core.near import Near, due_key
from duecourse.server.core.task import DueKey, Lane, ShardId, Task, TaskKey

HEAD = 2
LANES = (LANE, a_lane("r"))
FAR: Micros = START + bounds.DAY


class NearWorld:
    """A shard's near tasks and a store, with loads under way."""

    def __init__(self, head: int = HEAD, horizon: Micros = FAR) -> None:
        self.near = Near(ShardId(0), horizon, head)
        self.head = head
        self.stored: dict[TaskKey, Task] = {}
        self.loads: list[LaneLoad] = []
        self.seen: list[tuple[LaneLoad, list[Task], bool]] = []
        """Loads that have looked at the store and not been brought."""
        self.buckets: list[tuple[Micros, Micros]] = []
        self.seen_buckets: list[tuple[list[Task], dict[Lane, DueKey]]] = []
        self.ready: list[Task] = []
        self.now = START
        self._sequence = 0

    def add(self, due_time: Micros, lane: Lane = LANE) -> Task:
        """Store a task, as an insert does; it is placed when `place` is called."""
        task = a_task(f"task {self._sequence}", due_time, self._sequence, lane)
        self._sequence += 1
        self.stored[task.key] = task
        return task

    def place(self, task: Task) -> None:
        self.near.place(task, self.ready, self.now)

    def end(self, task: Task) -> None:
        """Take a task and end it, as a grant and its outcome do."""
        del self.stored[task.key]
        self.near.take(task)

    def look(self, index: int) -> None:
        """Let a load see the store as it is now."""
        load = self.loads.pop(index)
        rows = [task for task in self._waiting(load.lane) if load.after < due_key(task)]
        rows = [task for task in rows if due_key(task).due_time < load.due_before]
        found = [self._reading(task) for task in rows[: load.limit]]
        self.seen.append((load, found, len(rows) < load.limit))

    def bring(self, index: int, fresh: frozenset[TaskKey] = frozenset()) -> None:
        """Bring what a load saw; of `fresh` tasks memory will know soon."""
        load, found, is_end = self.seen.pop(index)
        self.near.lane_loaded(load.lane, load.version, found, is_end, self._knows(fresh), self.ready, self.now)

    def look_at_bucket(self, index: int) -> None:
        due_from, due_before = self.buckets.pop(index)
        tasks: list[Task] = []
        cut: dict[Lane, DueKey] = {}
        for lane in LANES:
            rows = [task for task in self._waiting(lane) if due_from <= due_key(task).due_time < due_before]
            tasks += [self._reading(task) for task in rows[: self.head]]
            if len(rows) > self.head:
                cut[lane] = due_key(rows[self.head - 1])
        self.seen_buckets.append((tasks, cut))

    def bring_bucket(self, index: int, fresh: frozenset[TaskKey] = frozenset()) -> None:
        tasks, cut = self.seen_buckets.pop(index)
        for lane, key in cut.items():
            self.near.lower_cursor(lane, key)
        knows = self._knows(fresh)
        for task in tasks:
            if not knows(task):
                self.place(task)

    def advance_horizon(self, by: Micros) -> None:
        self.buckets.append((self.near.horizon, self.near.horizon + by))
        self.near.horizon += by

    def collect(self) -> None:
        self.near.collect_loads(self.loads)

    def load_all(self) -> None:
        """Let everything that is under way come to its end."""
        while self.loads or self.seen or self.buckets or self.seen_buckets:
            for _ in list(self.buckets):
                self.look_at_bucket(0)
            for _ in list(self.seen_buckets):
                self.bring_bucket(0)
            for _ in list(self.loads):
                self.look(0)
            for _ in list(self.seen):
                self.bring(0)
            self.collect()

    def check(self, unplaced: frozenset[TaskKey] = frozenset()) -> None:
        """Nothing is lost, memory is bounded, and the books agree."""
        for task in self.stored.values():
            key = due_key(task)
            head = self.near.heads.get(task.lane)
            is_beyond = key.due_time >= self.near.horizon or (
                head is not None and head.cursor is not None and key > head.cursor
            )
            is_under_way = any(begin <= key.due_time < end for begin, end in self.buckets) or any(
                task.key in {found.key for found in tasks} or self._is_cut(task, cut)
                for tasks, cut in self.seen_buckets
            )
            assert task.key in self.near.tasks or is_beyond or is_under_way or task.key in unplaced, (
                f"{task.task_id} is lost"
            )
        for head in self.near.heads.values():
            assert len(head.tasks) <= 2 * self.head
            assert head.tasks or head.cursor is not None
        assert sum(len(head.tasks) for head in self.near.heads.values()) == len(self.near.tasks)

    def _is_cut(self, task: Task, cut: dict[Lane, DueKey]) -> bool:
        return task.lane in cut and due_key(task) > cut[task.lane]

    def _knows(self, fresh: frozenset[TaskKey]) -> "Knows":
        return Knows(self, fresh)

    def _waiting(self, lane: Lane) -> list[Task]:
        return sorted((task for task in self.stored.values() if task.lane == lane), key=due_key)

    def _reading(self, task: Task) -> Task:
        return a_task(task.task_id, task.run_at, task.sequence, task.lane)


class Knows:
    """What the shard says of a loaded task."""

    def __init__(self, world: NearWorld, fresh: frozenset[TaskKey]) -> None:
        self._world = world
        self._fresh = fresh

    def __call__(self, task: Task) -> bool:
        # What ended since the load looked is refused later by its revision; the model leaves it away at once.
        return task.key in self._fresh or task.key in self._world.near.tasks or task.key not in self._world.stored


def a_world_with_a_rest(count: int = 10) -> NearWorld:
    """Return a world whose only lane has more tasks than memory takes."""
    world = NearWorld()
    for number in range(count):
        world.place(world.add(START + number))
        world.check()
    return world


def test_a_head_that_overflows_keeps_its_first_tasks() -> None:
    world = a_world_with_a_rest()
    assert len(world.near.tasks) <= 2 * HEAD
    assert {task.sequence for task in world.near.tasks.values()} == {0, 1}
    assert world.near.heads[LANE].cursor == DueKey(START + 1, 1)


def test_a_head_that_runs_low_is_refilled_in_order() -> None:
    world = a_world_with_a_rest(20)
    served = []
    while world.near.tasks:
        first = min(world.near.tasks.values(), key=due_key)
        served.append(first.sequence)
        world.end(first)
        world.collect()
        world.load_all()
        world.check()
    assert served == list(range(20))
    assert not world.near.heads, "an empty lane leaves nothing"


def test_tasks_become_ready_when_they_are_due_and_not_before() -> None:
    world = NearWorld(head=100)
    for number in range(50):
        world.place(world.add(START + 10 * (50 - number)))
    for step in range(60):
        world.now = START + 10 * step
        world.near.collect_due(world.now, world.ready)
        assert all(task.run_at <= world.now for task in world.ready)
        assert {task.run_at for task in world.ready} == {
            due for task in world.stored.values() if (due := task.run_at) <= world.now
        }
    assert len(world.ready) == len(set(world.ready)) == 50
    assert world.near.next_due() is None


def test_a_task_that_was_cut_and_loaded_again_becomes_ready_once() -> None:
    world = a_world_with_a_rest(8)
    world.ready.clear()
    for first in sorted(world.near.tasks.values(), key=due_key):
        world.end(first)
    world.collect()
    world.load_all()
    world.now = START + 100
    world.near.collect_due(world.now, world.ready)
    again = [task for task in world.ready if task.is_ready]
    assert sorted(task.sequence for task in again) == [2, 3]


def test_a_task_that_is_placed_while_its_lane_is_read_is_not_jumped_over() -> None:
    world = a_world_with_a_rest(4)
    world.place(world.add(START + 50))
    for first in list(world.near.tasks.values()):
        world.end(first)
    world.collect()
    world.look(0)
    late = world.add(START + 10)
    world.place(late)
    assert late.key not in world.near.tasks
    world.bring(0)
    world.check()
    world.load_all()
    world.check()


def test_a_cursor_that_moved_back_outdates_a_read_that_runs() -> None:
    world = a_world_with_a_rest(6)
    for first in list(world.near.tasks.values()):
        world.end(first)
    world.collect()
    world.look(0)
    world.near.lower_cursor(LANE, DueKey(START, 0))
    world.bring(0)
    world.check()
    world.load_all()
    world.check()


def a_world_at_its_last_read(horizon: Micros = FAR) -> NearWorld:
    """Return a world whose lane has nothing in memory, one task in the store, and the read that finds it under way."""
    world = NearWorld(horizon=horizon)
    for number in range(5):
        world.place(world.add(START + number))
    for _ in range(2):
        world.load_all()
        for task in list(world.near.tasks.values()):
            world.end(task)
        world.collect()
    assert len(world.stored) == len(world.loads) == 1
    return world


def test_a_read_for_a_head_that_is_gone_is_not_taken_for_the_next_heads() -> None:
    world = a_world_at_its_last_read()
    world.look(0)
    late = world.seen.pop()
    world.near.lower_cursor(LANE, DueKey(START, 0))
    world.collect()
    world.load_all()
    for task in list(world.near.tasks.values()):
        world.end(task)
    assert not world.near.heads
    for number in range(30):
        world.place(world.add(START + 100 + number))
    for _ in range(10):
        for task in list(world.near.tasks.values()):
            world.end(task)
        world.collect()
        world.seen.append(late)
        world.bring(0)
        world.check()
        world.load_all()


def test_a_cut_bucket_keeps_a_read_that_runs_from_calling_the_lane_complete() -> None:
    world = a_world_at_its_last_read(horizon=START + 100)
    far = [world.add(START + 150 + number) for number in range(5)]
    world.advance_horizon(100)
    world.look_at_bucket(0)
    # What the bucket brought of the lane is just being written, so that the cut alone tells of the rest.
    fresh = frozenset(task.key for task in far[:HEAD])
    world.bring_bucket(0, fresh)
    world.look(0)
    world.bring(0)
    world.check(fresh)


def test_an_outdated_reading_makes_way_for_a_newer_one() -> None:
    world = NearWorld()
    old = world.add(START + 5)
    world.place(old)
    new = a_task(old.task_id, START + 9, 7)
    new.progress = replace(new.progress, revision=3)
    world.place(new)
    assert world.near.tasks == {new.key: new}
    assert world.near.heads[LANE].tasks == {new}
    world.now = START + 10
    world.near.collect_due(world.now, world.ready)
    assert world.ready == [new]


def test_tasks_beyond_the_horizon_stay_in_the_store() -> None:
    world = NearWorld(horizon=START + 10)
    world.place(world.add(START + 10))
    assert not world.near.tasks
    assert not world.near.heads
    world.advance_horizon(10)
    world.load_all()
    assert len(world.near.tasks) == 1


def test_the_due_heap_stays_in_proportion_though_tasks_are_taken_all_the_time() -> None:
    world = NearWorld(head=10_000)
    for number in range(20_000):
        task = world.add(START + bounds.HOUR + number)
        world.place(task)
        world.end(task)
    assert len(world.near._due) < 3_000


def test_clearing_leaves_nothing_ready() -> None:
    world = NearWorld(head=100)
    for number in range(20):
        world.place(world.add(START - number))
    world.near.clear()
    assert not any(task.is_ready for task in world.ready)


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_lost_whatever_the_order(seed: int) -> None:
    rng = random.Random(seed)
    world = NearWorld(head=rng.choice((1, 2, 3)), horizon=START + 40)
    unplaced: list[Task] = []
    for _ in range(400):
        match rng.randrange(10):
            case 0 | 1:
                unplaced.append(world.add(world.now + rng.randrange(-20, 100), rng.choice(LANES)))
            case 2 | 3 if unplaced:
                world.place(unplaced.pop(rng.randrange(len(unplaced))))
            case 4 if world.near.tasks:
                world.end(rng.choice(sorted(world.near.tasks.values(), key=due_key)))
            case 5 if world.loads:
                world.look(rng.randrange(len(world.loads)))
            case 6 if world.seen:
                world.bring(rng.randrange(len(world.seen)), frozenset(task.key for task in unplaced))
            case 7 if world.buckets:
                world.look_at_bucket(rng.randrange(len(world.buckets)))
            case 8 if world.seen_buckets:
                world.bring_bucket(rng.randrange(len(world.seen_buckets)), frozenset(task.key for task in unplaced))
            case 9:
                world.now += rng.randrange(5)
                if rng.random() < 0.3:
                    world.advance_horizon(10)
                world.near.collect_due(world.now, world.ready)
        world.collect()
        world.check(frozenset(task.key for task in unplaced))
    for task in unplaced:
        world.place(task)
    _drain(world)


def _drain(world: NearWorld) -> None:
    """Serve what is ready until nothing is left, in memory and in the store."""
    world.advance_horizon(1_000)
    world.now += 1_000
    for _ in range(2 * len(world.stored) + 10):
        world.load_all()
        world.near.collect_due(world.now, world.ready)
        for task in [task for task in world.ready if task.is_ready]:
            world.end(task)
        world.ready.clear()
        world.collect()
    assert not world.stored
    assert not world.near.tasks
    assert not world.near.heads


def test_heads_that_are_limited_keep_their_first_tasks_and_lose_none() -> None:
    world = NearWorld(head=8)
    tasks = [world.add(START + n) for n in range(16)]
    for task in reversed(tasks):
        world.place(task)
    assert len(world.near.tasks) == 16

    world.near.limit_heads(2)

    assert sorted(due_key(task) for task in world.near.tasks.values()) == [due_key(task) for task in tasks[:2]]
    assert world.near.heads[LANE].cursor == due_key(tasks[1])
    assert not world.near.is_complete_up_to(tasks[2])
