"""Races: a cancellation against the due time and against the handler's end; one submission made many times at once."""

import asyncio
from collections import Counter
from datetime import timedelta

from faults.cluster import Cluster
from faults.recording_client import Ask, RecordingClient

from duecourse import client as sdk
from duecourse.model import bounds
from duecourse.model.instants import Micros

_SPACING = 10 * bounds.MILLISECOND
_HANDLER = 60 * bounds.MILLISECOND


async def _race(cluster: Cluster, client: RecordingClient, asks: list[Ask], after: Micros) -> Counter[str]:
    """Cancel each task within 5 ms of `after` its due time; returns how often what was answered."""
    answers: Counter[str] = Counter()

    async def cancel(ask: Ask) -> None:
        assert ask.run_at is not None
        at = ask.run_at + after + cluster.source.randrange(-5, 6) * bounds.MILLISECOND
        await cluster.clock.sleep(at - cluster.clock.now().latest)
        answer = await client.cancel(ask.task_id)
        assert isinstance(answer, sdk.Cancellation), answer
        answers[str(answer.result)] += 1

    async with asyncio.TaskGroup() as group:
        for ask in asks:
            group.create_task(cancel(ask), name=ask.task_id)
    return answers


def _spaced(cluster: Cluster, prefix: str, rounds: int, **rest: float) -> list[Ask]:
    begin = cluster.clock.now().latest + 2 * bounds.SECOND
    return [
        Ask(
            f"{prefix}-{number}",
            begin + number * _SPACING,
            seconds=rest.get("seconds", 0),
            fails=number % 2 if prefix == "ending" else 0,
        )
        for number in range(rounds)
    ]


async def test_a_cancellation_that_meets_the_due_time_tells_the_truth(cluster: Cluster, is_long: bool) -> None:
    cluster.start_worker(slots=500)
    async with cluster.client() as client:
        await cluster.recovers("the start")
        asks = _spaced(cluster, "due", 5_000 if is_long else 300, seconds=_HANDLER / bounds.SECOND)
        await client.submit(*asks)
        answers = await _race(cluster, client, asks, 0)
    recorded = await cluster.settle()
    assert answers["prevented"], "no cancellation won"
    assert answers["requested"], "no cancellation lost"
    # The other side of the checker's rule: what was not prevented had been granted.
    granted = {transition.task_id for transition in recorded.transitions if transition.is_grant}
    cancelled = {one.task_id for one in recorded.operations if one.result == "requested"}
    assert cancelled <= granted
    print(dict(answers))


async def test_a_cancellation_that_meets_the_handlers_end_tells_the_truth(cluster: Cluster, is_long: bool) -> None:
    cluster.start_worker(slots=500)
    async with cluster.client() as client:
        await cluster.recovers("the start")
        asks = _spaced(cluster, "ending", 5_000 if is_long else 300, seconds=_HANDLER / bounds.SECOND)
        await client.submit(*asks)
        answers = await _race(cluster, client, asks, _HANDLER)
    recorded = await cluster.settle()
    assert answers["requested"], "no cancellation won"
    states = {one.task_id: one.new.state for one in recorded.transitions if one.new}
    ends = Counter(states[operation.task_id] for operation in recorded.operations if operation.result == "requested")
    assert set(ends) <= {"cancelled", "succeeded"}
    print(dict(answers), dict(ends))


async def test_many_submissions_of_one_id_are_one_task(cluster: Cluster, is_long: bool) -> None:
    cluster.start_worker()
    for number in range(20 if is_long else 2):
        same = Ask(f"same-{number}", cluster.clock.now().latest + 100 * bounds.MILLISECOND)
        answers: list[sdk.SubmittedTask | sdk.DuecourseError] = []

        async def submit(client: RecordingClient, ask: Ask, into: list[sdk.SubmittedTask | sdk.DuecourseError]) -> None:
            await cluster.clock.sleep(cluster.source.randrange(50 * bounds.MILLISECOND))
            into += await client.submit(ask)

        async with cluster.client() as client:
            async with asyncio.TaskGroup() as group:
                for index in range(50):
                    group.create_task(submit(client, same, answers), name=f"submit {index}")
                await cluster.clock.sleep(25 * bounds.MILLISECOND)
                cluster.node.kill()
                await cluster.node.start()
            assert all(isinstance(answer, sdk.SubmittedTask) for answer in answers), answers
            assert sum(answer.created for answer in answers if isinstance(answer, sdk.SubmittedTask)) <= 1
            (other,) = await client.submit(Ask(same.task_id, same.run_at, seconds=1), timeout=timedelta(seconds=10))
            assert isinstance(other, sdk.TaskExists)
    await cluster.settle()
