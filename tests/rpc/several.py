"""Several nodes on loopback ports, each with both surfaces.

What they lead, and what each knows of the others, is the test's to say, also if it is not true. Behind the surfaces is
no scheduler but one shelf for all nodes, where submissions and cancellations are kept as a store would: a repeat is
known, whichever node it comes to.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from grpc import aio
from streams.node_side import Node as StreamsSide

from duecourse.model import bounds, slots
from duecourse.model.instants import Micros
from duecourse.server.core import errors
from duecourse.server.core.effects import Cancelled, CancelResult, Submitted
from duecourse.server.core.task import Epoch, ShardId, Submission, TaskKey, TaskState
from duecourse.server.leadership import Member
from duecourse.server.rpc import ClusterDescription, NodeDescription, ShardDescription, ShardStanding
from duecourse.server.rpc.server import api_server, peer_server
from duecourse.server.rpc.surfaces import Behind, Surfaces
from duecourse.server.shards.loop import Loop
from duecourse.server.storage import ShardRow, TaskStore
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing.clock import SystemClock
from duecourse.v1 import cluster_service_pb2_grpc, task_service_pb2_grpc

SHARDS = 4
ROWS = [
    ShardRow(ShardId(n), slots.first_slot(n, SHARDS), slots.first_slot(n + 1, SHARDS), "c1", Epoch(0), b"")
    for n in range(SHARDS)
]


def task_ids(shard: int, count: int) -> list[str]:
    """Return ids of tasks that a shard holds."""
    found = [f"t{n}" for n in range(200) if shard_of(f"t{n}") == shard]
    return found[:count]


def shard_of(task_id: str) -> ShardId:
    return ShardId(slots.shard_of_slot(slots.slot_of("default", task_id), SHARDS))


@dataclass
class Shelf:
    """What is durable."""

    tasks: dict[TaskKey, Submission] = field(default_factory=dict)
    cancelled_by: dict[TaskKey, str] = field(default_factory=dict)
    submitted_to: Counter[str] = field(default_factory=Counter)
    """Submissions that were carried out, repeats included, by node."""


class View:
    """What one node knows of the others. Implements `ClusterView`."""

    coordination = "c1"

    def __init__(self) -> None:
        self.there: dict[str, Member] = {}
        self.leaders: dict[ShardId, str] = {}
        self.was_seen_lately = True
        self._listeners: list[Callable[[], None]] = []

    def members(self) -> Sequence[Member]:
        return [self.there[name] for name in sorted(self.there)]

    def is_current(self) -> bool:
        return self.was_seen_lately

    def leader(self, shard: ShardId) -> Member | None:
        return self.there.get(self.leaders.get(shard, ""))

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def tell(self) -> None:
        for listener in self._listeners:
            listener()


class LedCommands:
    """Carries out what the node leads, and tells of the rest that nobody does."""

    def __init__(self, name: str, led: dict[ShardId, Any], shelf: Shelf) -> None:
        self.failure: errors.DomainError | None = None
        """Raised by every command, before it does anything."""
        self.loses: bool = False
        """Whether commands are carried out and their answers lost."""
        self.wait: Callable[[], Awaitable[object]] | None = None
        self.mood: Callable[[], errors.DomainError | None] = lambda: None
        """What becomes of the next submission: nothing is done, and that told, or all is well."""
        self.answers: dict[str, errors.DomainError] = {}
        self.cancel_waits: list[Micros] = []
        self._name = name
        self._led = led
        self._shelf = shelf

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[Submitted | errors.DomainError]:
        await self._pause()
        return [self._submit(submission) for submission in submissions]

    async def cancel(
        self,
        namespace: str,
        task_id: str,
        request_id: str,
        fingerprint: bytes,
        expected_revision: int | None,
        wait: Micros,
    ) -> Cancelled:
        await self._pause()
        self.cancel_waits.append(wait)
        shard = shard_of(task_id)
        key = TaskKey(namespace, task_id)
        if shard not in self._led:
            raise errors.NoLeader(shard)
        if key not in self._shelf.tasks:
            raise errors.TaskNotFound(task_id)
        if expected_revision is not None:
            raise errors.RevisionMismatch(expected_revision, 7)
        is_first = self._shelf.cancelled_by.setdefault(key, request_id) == request_id
        if self.loses:
            raise errors.OutcomeUncertain
        result = CancelResult.PREVENTED if is_first else CancelResult.ALREADY_FINISHED
        return Cancelled(result, TaskState.CANCELLED, earlier_attempt_may_run=False)

    def _submit(self, submission: Submission) -> Submitted | errors.DomainError:
        if submission.shard not in self._led:
            return errors.NoLeader(submission.shard)
        if submission.task_id in self.answers:
            return self.answers[submission.task_id]
        mood = self.mood()
        if mood is not None:
            return mood
        self._shelf.submitted_to[self._name] += 1
        key = TaskKey(submission.namespace, submission.task_id)
        is_new = key not in self._shelf.tasks
        before = self._shelf.tasks.setdefault(key, submission)
        if before.fingerprint != submission.fingerprint:
            return errors.TaskExists(submission.task_id)
        return errors.OutcomeUncertain() if self.loses else Submitted(before.uid, created=is_new)

    async def _pause(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.wait is not None:
            await self.wait()


class LoopSide:
    """As much of the node's loop as its surfaces need."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.shards: dict[ShardId, Any] = {}

    def shard_of_slot(self, slot: int) -> ShardId:
        return ShardId(slots.shard_of_slot(slot, SHARDS))

    def utc(self) -> Micros:
        return self.clock.now().latest


