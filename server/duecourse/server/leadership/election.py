"""The election of one shard's leader in etcd: to campaign, to resign, to notice that it is over.

    ┌─────────┐ own key made,   ┌─────────┐ nobody stood before, ┌─────────┐ own key gone, or made anew,
    │ outside │ or found        │ waiting │ verified             │ elected │ or the lease lost ──▶ outside
    └─────────┘ ──────────────▶ └─────────┘ ───────────────────▶ └─────────┘
         ▲                           │                                │
         └── own key gone, ──────────┘                                │ resign
             or the lease lost                                        ▼ outside

Every candidate makes a key of its own under its session's lease; the one whose key was created at the lowest revision
is elected, and the next in order when that key goes. Waiting is for the news of the mirror, which come by watch and by
linearizable re-reads; after every wait the own key is looked at again, as a queued candidate may have lost it, and
before it counts as elected a transaction verifies that the key is still the same. (That nobody stands before it needs
no second look: whoever comes later has a higher revision.) A candidate whose key was lost, for whatever reason, stands
again at once.

`Elected.revision`, the revision at which the key was created, is what epochs are made from: it never comes twice in the
life of an etcd that loses nothing.

Nothing here decides safety. To be elected is the hint to raise the epoch in the store; there, and only there, it is
decided who leads. Two nodes may both believe that they are elected, after a pause of any length; the fence does the
rest.
"""

import asyncio
from dataclasses import dataclass

from duecourse.server.core.task import ShardId
from duecourse.server.etcd import keys, transaction
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.errors import EtcdError
from duecourse.server.etcd.keys import Candidate, Keys
from duecourse.server.etcd.mirror import Mirror
from duecourse.server.leadership.session import Session
from duecourse.server.leadership.standings import Standings
from duecourse.server.telemetry import logs
from duecourse.timing.clock import Clock

_log = logs.get("leadership")


@dataclass(frozen=True, slots=True)
class Elected:
    """A candidacy, and what to know it by: its key, under this lease, created at this revision, in this era."""

    shard: ShardId
    key: bytes
    lease: int
    revision: int
    era: int


class Election:
    """See the module's docstring."""

    def __init__(
        self,
        shard: ShardId,
        candidate: Candidate,
        *,
        client: EtcdClient,
        clock: Clock,
        keys: Keys,
        mirror: Mirror,
        session: Session,
        standings: Standings,
    ) -> None:
        self.shard = shard
        self._value = candidate
        self._client = client
        self._clock = clock
        self._keys = keys
        self._mirror = mirror
        self._session = session
        self._standings = standings

    async def campaign(self) -> Elected:
        """Stand until elected. If it is cancelled, the candidacy is withdrawn in the background."""
        self._standings.want(self.shard)
        news = asyncio.Event()
        try:
            with self._standings.telling(self.shard, news.set):
                return await self._campaign(news)
        except BaseException:
            self._standings.give_up(self.shard)
            raise

    def why_over(self, candidacy: Elected) -> str | None:
        """Tell why a candidacy, or an election won, is over; None: etcd has not said that it is."""
        if self._session.lease != candidacy.lease:
            return "the session was lost"
        if self._mirror.era != candidacy.era:
            return "etcd was restored from an older copy"
        if self._mirror.revision < candidacy.revision:
            return None
        own = self._mirror.get(candidacy.key)
        if own is None:
            return "its key is gone"
        return None if own.created == candidacy.revision else "its key was made anew"

    async def resign(self, elected: Elected) -> None:
        """Let the next candidate have the shard. If etcd does not answer, that is done in the background."""
        self._standings.give_up(self.shard)
        try:
            await self._client.txn(
                [transaction.created(elected.key, elected.revision)], [transaction.delete(elected.key)]
            )
        except EtcdError as error:
            _log.info("resignation_unanswered", shard=self.shard, reason=str(error))

    async def _campaign(self, news: asyncio.Event) -> Elected:
        retries = self._client.retries()
        while True:
            try:
                candidacy = await self._stand()
                retries = self._client.retries()
                if await self._wait_for_turn(candidacy, news):
                    return candidacy
            except EtcdError as error:
                # Whatever was or was not applied: all is looked at again.
                _log.info("campaign_interrupted", shard=self.shard, reason=str(error))
                await self._clock.sleep(next(retries))

    async def _stand(self) -> Elected:
        """Make the own key, or find it."""
        lease = await self._session.opened()
        era, known = self._mirror.era, self._mirror.revision
        key = self._keys.candidate(self.shard, lease)
        outcome = await self._client.txn(
            [transaction.absent(key)],
            [transaction.put(key, keys.format_candidate(self._value), lease)],
            [transaction.get(key)],
        )
        if outcome.revision < known:
            # What the mirror shows is of an era that is over. Until it knows, it would say that the key is gone.
            self._mirror.reread_now()
            raise EtcdError(f"etcd is at revision {outcome.revision}, and was at {known}")
        revision = outcome.revision if outcome.succeeded else outcome.found(0)[0].created
        return Elected(self.shard, key, lease, revision, era)

    async def _wait_for_turn(self, candidacy: Elected, news: asyncio.Event) -> bool:
        """Wait until the candidacy is the first. False: it is over."""
        while True:
            news.clear()
            if self.why_over(candidacy) is not None:
                return False
            first = self._standings.leader(self.shard)
            if first is not None and first.revision == candidacy.revision:
                return await self._verify(candidacy)
            await news.wait()

    async def _verify(self, candidacy: Elected) -> bool:
        outcome = await self._client.txn([transaction.created(candidacy.key, candidacy.revision)], [])
        return outcome.succeeded
