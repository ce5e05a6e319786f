"""Early takeover: a node that died is noticed when its connections close, not only when its session has run out.

A plain connection is kept to every other node's peer address; nothing is said on it. When one that stood has closed and
a new one is refused, nobody listens there any more: the process is dead, and its session is revoked, so that its shards
are free at once. Silence, a time-out, or an address that was never reached prove nothing. A node that drains ends its
session by itself.

This may be wrong (somebody put a firewall between that refuses) and does no harm then: the node loses its leadership,
opens a new session, and the store's fence keeps it from writing under its old terms.
"""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, Never

from duecourse.model import bounds
from duecourse.model.addresses import host_and_port
from duecourse.model.instants import Micros
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.errors import EtcdError
from duecourse.server.leadership.membership import DRAINING, Membership, Presence
from duecourse.server.telemetry import logs
from duecourse.timing import backoff
from duecourse.timing.clock import Clock

CONNECT_LIMIT: Final[Micros] = bounds.SECOND
_FIRST_WAIT: Final[Micros] = 50 * bounds.MILLISECOND
_LONGEST_WAIT: Final[Micros] = 2 * bounds.SECOND
_STEADY: Final[Micros] = 500 * bounds.MILLISECOND
"""A connection that stood for less may be of somebody who accepts all and serves none, such as a load balancer."""
_CHUNK: Final = 4_096
# An address that a newer version wrote may mean nothing here.
_PROVES_NOTHING: Final = (OSError, TimeoutError, ValueError)

_log = logs.get("leadership")


class Vigil:
    """See the module's docstring."""

    def __init__(self, membership: Membership, client: EtcdClient, clock: Clock) -> None:
        self._membership = membership
        self._client = client
        self._clock = clock
        self._changed = asyncio.Event()

    def members_changed(self) -> None:
        """Take in that nodes have come or gone."""
        self._changed.set()

    async def run(self) -> Never:
        """Watch over all other nodes."""
        watched: dict[tuple[int, str], asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                present = {
                    (other.lease, other.member.peer_address): other
                    for other in self._membership.others()
                    if other.member.peer_address
                }
                # In an order that is the same wherever it runs, so that a simulation can be repeated.
                for gone in [key for key in watched if key not in present]:
                    watched.pop(gone).cancel()
                for key in [key for key in present if key not in watched]:
                    watched[key] = group.create_task(self._watch(present[key]), name=f"vigil {key[1]}")
                await self._changed.wait()
        raise AssertionError("it goes on for ever")

    async def _watch(self, other: Presence) -> None:
        """Keep a connection to a node; revoke its session once it is dead."""
        has_stood = False
        waits = _waits()
        while True:
            began = self._clock.elapsed()
            try:
                async with _connected(other.member.peer_address) as reader:
                    has_stood = True
                    await _until_closed(reader)
                if self._clock.elapsed() - began >= _STEADY:
                    # The next try is made at once: it tells whether somebody still listens.
                    waits = _waits()
                    continue
            except ConnectionRefusedError:
                if has_stood and await self._revoke(other):
                    return
            except _PROVES_NOTHING:
                pass
            await self._clock.sleep(next(waits))

    async def _revoke(self, other: Presence) -> bool:
        """End the session of a node that is dead; False if etcd does not answer."""
        known = self._membership.get(other.member.node_id)
        if known is None or known.ineligible_reason == DRAINING:
            # It says that it goes, and takes its session with it.
            return False
        _log.warning("peer_died", node=known.node_id, address=known.peer_address, lease=f"{other.lease:x}")
        try:
            await self._client.revoke(other.lease)
        except EtcdError as error:
            _log.info("session_not_revoked", node=known.node_id, reason=str(error))
            return False
        return True


async def is_refused(address: str) -> bool:
    """Tell whether an address surely refuses connections: nobody listens there."""
    try:
        async with _connected(address):
            return False
    except ConnectionRefusedError:
        return True
    except _PROVES_NOTHING:
        return False


class NotFound(NamedTuple):
    """Why a node is surely not found at an address."""

    why: str
    is_name_unknown: bool = False
    """Whether nobody knows what the address means, which may be a matter of time."""


async def why_unreachable(address: str) -> NotFound | None:
    """Tell why an address surely cannot be reached from here: nobody listens there, or the name means nothing."""
    try:
        async with _connected(address):
            return None
    except ConnectionRefusedError as error:
        return NotFound(str(error))
    except socket.gaierror as error:
        return NotFound(str(error), is_name_unknown=True)
    except (OSError, TimeoutError):
        return None


@asynccontextmanager
async def _connected(address: str) -> AsyncIterator[asyncio.StreamReader]:
    async with asyncio.timeout(CONNECT_LIMIT / bounds.SECOND):
        reader, writer = await _connect(address)
    try:
        yield reader
    finally:
        writer.close()


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect; it is refused only if all that the name stands for refuse."""
    host, port = host_and_port(address)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failures: list[OSError] = []
    for *_, place in found:
        try:
            return await asyncio.open_connection(str(place[0]), port)
        except OSError as error:
            failures.append(error)
    raise next((error for error in failures if not isinstance(error, ConnectionRefusedError)), failures[0])


async def _until_closed(reader: asyncio.StreamReader) -> None:
    """Wait until a connection is closed; what is said on it does not matter."""
    try:
        while await reader.read(_CHUNK):
            pass
    except ConnectionError:
        pass


def _waits() -> Iterator[Micros]:
    return backoff.delays(_FIRST_WAIT, _LONGEST_WAIT, random.Random())
