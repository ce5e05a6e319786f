"""A simulated etcd of one member or three, at addresses of the simulated network; our own client talks to it unchanged.

The members agree on one `Keyspace`, as Raft has them do, as long as more than half of them run and one of them leads:
when the leader dies or freezes, or when a majority is back, they take a second or two to elect one, and leases count
anew from then on. Without a leader nothing is answered; what was asked for meanwhile fails after a while, and some of
it is applied all the same once there is a leader again. Each watch belongs to its member: a member that is frozen says
nothing and ends nothing.

What outsiders do (delete a key, revoke a lease, compact, put an older copy in the place of the data) are methods here.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import grpc
from grpc import aio
from simulation.keyspace import Events, Keyspace, Refused
from simulation.loop import Process, SimulationLoop, wake
from simulation.network import Context, Network

from duecourse.etcd.v1 import kv_pb2, lease_pb2, server_pb2, watch_pb2
from duecourse.model import bounds
from duecourse.model.instants import Micros

_TICK: Final = 500 * bounds.MILLISECOND
"""How often leases are looked at."""
_ELECTION: Final = (1_000 * bounds.MILLISECOND, 2_200 * bounds.MILLISECOND)
_REQUEST_TIMEOUT: Final = 7 * bounds.SECOND
_LEADERLESS: Final = 3 * bounds.SECOND
"""After so long without a leader, a member ends the streams that asked for that."""
_POLL: Final = 50 * bounds.MILLISECOND
_NO_LEADER: Final = Refused(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
_TIMED_OUT: Final = Refused(grpc.StatusCode.UNAVAILABLE, "etcdserver: request timed out")
_WHOLE_STREAM: Final = -1

Moment = Callable[[str, Process], None]


class Member:
    """One server, and the process that it runs in."""

    def __init__(self, etcd: "SimulatedEtcd", number: int, name: str) -> None:
        self.number = number
        self.endpoint = name
        self.process: Process | None = None
        self._etcd = etcd
        self._starts = 0

    @property
    def is_running(self) -> bool:
        """Whether there is a process, be it frozen."""
        return self.process is not None and not self.process.is_dead

    @property
    def takes_part(self) -> bool:
        """Whether it can vote and answer."""
        return self.process is not None and not self.process.is_dead and not self.process.is_paused

    def start(self) -> None:
        """Serve."""
        self._starts += 1
        self.process = self._etcd.network.loop.process(f"{self.endpoint}#{self._starts}")
        self._etcd.network.listen(self.endpoint, self.process, _handlers(_Services(self._etcd, self)))
        self._etcd.count_votes()

    def kill(self) -> None:
        """End it without a chance to do anything; its connections are reset."""
        if self.process is not None and not self.process.is_dead:
            self.process.kill()
            self._etcd.forget_watches(self)
            self._etcd.network.gone(self.process, has_notice=True)
            self._etcd.count_votes()

    def freeze(self) -> None:
        """Let it do nothing any more; its connections stay open."""
        if self.process is not None:
            self.process.pause()
            self._etcd.count_votes()

    def thaw(self) -> None:
        """Let it go on."""
        if self.process is not None and self.process.is_paused:
            self.process.resume()
            self._etcd.count_votes()

    def tell(self, moment: str) -> None:
        """Tell that something goes by here."""
        if self.process is not None:
            self._etcd.moment(moment, self.process)


class SimulatedEtcd:
    """See the module's docstring. `moment` is told what goes by at a member: a fault may strike in it."""

    def __init__(
        self, network: Network, seed: object, size: int = 1, moment: Moment = lambda moment, process: None
    ) -> None:
        self.network = network
        self.random = random.Random(f"{seed} etcd")
        self.keyspace = Keyspace(self.random)
        self.keyspace.listeners.append(self._applied)
        self.cluster_id = self.random.getrandbits(63)
        self.members = [Member(self, number, f"etcd{number}") for number in range(size)]
        self.watches: dict[_WatchStream, None] = {}
        self.moment = moment
        self.slowness: Micros = 0
        """How long a request waits at most before it is looked at."""
        self._leader: Member | None = None
        self._leaderless_since: Micros | None = None
        self._election: asyncio.TimerHandle | None = None
        self._proposals: list[Callable[[], object]] = []
        self._is_ticking = False

    @property
    def endpoints(self) -> list[str]:
        """Where clients reach the members, in order."""
        return [member.endpoint for member in self.members]

    @property
    def leader(self) -> Member | None:
        """Who leads the others; None: nobody, and nothing can be applied."""
        return self._leader

    def start(self) -> None:
        """Start the members that do not run."""
        if not self._is_ticking:
            self._is_ticking = True
            self.network.loop.after(_TICK, self._tick)
        for member in self.members:
            if not member.is_running:
                member.start()

    def kill(self) -> None:
        """Kill all members."""
        for member in self.members:
            member.kill()

    def header(self, member: Member) -> kv_pb2.ResponseHeader:
        """Say who answers."""
        return kv_pb2.ResponseHeader(
            cluster_id=self.cluster_id, member_id=member.number + 1, revision=self.keyspace.revision
        )

    # What outsiders do.

    def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """Write a key. Returns its revision."""
        return self.keyspace.put(key, value, lease)

    def delete(self, key: bytes) -> int:
        """Delete a key. Returns how many were deleted."""
        return self.keyspace.delete(key)

    def revoke(self, lease: int) -> None:
        """Revoke a lease."""
        self.keyspace.revoke(lease)

    def compact(self) -> None:
        """Forget all that was before."""
        if self.keyspace.compacted < self.keyspace.revision:
            self.keyspace.compact(self.keyspace.revision)

    def save(self) -> Keyspace:
        """Copy the data."""
        return self.keyspace.save()

    def set_back(self, copy: Keyspace) -> None:
        """Put a copy in the place of the data of members that were killed: all that was written since is lost."""
        assert not any(member.is_running for member in self.members)
        self._proposals.clear()
        self.keyspace.set_back(copy)

    def heal(self) -> None:
        """Run, all of it, and quickly."""
        self.hasten()
        for member in self.members:
            member.thaw()
        self.start()

    def hasten(self) -> None:
        """Be slow no more."""
        self.slowness = 0

    # What members agree on.

    def count_votes(self) -> None:
        """See whether there still is a leader, and elect one if there can be."""
        voters = [member for member in self.members if member.takes_part]
        has_majority = 2 * len(voters) > len(self.members)
        if self._leader is not None and has_majority and self._leader.takes_part:
            return
        if self._leader is not None:
            self._leader = None
            self._leaderless_since = self.network.loop.now
        if has_majority and self._election is None:
            delay = 0 if len(self.members) == 1 else self.random.randint(*_ELECTION)
            self._election = self.network.loop.after(delay, self._elect)

    async def agree(self, apply: Callable[[], Any]) -> Any:
        """Apply something as soon as there is a leader. Raises Refused."""
        loop = self.network.loop
        if self.slowness:
            waited: asyncio.Future[None] = loop.create_future()
            loop.after(int(self.random.random() * self.slowness), wake, waited)
            await waited
        if self._leader is not None:
            return apply()
        answer: asyncio.Future[Any] = loop.create_future()
        self._proposals.append(partial(_settle, answer, apply))
        timer = loop.after(_REQUEST_TIMEOUT, _give_up, answer)
        try:
            return await answer
        finally:
            timer.cancel()

    def forget_watches(self, member: Member) -> None:
        """Drop the watches of a member that was killed: nothing of it runs that would."""
        for stream in [stream for stream in self.watches if stream.member is member]:
            del self.watches[stream]

    def _elect(self) -> None:
        self._election = None
        voters = [member for member in self.members if member.takes_part]
        if 2 * len(voters) <= len(self.members):
            return
        self._leader = self.random.choice(voters)
        self._leaderless_since = None
        self.keyspace.prolong(self.network.loop.now)
        proposals, self._proposals = self._proposals, []
        for propose in proposals:
            # Some were lost with the old leader.
            if self.random.random() < 0.7:
                propose()

    def _tick(self) -> None:
        loop = self.network.loop
        if self._leader is not None:
            self.keyspace.expire(loop.now)
        elif self._leaderless_since is not None and loop.now > self._leaderless_since + _LEADERLESS:
            for stream in list(self.watches):
                if stream.needs_leader:
                    stream.end()
        loop.after(_TICK, self._tick)

    def _applied(self, revision: int, events: Events) -> None:
        for stream in self.watches:
            stream.has_news.set()


