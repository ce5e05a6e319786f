"""Who gets what: order, fair shares, credit, and that nothing is left behind."""

import itertools
import random
from collections import Counter
from collections.abc import Iterable

import pytest
from core.builders import LANE, START, a_holder, a_lane, a_task

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core import demand
from duecourse.server.core import matcher as matching
from duecourse.server.core.lease import Holder
from duecourse.server.core.matcher import Matcher
from duecourse.server.core.ready import AGEING
from duecourse.server.core.task import Lane, Task

_numbers = itertools.count()


def ready(lane: Lane = LANE, due_time: Micros = START, sequence: int | None = None, shard: int = 0) -> Task:
    number = next(_numbers)
    task = a_task(f"task {number}", due_time, number if sequence is None else sequence, lane, shard=shard)
    task.is_ready = True
    return task


def many(count: int, lane: Lane = LANE) -> list[Task]:
    return [ready(lane) for _ in range(count)]


def a_matcher(credit: int = 1_000_000, queues: Iterable[str] = ("q",), types: Iterable[str] = ("t",)) -> Matcher:
    matcher = Matcher()
    subscribe(matcher, 1, credit, queues, types)
    return matcher


def subscribe(
    matcher: Matcher, stream_id: int, credit: int, queues: Iterable[str] = ("q",), types: Iterable[str] = ("t",)
) -> Holder:
    holder = a_holder(stream_id)
    matcher.subscribe(holder, frozenset(queues), frozenset(types))
    while credit > 0:
        matcher.add_credit(holder, min(credit, bounds.MAX_CREDIT), {})
        credit -= bounds.MAX_CREDIT
    return holder


def take(matcher: Matcher, limit: int, now: Micros = START) -> list[Task]:
    """Match so many, as the loop does: a task that is matched is taken out of its shard."""
    tasks = [task for task, _ in matcher.match(now, limit)]
    for task in tasks:
        assert task.is_ready
        task.is_ready = False
    return tasks


def is_bare(matcher: Matcher) -> bool:
    return not matcher._queues


def test_the_earlier_due_goes_first_whatever_shard_it_is_in_and_whenever_it_came() -> None:
    matcher = a_matcher()
    tasks = [ready(due_time=START - 10 * number, sequence=number, shard=number % 3) for number in range(50)]
    random.Random(1).shuffle(tasks)
    matcher.add(tasks[:20])
    matcher.add(tasks[20:])
    assert take(matcher, 100) == sorted(tasks, key=lambda task: task.run_at)


def test_equal_due_times_go_in_the_order_of_acceptance() -> None:
    matcher = a_matcher()
    tasks = [ready(sequence=number) for number in range(20)]
    matcher.add(list(reversed(tasks)))
    assert take(matcher, 100) == tasks


def test_two_readings_of_one_task_can_wait_at_once() -> None:
    matcher = a_matcher()
    old, new = a_task(), a_task()
    old.is_ready = new.is_ready = True
    matcher.add([old])
    matcher.add([new])
    old.is_ready = False
    assert take(matcher, 10) == [new]


def test_fairness_keys_share_alike_over_any_window() -> None:
    matcher = a_matcher()
    for key, count in (("a", 900), ("b", 300), ("c", 100)):
        matcher.add(many(count, a_lane(fairness_key=key)))
    keys = [task.lane.fairness_key for _ in range(30) for task in take(matcher, 10)]
    for begin in range(0, 300, 7):
        for end in range(begin, 300, 11):
            served = Counter({"a": 0, "b": 0, "c": 0}) + Counter(keys[begin:end])
            assert max(served.values(), default=0) - min((served[key] for key in "abc"), default=0) <= 1


def test_a_key_that_was_idle_does_not_save_up() -> None:
    matcher = a_matcher()
    matcher.add([ready(a_lane(fairness_key="late"))])
    matcher.add(many(1_000, a_lane(fairness_key="busy")))
    take(matcher, 500)
    matcher.add(many(100, a_lane(fairness_key="late")))
    served = Counter(task.lane.fairness_key for task in take(matcher, 20))
    assert abs(served["late"] - served["busy"]) <= 1