class SmallNode:
    """One node."""

    def __init__(self, name: str, shelf: Shelf) -> None:
        self.name = name
        self.view = View()
        self.loop = LoopSide()
        self.metrics = Metrics(node_id=name)
        self.commands = LedCommands(name, self.loop.shards, shelf)
        self.drained = 0
        behind = Behind(
            node_id=name,
            commands=self.commands,
            loop=cast(Loop, self.loop),
            hub=StreamsSide(4).hub,
            store=cast(TaskStore, None),
            rows=ROWS,
            view=self.view,
            metrics=self.metrics,
            describe=self.describe,
            drain=self.drain,
        )
        self.surfaces = Surfaces(behind, has_peers=True)
        self.api = api_server(self.surfaces.api, has_reflection=False)
        assert self.surfaces.peer is not None
        self.peer = peer_server(self.surfaces.peer)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["SmallNode"]:
        self.address = f"127.0.0.1:{await self.api.start('127.0.0.1:0')}"
        self.peer_port = await self.peer.start("127.0.0.1:0")
        try:
            async with aio.insecure_channel(self.address) as channel, aio.insecure_channel(self.peer_address) as other:
                self.tasks = task_service_pb2_grpc.TaskServiceStub(channel)
                self.cluster = cluster_service_pb2_grpc.ClusterServiceStub(channel)
                self.peer_channel = other
                self.peer_tasks = task_service_pb2_grpc.TaskServiceStub(other)
                self.peer_cluster = cluster_service_pb2_grpc.ClusterServiceStub(other)
                yield self
        finally:
            await self.api.stop(0)
            await self.peer.stop(0)
            await self.surfaces.close()

    @property
    def peer_address(self) -> str:
        return f"127.0.0.1:{self.peer_port}"

    def member(self, **changes: Any) -> Member:
        described = {"address": self.address, "peer_address": self.peer_address, "version": "9.9", **changes}
        return Member(node_id=self.name, **described)

    def drain(self) -> None:
        self.drained += 1

    def describe(self) -> ClusterDescription:
        own = NodeDescription(
            self.name,
            self.address,
            "9.9",
            ready_tasks=5,
            worker_streams=2,
            wall_clock_offset=-1,
            incarnation=f"{self.name}'s start",
        )
        shards = []
        for row in ROWS:
            place = (row.shard, row.slot_from, row.slot_until)
            epoch = self.loop.shards.get(row.shard)
            if epoch is None:
                shards.append(ShardDescription(*place, ShardStanding.UNLED, "", Epoch(0), 0, 0))
            else:
                shards.append(ShardDescription(*place, ShardStanding.LED, self.name, epoch, 10 + row.shard, 1))
        return ClusterDescription("c1", self.name, [own], shards, 2)

    @property
    def peer_calls(self) -> int:
        return sum(self.metrics.peer_calls.values())


class Several:
    """Nodes `a`, `b`, ... that know each other; `lead` says who leads, and tells all."""

    def __init__(self, count: int) -> None:
        self.shelf = Shelf()
        self.nodes = [SmallNode(name, self.shelf) for name in "abcdef"[:count]]
        self._epoch = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Several"]:
        async with AsyncExitStack() as stack:
            for node in self.nodes:
                await stack.enter_async_context(node.serving())
            self.introduce(*[node.member() for node in self.nodes])
            yield self

    def introduce(self, *members: Member) -> None:
        """Have all nodes know of members, and of no others."""
        for node in self.nodes:
            node.view.there = {member.node_id: member for member in members}
            node.view.tell()

    def lead(self, node: SmallNode | None, *shards: int) -> None:
        """Have a node, or none, lead shards, and all know it."""
        self._epoch += 1
        for other in self.nodes:
            for shard in map(ShardId, shards):
                other.loop.shards.pop(shard, None)
                other.view.leaders.pop(shard, None)
                if node is not None:
                    other.view.leaders[shard] = node.name
                if other is node:
                    other.loop.shards[shard] = Epoch(self._epoch)
        for other in self.nodes:
            other.view.tell()


@asynccontextmanager
async def several(count: int) -> AsyncIterator[Several]:
    async with Several(count).serving() as nodes:
        yield nodes


LONG = 20.0
SHORT = bounds.SECOND
