"""Who stands for which shard, as the mirror of etcd shows it.

For every shard, in the order in which they came: the candidates and the leader that the first of them is. An elected
key that is gone from here is gone by an authoritative answer of etcd, since the mirror holds nothing else.

It also cleans up after this node: a key of its own for a shard that it does not want (its campaign was cancelled, its
resignation's answer lost, a late write of one) would block the shard for as long as the node lives. `run` deletes it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Never

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import ShardId
from duecourse.server.etcd import keys, transaction
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.errors import EtcdError
from duecourse.server.etcd.keys import Candidate, CandidateKey, Keys
from duecourse.server.etcd.mirror import Mirror
from duecourse.server.leadership.session import Session
from duecourse.server.telemetry import logs
from duecourse.timing.clock import Clock

_LOOK_AGAIN: Final[Micros] = bounds.SECOND

_log = logs.get("leadership")

Listener = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """One candidate of one shard."""

    shard: ShardId
    lease: int
    revision: int
    """At which its key was created: the order of candidates, and what epochs are made from."""
    candidate: Candidate | None
    """Who it is; None if what its key holds cannot be read. It counts all the same."""


class Standings:
    """See the module's docstring."""

    def __init__(self, client: EtcdClient, clock: Clock, mirror: Mirror, session: Session, keys: Keys) -> None:
        self._client = client
        self._clock = clock
        self._mirror = mirror
        self._session = session
        self._keys = keys
        self._by_shard: dict[ShardId, dict[int, Standing]] = defaultdict(dict)
        self._wanted: set[ShardId] = set()
        self._listeners: dict[ShardId, list[Listener]] = defaultdict(list)
        self._wake = asyncio.Event()
        session.subscribe(self._session_changed)
        mirror.subscribe(self._changed)

    def of(self, shard: ShardId) -> Sequence[Standing]:
        """Return the candidates of a shard, in their order."""
        return sorted(self._by_shard[shard].values(), key=lambda standing: standing.revision)

    def leader(self, shard: ShardId) -> Standing | None:
        """Return who leads a shard, as far as etcd knows; None: nobody."""
        return min(self._by_shard[shard].values(), key=lambda standing: standing.revision, default=None)

    def own(self, shard: ShardId) -> Standing | None:
        """Return this node's own candidacy for a shard, under its current lease."""
        return self._by_shard[shard].get(self._session.lease)

    @contextmanager
    def telling(self, shard: ShardId, listener: Listener) -> Iterator[None]:
        """Have a listener called inside whenever the candidates of a shard, or this node's lease, have changed."""
        self._listeners[shard].append(listener)
        try:
            yield
        finally:
            self._listeners[shard].remove(listener)

    def want(self, shard: ShardId) -> None:
        """Note that this node stands for a shard."""
        self._wanted.add(shard)

    def give_up(self, shard: ShardId) -> None:
        """Note that this node does not stand for a shard any more: its key is deleted, now or as soon as it can be."""
        self._wanted.discard(shard)
        self._wake.set()

    async def run(self) -> Never:
        """Delete this node's keys for shards that it does not want, until they are seen to be gone.

        An etcd that is restored from a copy of just before has them again, and who had not seen them go sees no change.
        """
        retries = self._client.retries()
        had_strays = False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN / bounds.SECOND if had_strays else None):
                    await self._wake.wait()
            self._wake.clear()
            try:
                had_strays = await self._delete_strays()
                retries = self._client.retries()
            except EtcdError as error:
                _log.info("candidacy_not_withdrawn", reason=str(error))
                self._wake.set()
                await self._clock.sleep(next(retries))

    async def _delete_strays(self) -> bool:
        """Tell whether there were any."""
        strays = 0
        for shard in list(self._by_shard):
            own = self.own(shard)
            if own is not None and shard not in self._wanted:
                key = self._keys.candidate(shard, own.lease)
                await self._client.txn([transaction.created(key, own.revision)], [transaction.delete(key)])
                strays += 1
        return strays > 0

    def _session_changed(self) -> None:
        for shard in list(self._listeners):
            self._tell(shard)

    def _changed(self, changed: Collection[bytes]) -> None:
        shards = set()
        for key in changed:
            parsed = self._keys.parse(key)
            if isinstance(parsed, CandidateKey):
                self._set(parsed, key)
                shards.add(parsed.shard)
        for shard in shards:
            if shard not in self._wanted and self.own(shard) is not None:
                self._wake.set()
            self._tell(shard)

    def _set(self, parsed: CandidateKey, key: bytes) -> None:
        kv = self._mirror.get(key)
        if kv is None:
            self._by_shard[parsed.shard].pop(parsed.lease, None)
        else:
            candidate = keys.parse_candidate(kv.value)
            self._by_shard[parsed.shard][parsed.lease] = Standing(parsed.shard, parsed.lease, kv.created, candidate)

    def _tell(self, shard: ShardId) -> None:
        for listener in list(self._listeners[shard]):
            listener()
