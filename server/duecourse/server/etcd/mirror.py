"""A copy in memory of all keys below a prefix, and the news of what changed in it.

A watch keeps it current within milliseconds; but a watch is a wake-up, not the truth. So all is re-read linearizably
when the watch has connected, and every `REREAD_INTERVAL`: one call for everything that a node wants to know.

`revision` is that of the store as the copy shows it. It only grows, and with it the copy is always a state that the
store was in. If a read finds etcd at a lower revision than was seen before, it has lost writes (it was restored from an
older copy): that begins a new `era`, in which nothing that was known of the old one holds. An etcd that has written as
much again in the meantime cannot be told by its revision; the copy is right then, too, but the era does not end.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Final, Never

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.etcd import keys
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.duties import run_until
from duecourse.server.etcd.errors import EtcdError
from duecourse.server.etcd.transaction import KeyValue
from duecourse.server.etcd.watch import Event, Watch
from duecourse.server.telemetry import logs
from duecourse.timing.clock import Clock

REREAD_INTERVAL: Final = 2 * bounds.SECOND

Listener = Callable[[Collection[bytes]], None]

_log = logs.get("etcd")


class _WentBack(Exception):
    pass


class Mirror:
    """See the module's docstring."""

    def __init__(self, client: EtcdClient, clock: Clock, prefix: bytes) -> None:
        self.revision = 0
        """The revision that the copy shows; 0: nothing was read yet."""
        self.era = 0
        """How many times the store went back."""
        self.read_at: Micros | None = None
        """When the last answered linearizable read was sent, by elapsed time."""
        self._client = client
        self._clock = clock
        self._range = (prefix, keys.end_of(prefix))
        self._kvs: dict[bytes, KeyValue] = {}
        self._listeners: list[Listener] = []
        self._is_read = asyncio.Event()
        self._wanted = asyncio.Event()

    def get(self, key: bytes) -> KeyValue | None:
        """Return a key; None if there is none."""
        return self._kvs.get(key)

    def __iter__(self) -> Iterator[KeyValue]:
        return iter(self._kvs.values())

    def subscribe(self, listener: Listener) -> None:
        """Have a listener told which keys have changed, each time. It is called at once with those that are there."""
        self._listeners.append(listener)
        listener(self._kvs.keys())

    async def wait_read(self) -> None:
        """Wait until everything was read once."""
        await self._is_read.wait()

    def reread_now(self) -> None:
        """Have everything re-read without waiting for the interval."""
        self._wanted.set()

    async def read(self) -> None:
        """Read everything once; for before it runs. Raises EtcdError."""
        with suppress(_WentBack):
            await self._reread()

    async def run(self) -> Never:
        """Keep the copy current."""
        while True:
            watch = Watch(
                self._client,
                self._clock,
                *self._range,
                deliver=self._apply,
                reread=self._reread_for_watch,
                connected=self.reread_now,
            )
            # A watch waits for revisions that will not come for long if etcd went back: then all begins anew.
            await run_until(_WentBack, {"etcd watch": watch.run, "etcd re-read": self._reread_at_intervals})

    async def _reread_at_intervals(self) -> Never:
        while True:
            await self._wait_interval()
            try:
                await self._reread()
            except EtcdError as error:
                _log.info("etcd_reread_failed", reason=str(error))

    async def _wait_interval(self) -> None:
        due = self._clock.elapsed() + REREAD_INTERVAL
        while not self._wanted.is_set() and (left := due - self._clock.elapsed()) > 0:
            try:
                async with asyncio.timeout(min(left, bounds.LONGEST_SLEEP) / bounds.SECOND):
                    await self._wanted.wait()
            except TimeoutError:
                pass
        self._wanted.clear()

    async def _reread_for_watch(self) -> int:
        await self._reread()
        return self.revision

    async def _reread(self) -> None:
        known, sent = self.revision, self._clock.elapsed()
        reading = await self._client.read(*self._range)
        found = {kv.key: kv for kv in reading.found}
        self.read_at = sent
        self._is_read.set()
        if reading.revision < known:
            self._go_back(found, reading.revision)
        elif reading.revision >= self.revision:
            self.revision = reading.revision
            self._replace(found)

    def _go_back(self, found: dict[bytes, KeyValue], revision: int) -> None:
        _log.error(
            "etcd_went_back",
            seen=self.revision,
            found=revision,
            advice="etcd was restored from an older copy and has lost what was written since",
        )
        changed = self._kvs.keys() | found.keys()
        self._kvs, self.revision = found, revision
        self.era += 1
        self._tell(changed)
        raise _WentBack

    def _replace(self, found: dict[bytes, KeyValue]) -> None:
        before, self._kvs = self._kvs, found
        self._tell({key for key in before.keys() | found.keys() if before.get(key) != found.get(key)})

    def _apply(self, events: Sequence[Event]) -> None:
        changed: set[bytes] = set()
        for event in events:
            if event.kv.modified <= self.revision:
                # A read was ahead of the watch.
                continue
            changed.add(event.kv.key)
            if event.is_deletion:
                self._kvs.pop(event.kv.key, None)
            else:
                self._kvs[event.kv.key] = event.kv
        self.revision = max(self.revision, events[-1].kv.modified)
        self._tell(changed)

    def _tell(self, changed: Collection[bytes]) -> None:
        if changed:
            # In an order that is the same wherever it runs, so that a simulation can be repeated.
            ordered = sorted(changed)
            for listener in self._listeners:
                listener(ordered)
