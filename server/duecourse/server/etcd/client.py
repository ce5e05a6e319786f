"""The client: transactions, linearizable reads, leases, and what kind of etcd answers.

See the package for what it promises. An answer other than OK means one of these:

    not connected within the deadline                    surely not applied: next endpoint, at last EtcdUnavailable
    NOT_FOUND, OUT_OF_RANGE, and other refusals          surely not applied: EtcdRefused or one of its kinds
    anything else, DEADLINE_EXCEEDED and UNAVAILABLE     unknown: EtcdUnknown; what may be repeated, at the next
    among it                                             endpoint, at last EtcdUnavailable
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import grpc
from google.protobuf.message import Message
from grpc import aio

from duecourse.etcd.v1 import kv_pb2, lease_pb2, server_pb2
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.etcd import transaction
from duecourse.server.etcd.endpoints import Answer, Connection, Endpoints, Metadata, Tls, User
from duecourse.server.etcd.errors import (
    Compacted,
    EtcdRefused,
    EtcdUnavailable,
    EtcdUnknown,
    ForeignCluster,
    LeaseNotFound,
    StreamBroken,
)
from duecourse.server.etcd.stream import Stream
from duecourse.server.etcd.transaction import Compare, KeyValue, Operation, Outcome
from duecourse.server.telemetry import logs
from duecourse.timing import backoff
from duecourse.timing.clock import Clock

DEADLINE: Final = bounds.SECOND
FIRST_RETRY: Final = 100 * bounds.MILLISECOND
LONGEST_RETRY: Final = bounds.SECOND
PAGE: Final = 1_000

_RANGE: Final = "/etcdserverpb.KV/Range"
_TXN: Final = "/etcdserverpb.KV/Txn"
_GRANT: Final = "/etcdserverpb.Lease/LeaseGrant"
_REVOKE: Final = "/etcdserverpb.Lease/LeaseRevoke"
_AUTHENTICATE: Final = "/etcdserverpb.Auth/Authenticate"
_STATUS: Final = "/etcdserverpb.Maintenance/Status"
_MEMBERS: Final = "/etcdserverpb.Cluster/MemberList"

_REFUSALS: Final = frozenset(
    {
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
# Several members of these versions may disagree on what was written.
_INCONSISTENT_VERSIONS: Final = frozenset({"3.5.0", "3.5.1", "3.5.2"})

_log = logs.get("etcd")


class Reading(NamedTuple):
    """What a linearizable read found."""

    found: list[KeyValue]
    revision: int
    """The revision of the store that was read."""


class Lease(NamedTuple):
    """A lease as granted."""

    number: int
    ttl: Micros
    """How long it lives without a sign of life; etcd may have chosen more than was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What kind of etcd answers."""

    version: str
    members: int
    database_bytes: int
    cluster_id: int
    member_id: int

    @property
    def is_inconsistent(self) -> bool:
        """Whether its members are known to disagree at times."""
        return self.members > 1 and self.version in _INCONSISTENT_VERSIONS


class EtcdClient:
    """See the module's docstring. As an async context manager it is closed at the end."""

    def __init__(
        self,
        endpoints: Sequence[str],
        clock: Clock,
        *,
        deadline: Micros = DEADLINE,
        tls: Tls | None = None,
        user: User | None = None,
        source: random.Random | None = None,
    ) -> None:
        self.deadline = deadline
        self.cluster_id: int | None = None
        """The cluster that answers; None before its first answer."""
        self.member_id: int | None = None
        """Its member that answered last."""
        self._clock = clock
        self._endpoints = Endpoints(endpoints, tls)
        self._user = user
        self._token: Metadata = ()
        self._source = source or random.Random()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._endpoints.close()

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> Outcome:
        """Do `then` if all compares hold, else `otherwise`. Raises EtcdUnknown if its answer was lost."""
        request = kv_pb2.TxnRequest(compare=compares, success=then, failure=otherwise)
        return Outcome(await self._call(_TXN, request, kv_pb2.TxnResponse, repeatable=False))

    async def write(self, operations: Iterable[Operation]) -> None:
        """Do steps without a condition, in as few transactions as they fit in. What fails leaves the later ones undone.

        Raises EtcdUnknown if an answer was lost.
        """
        for chunk in transaction.chunks(operations):
            await self.txn((), chunk)

    async def get(self, key: bytes) -> KeyValue | None:
        """Read a key, linearizably."""
        answer = await self._range(kv_pb2.RangeRequest(key=key))
        return transaction.key_value(answer.kvs[0]) if answer.kvs else None

    async def read(self, start: bytes, end: bytes) -> Reading:
        """Read all keys from `start` to before `end` as of one revision, linearizably, in pages.

        Raises Compacted if that revision was compacted between two pages: read again.
        """
        request = kv_pb2.RangeRequest(key=start, range_end=end, limit=PAGE)
        answer = await self._range(request)
        revision = answer.header.revision
        found = [transaction.key_value(kv) for kv in answer.kvs]
        while answer.more:
            request.key = found[-1].key + b"\0"
            request.revision = revision
            answer = await self._range(request)
            found += [transaction.key_value(kv) for kv in answer.kvs]
        return Reading(found, revision)

    async def grant(self, ttl: Micros) -> Lease:
        """Make a lease. If an answer was lost, one that nobody knows of may be left to expire."""
        request = lease_pb2.LeaseGrantRequest(ttl=max(1, -(-ttl // bounds.SECOND)))
        answer = await self._call(_GRANT, request, lease_pb2.LeaseGrantResponse, repeatable=True)
        return Lease(answer.id, answer.ttl * bounds.SECOND)

    async def revoke(self, lease: int) -> bool:
        """End a lease, and delete the keys that go with it. False: there is none, any more."""
        request = lease_pb2.LeaseRevokeRequest(id=lease)
        try:
            await self._call(_REVOKE, request, lease_pb2.LeaseRevokeResponse, repeatable=True)
        except LeaseNotFound:
            return False
        return True

    async def server(self) -> Server:
        """Ask what kind of etcd answers, and warn of versions that cannot be relied on."""
        status = await self._call(_STATUS, server_pb2.StatusRequest(), server_pb2.StatusResponse, repeatable=True)
        members = await self._call(
            _MEMBERS, server_pb2.MemberListRequest(), server_pb2.MemberListResponse, repeatable=True
        )
        server = Server(
            version=status.version,
            members=len(members.members),
            database_bytes=status.db_size,
            cluster_id=status.header.cluster_id,
            member_id=status.header.member_id,
        )
        if server.is_inconsistent:
            _log.warning(
                "etcd_version_inconsistent",
                version=server.version,
                members=server.members,
                advice="members of 3.5.0 to 3.5.2 may disagree on what was written: use 3.5.13 or newer",
            )
        return server

    @asynccontextmanager
    async def stream(self, method: str, answer: type[Answer], metadata: Metadata = ()) -> AsyncIterator[Stream[Answer]]:
        """Open a stream to the current endpoint, and leave that endpoint if the stream breaks inside."""
        await self._log_in()
        async with self._endpoints.connection() as connection:
            stream = Stream(connection.stream(method, answer, metadata + self._token))
            try:
                yield stream
            except (StreamBroken, ForeignCluster) as error:
                # Perhaps because the login is no longer good: a stream does not tell reliably.
                self._token = ()
                await self._endpoints.leave(connection, silent=isinstance(error, StreamBroken) and error.silent)
                raise
            finally:
                stream.cancel()

    def retries(self) -> Iterator[Micros]:
        """Return how long to wait before each new try at something that failed."""
        return backoff.delays(FIRST_RETRY, LONGEST_RETRY, self._source)

    def note(self, header: kv_pb2.ResponseHeader) -> None:
        """Note who answered. Raises ForeignCluster if it is another cluster than before."""
        self.member_id = header.member_id
        if self.cluster_id is None:
            self.cluster_id = header.cluster_id
        elif header.cluster_id != self.cluster_id:
            raise ForeignCluster(self.cluster_id, header.cluster_id)

    async def _range(self, request: kv_pb2.RangeRequest) -> kv_pb2.RangeResponse:
        return await self._call(_RANGE, request, kv_pb2.RangeResponse, repeatable=True)

    async def _log_in(self) -> None:
        if self._user is None or self._token:
            return
        request = server_pb2.AuthenticateRequest(name=self._user.name, password=self._user.password())
        answer = await self._try_endpoints(_AUTHENTICATE, request, server_pb2.AuthenticateResponse, repeatable=True)
        self._token = (("token", answer.token),)

    async def _call(self, method: str, request: Message, answer: type[Answer], *, repeatable: bool) -> Answer:
        await self._log_in()
        try:
            return await self._try_endpoints(method, request, answer, repeatable=repeatable)
        except EtcdRefused as refused:
            if self._user is None or not refused.is_about_login:
                raise
        # Refused before anything was applied, so it may be sent again.
        self._token = ()
        await self._log_in()
        return await self._try_endpoints(method, request, answer, repeatable=repeatable)

    async def _try_endpoints(self, method: str, request: Message, answer: type[Answer], *, repeatable: bool) -> Answer:
        reason = ""
        for _ in range(len(self._endpoints)):
            async with self._endpoints.connection() as connection:
                left = await self._connected(connection)
                if left is None:
                    reason = f"no connection to {connection.target}"
                    continue
                try:
                    call = connection.unary(method, answer)
                    result = await call(request, timeout=left / bounds.SECOND, metadata=self._token or None)
                except aio.AioRpcError as error:
                    if error.code() in _REFUSALS:
                        raise _refusal(error) from None
                    silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                    await self._endpoints.leave(connection, silent=silent)
                    reason = f"{connection.target}: {error.code().name}: {error.details()}"
                    if not repeatable:
                        raise EtcdUnknown(reason) from None
                    continue
                await self._note_answer(connection, result)
                return result
        raise EtcdUnavailable(reason)

    async def _connected(self, connection: Connection) -> Micros | None:
        """Wait until there is a connection; return what is left of the deadline, or leave the endpoint."""
        if connection.is_ready:
            return self.deadline
        start = self._clock.elapsed()
        silent = False
        try:
            async with asyncio.timeout(self.deadline / bounds.SECOND):
                if await connection.ready():
                    return max(bounds.MILLISECOND, start + self.deadline - self._clock.elapsed())
        except TimeoutError:
            silent = True
        await self._endpoints.leave(connection, silent=silent)
        return None

    async def _note_answer(self, connection: Connection, answer: Any) -> None:
        try:
            self.note(answer.header)
        except ForeignCluster:
            await self._endpoints.leave(connection, silent=False)
            raise


def _refusal(error: aio.AioRpcError) -> EtcdRefused:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
        return LeaseNotFound(code.name, details)
    if code is grpc.StatusCode.OUT_OF_RANGE and "compacted" in details:
        return Compacted(code.name, details)
    return EtcdRefused(code.name, details)
