"""Signs of life for one lease, on one stream at a time.

A beat is sent every third of the lease's time and must be answered within the deadline of a call, and a third of the
lease's time at most; if it is not, the stream is left for one to the next endpoint. The lease counts from when the last
answered beat was *sent*: etcd may have begun to count at any moment after that, never before.

Silence says nothing about the lease. Only an answer of etcd that there is none ends it.
"""

from collections.abc import Callable
from typing import Final, Never

from duecourse.etcd.v1 import lease_pb2
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.etcd.client import EtcdClient, Lease
from duecourse.server.etcd.errors import EtcdError, LeaseNotFound
from duecourse.server.etcd.stream import Stream
from duecourse.server.telemetry import logs
from duecourse.timing.clock import Clock

BEATS_PER_LEASE: Final = 3

_KEEP_ALIVE: Final = "/etcdserverpb.Lease/LeaseKeepAlive"

_log = logs.get("etcd")


class KeepAlive:
    """Keeps a lease alive for as long as it runs. `heard(until)` is told each time how long the lease surely lives."""

    def __init__(self, client: EtcdClient, clock: Clock, lease: Lease, heard: Callable[[Micros], None]) -> None:
        self._client = client
        self._clock = clock
        self._lease = lease
        self._heard = heard
        self._interval = lease.ttl // BEATS_PER_LEASE
        self._patience = min(client.deadline, self._interval)
        self._is_silent = False

    async def run(self) -> Never:
        """Send beats, on ever new streams. Raises LeaseNotFound when etcd says so."""
        retries = self._client.retries()
        while True:
            try:
                async with self._client.stream(_KEEP_ALIVE, lease_pb2.LeaseKeepAliveResponse) as stream:
                    while True:
                        await self._beat(stream)
                        retries = self._client.retries()
            except LeaseNotFound:
                raise
            except EtcdError as error:
                self._fell_silent(error)
                await self._clock.sleep(next(retries))

    async def _beat(self, stream: Stream[lease_pb2.LeaseKeepAliveResponse]) -> None:
        sent = self._clock.elapsed()
        await stream.send(lease_pb2.LeaseKeepAliveRequest(id=self._lease.number), self._patience)
        answer = await stream.receive(self._patience)
        self._client.note(answer.header)
        if answer.ttl <= 0:
            raise LeaseNotFound("NOT_FOUND", f"lease {self._lease.number:x} is gone")
        if self._is_silent:
            self._is_silent = False
            _log.info("etcd_lease_heard_again", lease=f"{self._lease.number:x}")
        self._heard(sent + answer.ttl * bounds.SECOND)
        await self._clock.sleep(sent + self._interval - self._clock.elapsed())

    def _fell_silent(self, error: EtcdError) -> None:
        if not self._is_silent:
            self._is_silent = True
            _log.warning("etcd_lease_unheard", lease=f"{self._lease.number:x}", reason=str(error))
