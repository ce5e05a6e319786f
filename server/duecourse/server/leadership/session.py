"""A session: what makes a node present in etcd for as long as it lives. A lease that is kept alive, and its keys.

    ┌─────────┐ granted               ┌────────┐ etcd says: no such lease
    │ opening │ ────────────────────▶ │  open  │ ──────────────┐
    └─────────┘                       └────────┘               │ subscribers told
         ▲                                                     │
         └─────────────────────────────────────────────────────┘ a new lease

- Only an authoritative answer ends a lease: etcd says that there is none. Beats without an answer end nothing, however
  many; `remaining` says how long the lease surely lives on, for whoever wants to be careful.
- After a loss the session opens again by itself, with a new lease; subscribers are told of the loss and of the opening.
- The keys that it was given to `keep` are written under each new lease, again when they change, and again within a
  lease's time if somebody else deleted or overwrote them; but for what they yield to.
- When it stops it revokes its lease, so that others need not wait for it to expire.

Like all of etcd this is a hint. That a lease lives proves nothing about who leads; the store's fence does.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Never

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.etcd import transaction
from duecourse.server.etcd.client import EtcdClient, Lease
from duecourse.server.etcd.duties import run_until
from duecourse.server.etcd.errors import EtcdError, LeaseNotFound
from duecourse.server.etcd.keepalive import KeepAlive
from duecourse.server.etcd.transaction import KeyValue
from duecourse.server.telemetry import logs
from duecourse.timing.clock import Clock

DEFAULT_TTL: Final = 5 * bounds.SECOND
"""Less makes no sense: an etcd of three takes up to 2.2 s to elect a leader of its own."""
REVOKE_LIMIT: Final = bounds.SECOND

YieldsTo = Callable[[KeyValue], bool]

_log = logs.get("leadership")


@dataclass(frozen=True, slots=True)
class _Kept:
    value: bytes
    yields_to: YieldsTo


class Session:
    """See the module's docstring."""

    def __init__(self, client: EtcdClient, clock: Clock, ttl: Micros = DEFAULT_TTL) -> None:
        self.lease = 0
        """The number of the current lease; 0 while there is none."""
        self._client = client
        self._clock = clock
        self._ttl = ttl
        self._until: Micros = 0
        self._kept: dict[bytes, _Kept] = {}
        self._changed = asyncio.Event()
        self._opened = asyncio.Event()
        self._subscribers: list[Callable[[], None]] = []

    def remaining(self) -> Micros:
        """Return for how long the lease surely lives, counted from the sending of the last answered beat; 0: unsure."""
        return max(0, self._until - self._clock.elapsed()) if self.lease else 0

    async def opened(self) -> int:
        """Wait until there is a lease, and return its number."""
        while not self.lease:
            await self._opened.wait()
        return self.lease

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        """Have a subscriber called whenever `lease` has changed."""
        self._subscribers.append(subscriber)

    def keep(self, key: bytes, value: bytes, yields_to: YieldsTo = lambda found: False) -> None:
        """Have a key hold a value, from now on, as long as this node lives.

        What somebody else wrote there is left alone if the key `yields_to` it.
        """
        self._kept[key] = _Kept(value, yields_to)
        self._changed.set()

    async def run(self) -> Never:
        """Open, keep alive, and open again when the lease is lost; revoke it at the end."""
        try:
            while True:
                await self._live(await self._open())
        finally:
            await self._close()

    async def _open(self) -> Lease:
        for wait in self._client.retries():
            sent = self._clock.elapsed()
            try:
                lease = await self._client.grant(self._ttl)
            except EtcdError as error:
                _log.warning("session_not_opened", reason=str(error))
                await self._clock.sleep(wait)
                continue
            self._until = sent + lease.ttl
            self._become(lease.number)
            _log.info("session_opened", lease=f"{lease.number:x}")
            return lease
        raise AssertionError("retries are endless")

    async def _live(self, lease: Lease) -> None:
        """Return when the lease is lost."""
        keep_alive = KeepAlive(self._client, self._clock, lease, self._heard)
        await run_until(
            LeaseNotFound, {"session beats": keep_alive.run, "session keys": partial(self._keep_keys, lease)}
        )
        _log.warning("session_lost", lease=f"{lease.number:x}")
        self._become(0)

    async def _keep_keys(self, lease: Lease) -> Never:
        retries = self._client.retries()
        while True:
            self._changed.clear()
            try:
                await self._write_keys(lease.number)
                retries = self._client.retries()
                await self._wait_changed(lease.ttl)
            except LeaseNotFound:
                raise
            except EtcdError as error:
                _log.warning("session_keys_not_written", reason=str(error))
                await self._clock.sleep(next(retries))

    async def _write_keys(self, lease: int) -> None:
        for key, kept in list(self._kept.items()):
            await self._write(key, kept, lease)

    async def _write(self, key: bytes, kept: _Kept, lease: int) -> None:
        """Write a key, unless it is as it should be or yields to what is there."""
        while True:
            # The same when done twice, so a lost answer needs no care but another look.
            outcome = await self._client.txn(
                [transaction.holds(key, kept.value), transaction.leased(key, lease)], [], [transaction.get(key)]
            )
            found = None if outcome.succeeded else next(iter(outcome.found(0)), None)
            if outcome.succeeded or (found is not None and kept.yields_to(found)):
                return
            unchanged = transaction.absent(key) if found is None else transaction.modified(key, found.modified)
            await self._client.txn([unchanged], [transaction.put(key, kept.value, lease)])

    async def _wait_changed(self, at_most: Micros) -> None:
        until = self._clock.elapsed() + at_most
        while not self._changed.is_set() and (left := until - self._clock.elapsed()) > 0:
            try:
                async with asyncio.timeout(min(left, bounds.LONGEST_SLEEP) / bounds.SECOND):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _heard(self, until: Micros) -> None:
        self._until = until

    def _become(self, lease: int) -> None:
        self.lease = lease
        if lease:
            self._opened.set()
        else:
            self._opened.clear()
        for subscriber in self._subscribers:
            subscriber()

    async def _close(self) -> None:
        if not self.lease:
            return
        lease = self.lease
        self._become(0)
        try:
            async with asyncio.timeout(REVOKE_LIMIT / bounds.SECOND):
                await self._client.revoke(lease)
        except (EtcdError, TimeoutError) as error:
            _log.info("session_left_to_expire", lease=f"{lease:x}", reason=str(error))