class _WatchStream:
    """One stream of watches; ours ask for one watch each."""

    def __init__(self, etcd: SimulatedEtcd, member: Member, context: Context) -> None:
        self.has_news = asyncio.Event()
        self.needs_leader = ("hasleader", "true") in tuple(context.invocation_metadata())
        self._etcd = etcd
        self.member = member
        self._context = context
        self._range: tuple[bytes, bytes] | None = None
        self._next = 0
        self._progress_wanted = 0
        self._is_over = False

    def end(self) -> None:
        """End it since there is no leader."""
        self._is_over = True
        self.has_news.set()

    async def run(self) -> None:
        """Serve it. Raises Refused."""
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read(), name="watch requests")
            try:
                while not self._is_over:
                    self.has_news.clear()
                    await self._write()
                    await self.has_news.wait()
            finally:
                reader.cancel()

    async def _read(self) -> None:
        while (message := await self._context.read()) is not aio.EOF:
            if message.HasField("create_request"):
                asked = message.create_request
                self._range = (asked.key, asked.range_end)
                self._next = asked.start_revision or self._etcd.keyspace.revision + 1
                await self._say(created=True)
            else:
                self._progress_wanted += 1
            self.has_news.set()
        self.end()

    async def _write(self) -> None:
        if self._progress_wanted:
            # Before 3.4.25 and 3.5.8 it overtakes events that are still to come.
            self._progress_wanted = 0
            if self._etcd.leader is not None:
                await self._say(watch_id=_WHOLE_STREAM)
        if self._range is None:
            return
        keyspace = self._etcd.keyspace
        if self._next < keyspace.compacted:
            self._range = None
            self.member.tell("etcd watch compacted")
            await self._say(canceled=True, compact_revision=keyspace.compacted)
            return
        events: list[watch_pb2.Event] = []
        for revision, news in keyspace.since(self._next):
            self._next = revision + 1
            events += [event for event in news if _is_within(event.kv.key, *self._range)]
        if events:
            await self._say(events=events)

    async def _say(self, **fields: Any) -> None:
        await self._context.write(watch_pb2.WatchResponse(header=self._etcd.header(self.member), **fields))


