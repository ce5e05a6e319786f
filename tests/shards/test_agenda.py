"""When the loop looks at a shard again."""

from core.one_shard import OneShard, held

from duecourse.model import bounds
from duecourse.server.core.task import TaskState
from duecourse.server.shards.agenda import Agenda


def waiting_cancellation() -> tuple[OneShard, Agenda]:
    """Return a shard that waits for a worker's word on a cancellation, and an agenda that has noted it."""
    shard, _ = held(TaskState.LEASED)
    shard.cancel(wait=300 * bounds.MILLISECOND)
    agenda = Agenda()
    agenda.note(shard.shard)
    return shard, agenda


def test_a_cancellation_is_answered_when_its_wait_is_over() -> None:
    shard, agenda = waiting_cancellation()
    now = shard.now()
    assert agenda.until_next(now, bounds.LONGEST_SLEEP) == 300 * bounds.MILLISECOND
    assert agenda.take(now) == set()
    shard.elapsed += 300 * bounds.MILLISECOND
    assert agenda.take(shard.now()) == {shard.shard}


def test_a_shard_that_is_forgotten_is_not_looked_at() -> None:
    shard, agenda = waiting_cancellation()
    agenda.forget(shard.shard)
    shard.elapsed += bounds.SECOND
    assert agenda.take(shard.now()) == set()
    assert agenda.until_next(shard.now(), bounds.LONGEST_SLEEP) == bounds.LONGEST_SLEEP