def test_ever_new_keys_do_not_put_off_an_old_one() -> None:
    matcher = a_matcher()
    matcher.add(many(50, a_lane(fairness_key="old")))
    take(matcher, 1)
    served: Counter[bool] = Counter()
    for number in range(200):
        matcher.add([ready(a_lane(fairness_key=f"new {number}.{more}")) for more in range(2)])
        served.update(task.lane.fairness_key == "old" for task in take(matcher, 1))
    assert served[True] >= 2, "a round of all keys serves it once, and there are ever more of them"


def test_queues_share_alike_and_an_idle_one_does_not_save_up() -> None:
    matcher = a_matcher(queues=("q", "r"))
    matcher.add(many(500, a_lane("q")))
    take(matcher, 300)
    matcher.add(many(100, a_lane("r")))
    queues = [task.lane.queue for task in take(matcher, 100)]
    for end in range(100):
        served = Counter(queues[:end])
        assert abs(served["q"] - served["r"]) <= 1


def test_a_queue_that_only_others_take_is_left_alone() -> None:
    matcher = a_matcher(queues=("q",))
    matcher.add(many(3, a_lane("r")))
    assert take(matcher, 10) == []
    subscribe(matcher, 2, 10, queues=("r",))
    assert len(take(matcher, 10)) == 3


def test_the_higher_priority_goes_first_until_the_lower_one_has_aged() -> None:
    matcher = a_matcher()
    low = ready(a_lane(priority=0))
    high = [ready(a_lane(priority=2), due_time=START + second * bounds.SECOND) for second in range(200)]
    matcher.add([low])
    served: list[Task] = []
    for second in range(200):
        matcher.add([high[second]])
        served += take(matcher, 1, START + second * bounds.SECOND)
        if low in served:
            break
    waited = second * bounds.SECOND
    assert 2 * AGEING - bounds.SECOND <= waited <= 2 * AGEING + bounds.SECOND


@pytest.mark.parametrize("seed", range(20))
def test_a_priority_is_as_old_as_its_oldest_task_that_still_waits(seed: int) -> None:
    source = random.Random(seed)
    matcher = a_matcher()
    now = START
    waiting: set[Task] = set()
    for _ in range(200):
        now += a_pause(source)
        lanes = [
            a_lane(priority=source.choice((0, 5)), fairness_key=source.choice("abc"))
            for _ in range(source.randrange(3))
        ]
        added = [ready(lane, now - source.randrange(300 * bounds.SECOND)) for lane in lanes]
        matcher.add(added)
        waiting.update(added)
        if waiting:
            source.choice(sorted(waiting, key=lambda task: task.task_id)).is_ready = source.random() < 0.8
        waiting = {task for task in waiting if task.is_ready}
        for task in take(matcher, 1, now):
            oldest = {other.lane.priority: now for other in waiting}
            for other in waiting:
                due_time = other.progress.due_time
                assert due_time is not None
                oldest[other.lane.priority] = min(oldest[other.lane.priority], due_time)
            urgency = {priority: priority + (now - due_time) / AGEING for priority, due_time in oldest.items()}
            assert urgency[task.lane.priority] == max(urgency.values())
            waiting.discard(task)


def a_pause(source: random.Random) -> Micros:
    """Longer than the order of a queue's priorities stands."""
    return source.randrange(bounds.SECOND, 20 * bounds.SECOND)


def test_a_task_that_nobody_takes_does_not_age_its_priority() -> None:
    matcher = a_matcher()
    matcher.add([ready(a_lane(task_type="unknown"), due_time=START - bounds.DAY), ready(a_lane(priority=0))])
    urgent = ready(a_lane(priority=1))
    matcher.add([urgent])
    assert take(matcher, 1) == [urgent]