class _Services:
    """What a member serves."""

    def __init__(self, etcd: SimulatedEtcd, member: Member) -> None:
        self._etcd = etcd
        self._member = member
        self._keyspace = etcd.keyspace
        self._loop: SimulationLoop = etcd.network.loop

    async def range(self, request: kv_pb2.RangeRequest, context: Context) -> Any:
        """Read, linearizably."""
        return await self._answer(context, partial(self._keyspace.range, request))

    async def txn(self, request: kv_pb2.TxnRequest, context: Context) -> Any:
        """Compare and do."""
        answer = await self._answer(context, partial(self._keyspace.txn, request))
        self._tell("etcd txn applied", context)
        return answer

    async def grant(self, request: lease_pb2.LeaseGrantRequest, context: Context) -> Any:
        """Make a lease."""

        def apply() -> lease_pb2.LeaseGrantResponse:
            number = self._keyspace.grant(request.ttl, self._loop.now)
            return lease_pb2.LeaseGrantResponse(id=number, ttl=self._keyspace.leases[number].ttl)

        answer = await self._answer(context, apply)
        self._tell("etcd lease granted", context)
        return answer

    async def revoke(self, request: lease_pb2.LeaseRevokeRequest, context: Context) -> Any:
        """End a lease."""

        def apply() -> lease_pb2.LeaseRevokeResponse:
            self._keyspace.revoke(request.id)
            return lease_pb2.LeaseRevokeResponse()

        return await self._answer(context, apply)

    async def status(self, request: server_pb2.StatusRequest, context: Context) -> Any:
        """Tell how it is."""
        return server_pb2.StatusResponse(header=self._etcd.header(self._member), version="3.5.13", leader=1)

    async def members(self, request: server_pb2.MemberListRequest, context: Context) -> Any:
        """Tell who belongs to the cluster."""
        members = [server_pb2.Member(id=one.number + 1, name=one.endpoint) for one in self._etcd.members]
        return server_pb2.MemberListResponse(header=self._etcd.header(self._member), members=members)

    async def keep_alive(self, _: None, context: Context) -> None:
        """Take signs of life."""
        while (beat := await context.read()) is not aio.EOF:
            try:
                ttl = await self._etcd.agree(partial(self._beat, beat.id))
            except Refused as refused:
                await context.abort(refused.code, refused.details)
            header = self._etcd.header(self._member)
            await context.write(lease_pb2.LeaseKeepAliveResponse(header=header, id=beat.id, ttl=ttl))

    async def watch(self, _: None, context: Context) -> None:
        """Tell what changes."""
        stream = _WatchStream(self._etcd, self._member, context)
        self._etcd.watches[stream] = None
        try:
            await stream.run()
        finally:
            self._etcd.watches.pop(stream, None)
        await context.abort(_NO_LEADER.code, _NO_LEADER.details)

    def _beat(self, number: int) -> int:
        return self._keyspace.beat(number, self._loop.now)

    async def _answer(self, context: Context, apply: Callable[[], Any]) -> Any:
        try:
            answer = await self._etcd.agree(apply)
        except Refused as refused:
            await context.abort(refused.code, refused.details)
        answer.header.CopyFrom(self._etcd.header(self._member))
        return answer

    def _tell(self, moment: str, context: Context) -> None:
        """Tell what was done, as a moment of whom it was done for: of a node, mostly."""
        self._etcd.moment(moment, context._call.client)


