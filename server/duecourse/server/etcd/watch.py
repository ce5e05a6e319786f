"""A watch of a range of keys that goes on by itself.

    ┌──────────┐ read at revision r   ┌────────────────────┐ stream broken, or silent
    │ re-read  │ ───────────────────▶ │ follow from r + 1  │ ───────────┐
    └──────────┘                      └────────────────────┘            │ next endpoint,
         ▲  ▲                            │            ▲                 │ a wait when it fails again
         │  └──── compacted ─────────────┘            └─────────────────┘ from the last event + 1
       start

Whoever watches gives a function that re-reads everything and returns the revision of what it read: it is called at
the start, and whenever etcd has compacted what the watch should go on with. In between no event is missed, and each is
delivered once, in the order of revisions, all events of a revision in one call.

A member that froze, or lost touch with its peers, does not end its streams. So the stream asks for a sign of life every
second and is left after `PATIENCE` without one, and etcd is told to end it when that member has no leader.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Never

from duecourse.etcd.v1 import watch_pb2
from duecourse.model import bounds
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.errors import Compacted, EtcdError, StreamBroken
from duecourse.server.etcd.stream import Stream
from duecourse.server.etcd.transaction import KeyValue, key_value
from duecourse.server.telemetry import logs
from duecourse.timing.clock import Clock

PROBE_INTERVAL: Final = bounds.SECOND
PATIENCE: Final = 5 * bounds.SECOND // 2

_WATCH: Final = "/etcdserverpb.Watch/Watch"
_NEEDS_LEADER: Final = (("hasleader", "true"),)
_DELETED: Final = 1
_WHOLE_STREAM: Final = -1

_log = logs.get("etcd")


class Event:
    """Something happened to a key."""

    __slots__ = ("is_deletion", "kv")

    def __init__(self, kv: KeyValue, is_deletion: bool) -> None:
        self.kv = kv
        """The key as it then stood; of a deletion, `modified` is its revision, and the value is gone."""
        self.is_deletion = is_deletion


Deliver = Callable[[Sequence[Event]], None]
Reread = Callable[[], Awaitable[int]]


class Watch:
    """See the module's docstring. `connected` is called whenever a stream has begun to watch."""

    def __init__(
        self,
        client: EtcdClient,
        clock: Clock,
        start: bytes,
        end: bytes,
        *,
        deliver: Deliver,
        reread: Reread,
        connected: Callable[[], None] = lambda: None,
    ) -> None:
        self.interruptions = 0
        """How many times its stream broke, fell silent, or could not be opened."""
        self._client = client
        self._clock = clock
        self._range = (start, end)
        self._deliver = deliver
        self._reread = reread
        self._connected = connected
        self._after: int | None = None
        """The revision up to which everything is known; None: re-read first."""
        self._retries = client.retries()

    async def run(self) -> Never:
        """Watch."""
        while True:
            try:
                if self._after is None:
                    self._after = await self._reread()
                async with self._client.stream(_WATCH, watch_pb2.WatchResponse, _NEEDS_LEADER) as stream:
                    await self._follow(stream)
            except Compacted:
                _log.info("etcd_watch_compacted", after=self._after)
                self._after = None
            except EtcdError as error:
                self.interruptions += 1
                _log.info("etcd_watch_interrupted", after=self._after, reason=str(error))
                await self._clock.sleep(next(self._retries))

    async def _follow(self, stream: Stream[watch_pb2.WatchResponse]) -> None:
        assert self._after is not None
        start, end = self._range
        create = watch_pb2.WatchCreateRequest(
            key=start, range_end=end, start_revision=self._after + 1, progress_notify=True
        )
        await stream.send(watch_pb2.WatchRequest(create_request=create), PATIENCE)
        async with asyncio.TaskGroup() as group:
            prober = group.create_task(self._probe(stream), name="etcd watch probe")
            failure = await self._receive(stream)
            prober.cancel()
        raise failure

    async def _receive(self, stream: Stream[watch_pb2.WatchResponse]) -> EtcdError:
        # Returned, not raised, so that the group does not wrap it.
        try:
            while True:
                self._take(await stream.receive(PATIENCE))
        except EtcdError as error:
            return error

    def _take(self, message: watch_pb2.WatchResponse) -> None:
        self._client.note(message.header)
        if message.canceled:
            if message.compact_revision:
                raise Compacted("OUT_OF_RANGE", f"compacted up to {message.compact_revision}")
            raise StreamBroken(message.cancel_reason or "the watch was ended")
        if message.created:
            self._retries = self._client.retries()
            self._connected()
        elif message.events:
            self._after = message.events[-1].kv.mod_revision
            self._deliver([Event(key_value(event.kv), event.type == _DELETED) for event in message.events])
        elif message.watch_id != _WHOLE_STREAM:
            # In order with the events. An answer for the whole stream is not, before 3.4.25 and 3.5.8: it may name a
            # revision whose events are still to come.
            self._after = max(self._after or 0, message.header.revision)

    async def _probe(self, stream: Stream[watch_pb2.WatchResponse]) -> None:
        probe = watch_pb2.WatchRequest(progress_request=watch_pb2.WatchProgressRequest())
        try:
            while True:
                await self._clock.sleep(PROBE_INTERVAL)
                await stream.send(probe, PATIENCE)
        except StreamBroken:
            # Whoever receives finds out by itself, and says why.
            pass