def test_an_urgent_task_is_served_at_once_though_the_order_of_priorities_stands_for_a_while() -> None:
    matcher = a_matcher()
    matcher.add(many(10, a_lane(priority=0)) + many(2, a_lane(priority=1)))
    take(matcher, 3)
    newly = ready(a_lane(priority=1))
    other = ready(a_lane(priority=9))
    matcher.add([newly])
    assert take(matcher, 1) == [newly]
    matcher.add([other])
    assert take(matcher, 1) == [other]


def test_a_worker_gets_only_the_types_that_it_has_handlers_for() -> None:
    matcher = a_matcher(types=("t", "u"))
    wanted = [*many(3, a_lane(task_type="t")), *many(3, a_lane(task_type="u"))]
    matcher.add([*many(5, a_lane(task_type="other")), *wanted])
    assert sorted(task.task_id for task in take(matcher, 100)) == sorted(task.task_id for task in wanted)


def test_due_order_holds_between_the_types_of_a_key() -> None:
    matcher = a_matcher(types=("t", "u"))
    tasks = [ready(a_lane(task_type="tu"[number % 2]), START - 100 + number) for number in range(40)]
    matcher.add(tasks[::-1])
    assert take(matcher, 100) == tasks


def test_credit_of_a_type_limits_that_type_alone() -> None:
    matcher = Matcher()
    holder = a_holder()
    matcher.subscribe(holder, frozenset("q"), frozenset(("t", "u")))
    matcher.add_credit(holder, 10, {"t": 2})
    matcher.add([*many(5, a_lane(task_type="t")), *many(5, a_lane(task_type="u"))])
    served = Counter(task.lane.task_type for _ in range(5) for task in take(matcher, 100))
    assert served == {"t": 2, "u": 5}
    matcher.unmatched(a_lane(task_type="t"), holder)
    assert [task.lane.task_type for task in take(matcher, 100)] == ["t"]
    assert take(matcher, 100) == []


def test_work_spreads_over_streams_by_their_credit() -> None:
    matcher = Matcher()
    for stream_id in range(1, 5):
        subscribe(matcher, stream_id, 100)
    matcher.add(many(40))
    assert Counter(holder.stream_id for _, holder in matcher.match(START, 40)) == {1: 10, 2: 10, 3: 10, 4: 10}


def test_no_stream_gets_more_than_its_credit() -> None:
    matcher = Matcher()
    given = {1: 3, 2: 0, 3: 11}
    for stream_id, credit in given.items():
        subscribe(matcher, stream_id, credit)
    matcher.add(many(100))
    assert Counter(holder.stream_id for _, holder in matcher.match(START, 100)) == {1: 3, 3: 11}
    assert matcher.credits() == 0


def test_withdrawn_credit_is_returned_as_far_as_it_is_unused() -> None:
    matcher = Matcher()
    holder = subscribe(matcher, 1, 5)
    matcher.add(many(3))
    assert len(take(matcher, 10)) == 3
    assert matcher.add_credit(holder, -4, {}) == 2
    assert matcher.credits() == 0


def test_a_stream_that_ended_gets_nothing_and_its_unmatched_grants_are_forgotten() -> None:
    matcher = Matcher()
    holder = subscribe(matcher, 1, 5)
    matcher.unsubscribe(holder)
    matcher.unsubscribe(holder)
    matcher.unmatched(a_lane(), holder)
    assert matcher.add_credit(holder, 5, {}) == 0
    matcher.add(many(3))
    assert take(matcher, 10) == []
    assert not matcher._pools


def test_two_pools_of_one_queue_are_both_served() -> None:
    matcher = Matcher()
    subscribe(matcher, 1, 100, types=("t",))
    subscribe(matcher, 2, 100, types=("t", "u"))
    served: Counter[int] = Counter()
    for _ in range(20):
        matcher.add(many(5))
        served.update(holder.stream_id for _, holder in matcher.match(START, 5))
    assert served == {1: 50, 2: 50}