def _handlers(services: _Services) -> Sequence[grpc.GenericRpcHandler]:
    served: dict[str, dict[str, Any]] = {
        "KV": {
            "Range": _unary(services.range, kv_pb2.RangeRequest),
            "Txn": _unary(services.txn, kv_pb2.TxnRequest),
        },
        "Lease": {
            "LeaseGrant": _unary(services.grant, lease_pb2.LeaseGrantRequest),
            "LeaseRevoke": _unary(services.revoke, lease_pb2.LeaseRevokeRequest),
            "LeaseKeepAlive": _stream(services.keep_alive, lease_pb2.LeaseKeepAliveRequest),
        },
        "Watch": {"Watch": _stream(services.watch, watch_pb2.WatchRequest)},
        "Maintenance": {"Status": _unary(services.status, server_pb2.StatusRequest)},
        "Cluster": {"MemberList": _unary(services.members, server_pb2.MemberListRequest)},
    }
    return [grpc.method_handlers_generic_handler(f"etcdserverpb.{name}", methods) for name, methods in served.items()]


def _unary(method: Any, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(method, request.FromString, _serialise)


def _stream(method: Any, request: Any) -> Any:
    return grpc.stream_stream_rpc_method_handler(method, request.FromString, _serialise)


def _serialise(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _is_within(key: bytes, start: bytes, end: bytes) -> bool:
    return start <= key < end if end else key == start


def _settle(answer: "asyncio.Future[Any]", apply: Callable[[], Any]) -> None:
    """Apply, whether or not somebody still waits for it."""
    try:
        result = apply()
    except Refused as refused:
        if not answer.done():
            answer.set_exception(refused)
        return
    if not answer.done():
        answer.set_result(result)


def _give_up(answer: "asyncio.Future[Any]") -> None:
    if not answer.done():
        answer.set_exception(_TIMED_OUT)
