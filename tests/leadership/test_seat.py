"""One seat, over an election that a test decides: what a claim is worth, and what is left behind."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from services.waiting import until

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.etcd.keys import Cluster
from duecourse.server.leadership import Claim, Member
from duecourse.server.leadership.election import Elected, Election
from duecourse.server.leadership.seat import Seat
from duecourse.server.leadership.standings import Listener, Standings
from duecourse.server.storage import RaiseRefused
from duecourse.timing.clock import SystemClock

SHARD = ShardId(3)
SUCCESSOR = Member(node_id="b", address="b.test:7400", peer_address="", version="")


class DecidedElection:
    """Elects at once, under the revision that a test says; a resignation does not arrive."""

    def __init__(self) -> None:
        self.revision = 7
        self.resigned = 0
        self.over: str | None = None

    async def campaign(self) -> Elected:
        return Elected(SHARD, b"key", 1, self.revision, 0)

    def why_over(self, _: Elected) -> str | None:
        return self.over

    async def resign(self, _: Elected) -> None:
        self.resigned += 1


class Candidacies:
    """The standings as far as a seat uses them."""

    def __init__(self) -> None:
        self.given_up: list[ShardId] = []

    @contextmanager
    def telling(self, _: ShardId, __: Listener) -> Iterator[None]:
        yield

    def give_up(self, shard: ShardId) -> None:
        self.given_up.append(shard)


class Taken:
    """Notes the epochs that it would have raised. As far as a seat uses `Taking`."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []

    def take(self, claims: Mapping[ShardId, Claim]) -> None:
        epoch = claims[SHARD].next_epoch()
        assert epoch is not None
        self.epochs.append(epoch)

    def give_up(self, shard: ShardId, reason: str, detail: str) -> None:
        pass

    async def hand_over(self, shard: ShardId) -> None:
        pass

    def failing(self) -> frozenset[ShardId]:
        return frozenset()

    def store_missed_for(self) -> Micros:
        return 0


class Scene:
    """A seat and what is around it."""

    def __init__(self) -> None:
        self.election = DecidedElection()
        self.candidacies = Candidacies()
        self.taken = Taken()
        self.seat = Seat(
            SHARD,
            Cluster(id="test", shards=4, epoch_base=Epoch(0)),
            cast(Election, cast(Any, self.election)),
            clock=SystemClock(),
            standings=cast(Standings, cast(Any, self.candidacies)),
        )


async def test_a_key_that_outlives_its_resignation_gives_no_epoch_twice() -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            scene.seat.take(group, scene.taken, lambda: None)
            await until(lambda: scene.seat.is_elected)
            scene.seat.hand_over(SUCCESSOR)
            await until(lambda: not scene.seat.is_occupied)
    first = scene.taken.epochs[0]
    assert scene.taken.epochs == [first, first + 1, first + 2]


async def test_a_refused_claim_whose_resignation_was_lost_is_resigned_again_until_there_is_a_new_one() -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as group:
        scene.seat.take(group, scene.taken, lambda: None)
        await until(lambda: scene.seat.is_elected)
        scene.seat.superseded(RaiseRefused("test", Epoch(7 * 65_536 + 5), b"another"))
        await until(lambda: scene.election.resigned > 1)
        assert not scene.seat.is_at_odds
        scene.election.revision = 8
        await until(lambda: scene.seat.is_elected)
        await until(lambda: scene.taken.epochs[-1] == 8 * 65_536, bounds.SECOND)
        scene.seat.hand_over(SUCCESSOR)


async def test_a_shard_whose_election_ends_while_it_is_handed_over_is_not_blocked_by_a_key_left_behind() -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as group:
        scene.seat.take(group, scene.taken, lambda: None)
        await until(lambda: scene.seat.is_elected)
        scene.election.over = "etcd was restored from an older copy"
        scene.seat.hand_over(SUCCESSOR)
    assert scene.candidacies.given_up == [SHARD]