def test_the_limit_of_a_turn_is_kept() -> None:
    matcher = a_matcher()
    subscribe(matcher, 2, 100, types=("t", "u"))
    matcher.add(many(100))
    assert len(take(matcher, 7)) == 7


@pytest.mark.parametrize("priorities", [1, 3])
def test_nothing_is_left_of_thousands_of_keys_that_were_served(priorities: int) -> None:
    matcher = a_matcher(queues=[f"q{number}" for number in range(10)])
    for turn in range(5):
        lanes = [
            a_lane(f"q{number % 10}", priority=number % priorities, fairness_key=f"{turn} {number}")
            for number in range(2_000)
        ]
        matcher.add([ready(lane) for lane in lanes])
        while take(matcher, 500, START + turn * bounds.SECOND):
            pass
        assert is_bare(matcher)


def test_what_is_no_longer_ready_does_not_pile_up_though_no_worker_comes() -> None:
    matcher = Matcher()
    live = many(100)
    matcher.add(live)
    for number in range(50):
        cancelled = [ready(a_lane(fairness_key=f"{number} {more}")) for more in range(1_000)]
        matcher.add(cancelled)
        for task in cancelled:
            task.is_ready = False
    queue = matcher._queues["default", "q"]
    entries = sum(
        len(line.heap)
        for level in queue._levels.values()
        for share in level.shares.values()
        for line in share.lines.values()
    )
    assert entries <= 2 * (len(live) + matching._SLACK)
    subscribe(matcher, 1, 1_000)
    assert sorted(task.sequence for task in take(matcher, 1_000)) == [task.sequence for task in live]


def test_an_order_of_many_random_steps_serves_everything_once() -> None:
    rng = random.Random(7)
    matcher = Matcher()
    holders = [subscribe(matcher, 1, 0, ("q", "r"), ("t", "u")), subscribe(matcher, 2, 0, ("q",), ("t",))]
    waiting: set[Task] = set()
    now = START
    for _ in range(2_000):
        now += rng.randrange(bounds.SECOND)
        lane = a_lane(rng.choice("qr"), rng.choice("tu"), rng.randrange(3), rng.choice("abc"))
        new = [ready(lane, now - rng.randrange(bounds.SECOND)) for _ in range(rng.randrange(4))]
        matcher.add(new)
        waiting.update(new)
        if rng.random() < 0.2 and waiting:
            gone = rng.choice(sorted(waiting, key=lambda task: task.sequence))
            gone.is_ready = False
            waiting.discard(gone)
        matcher.add_credit(rng.choice(holders), rng.randrange(-2, 4), {})
        for task, holder in matcher.match(now, rng.randrange(1, 5)):
            assert task in waiting
            assert holder.stream_id == 1 or (task.lane.queue == "q" and task.lane.task_type == "t")
            waiting.discard(task)
            task.is_ready = False
    matcher.add_credit(holders[0], 20_000, {})
    assert set(take(matcher, 20_000, now)) == waiting
    assert is_bare(matcher) or not take(matcher, 1)


