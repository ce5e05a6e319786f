"""A node as etcd sees it: a session, a mirror and elections, and nothing else of a node."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.waiting import running

from duecourse.model.instants import Micros
from duecourse.server.core.task import ShardId
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Candidate, Keys
from duecourse.server.etcd.mirror import Mirror
from duecourse.server.leadership.election import Elected, Election
from duecourse.server.leadership.session import DEFAULT_TTL, Session
from duecourse.server.leadership.standings import Standings
from duecourse.timing.clock import SystemClock


class CoordinatingNode:
    """Its parts, not running."""

    def __init__(self, name: str, client: EtcdClient, keys: Keys, ttl: Micros) -> None:
        self.candidate = Candidate(node=name, address=f"{name}.test:7400")
        self.client = client
        self.keys = keys
        self.clock = SystemClock()
        self.mirror = Mirror(client, self.clock, keys.coordination)
        self.session = Session(client, self.clock, ttl)
        self.standings = Standings(client, self.clock, self.mirror, self.session, keys)
        self.leases: list[int] = []
        self.session.subscribe(lambda: self.leases.append(self.session.lease))

    def election(self, shard: int = 3) -> Election:
        return Election(
            ShardId(shard),
            self.candidate,
            client=self.client,
            clock=self.clock,
            keys=self.keys,
            mirror=self.mirror,
            session=self.session,
            standings=self.standings,
        )


async def lost(standings: Standings, election: Election, elected: Elected) -> str:
    """Wait until etcd has said that an election is over, and return why."""
    news = asyncio.Event()
    with standings.telling(election.shard, news.set):
        while (reason := election.why_over(elected)) is None:
            news.clear()
            await news.wait()
    return reason


@asynccontextmanager
async def a_node(
    name: str, endpoints: Sequence[str], keys: Keys, ttl: Micros = DEFAULT_TTL
) -> AsyncIterator[CoordinatingNode]:
    """Run a node."""
    async with EtcdClient(endpoints, SystemClock()) as client:
        node = CoordinatingNode(name, client, keys, ttl)
        async with running(node.mirror.run(), node.session.run(), node.standings.run()):
            await node.session.opened()
            yield node