class TestDemand:
    """What waits for lack of credit."""

    def test_what_waits_for_lack_of_credit_is_told_at_once_and_its_end_too(self) -> None:
        matcher = Matcher()
        holder = subscribe(matcher, 1, credit=1)
        matcher.add(many(3))
        take(matcher, 10)
        assert matcher.demands(0) == [(holder, 2)]
        matcher.add_credit(holder, 2, {})
        take(matcher, 10)
        assert matcher.demands(demand.INTERVAL) == [(holder, 0)]
        assert matcher.demands(2 * demand.INTERVAL) == []
        assert matcher.until_demands(0) == demand.REPEAT

    def test_nothing_is_told_while_there_is_credit(self) -> None:
        matcher = Matcher()
        subscribe(matcher, 1, credit=5)
        matcher.add(many(3))
        take(matcher, 10)
        assert matcher.demands(0) == []

    def test_it_is_looked_at_only_now_and_then_and_not_forgotten(self) -> None:
        matcher = Matcher()
        holder = subscribe(matcher, 1, credit=0)
        matcher.add(many(1))
        assert matcher.demands(0) == [(holder, 1)]
        matcher.add(many(3))
        assert matcher.demands(demand.INTERVAL - 1) == []
        assert matcher.until_demands(demand.INTERVAL - 1) == 1
        assert matcher.demands(demand.INTERVAL) == [(holder, 4)]

    def test_a_number_that_has_neither_doubled_nor_halved_is_not_told_again_before_it_must_be(self) -> None:
        matcher = Matcher()
        holder = subscribe(matcher, 1, credit=0)
        matcher.add(many(10))
        matcher.demands(0)
        matcher.add(many(9))
        assert matcher.demands(demand.INTERVAL) == []
        assert matcher.until_demands(demand.INTERVAL) == demand.REPEAT
        assert matcher.demands(demand.REPEAT) == [(holder, 19)]

    def test_only_what_a_pool_could_take_is_counted(self) -> None:
        matcher = Matcher()
        subscribe(matcher, 1, credit=0, types=["other"])
        holder = subscribe(matcher, 2, credit=0, types=["t", "u"])
        matcher.add(many(2) + many(3, a_lane(task_type="u")) + many(4, a_lane(task_type="v")))
        assert matcher.demands(0) == [(holder, 5)]

    def test_a_task_type_without_credit_of_its_own_is_waited_for(self) -> None:
        matcher = Matcher()
        holder = subscribe(matcher, 1, credit=10, types=["t", "u"])
        matcher.add_credit(holder, 0, {"u": 1})
        matcher.add(many(3, a_lane(task_type="u")) + many(3))
        take(matcher, 10)
        assert matcher.demands(0) == [(holder, 2)]

    def test_what_is_no_longer_ready_is_not_waited_for(self) -> None:
        matcher = Matcher()
        subscribe(matcher, 1, credit=0)
        tasks = many(3)
        matcher.add(tasks)
        for task in tasks:
            task.is_ready = False
        assert matcher.demands(0) == []

    def test_a_backlog_is_counted_no_further_than_is_of_use(self) -> None:
        matcher = Matcher()
        holder = subscribe(matcher, 1, credit=0)
        for number in range(3):
            matcher.add(many(demand.MOST // 2, a_lane(fairness_key=str(number), priority=number)))
        assert matcher.demands(0) == [(holder, demand.MOST)]

    def test_one_task_is_told_to_a_few_first_and_to_more_as_it_goes_on_waiting(self) -> None:
        matcher = Matcher()
        for stream in range(200):
            subscribe(matcher, stream, credit=0)
        matcher.add(many(1))
        told: list[int] = []
        now = 0
        while matcher.until_demands(now) < demand.REPEAT or not told:
            now += matcher.until_demands(now)
            told.append(len(matcher.demands(now)))
        assert told == [8, 16, 32, 64, 80]

    def test_a_look_that_has_become_needless_is_not_awaited(self) -> None:
        matcher = Matcher()
        subscribe(matcher, 1, credit=2)
        matcher.add(many(1))
        assert matcher.demands(0) == []
        assert matcher.demands(1) == []
        assert matcher.until_demands(1) == demand.INTERVAL - 1
        take(matcher, 10)
        take(matcher, 10)
        assert matcher.demands(2) == []
        assert matcher.until_demands(2) == demand.REPEAT

    def test_streams_that_end_or_come_while_something_waits_are_known(self) -> None:
        matcher = Matcher()
        first = subscribe(matcher, 1, credit=0)
        matcher.add(many(1))
        matcher.demands(0)
        second = subscribe(matcher, 2, credit=0)
        matcher.unsubscribe(first)
        assert matcher.demands(demand.INTERVAL) == [(second, 1)]
        matcher.unsubscribe(second)
        assert matcher.demands(2 * demand.INTERVAL) == []
