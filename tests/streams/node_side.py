"""The node around a stream under test, and a worker that says what a test wants: no gRPC, no clock, no loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from duecourse.model import bounds, slots
from duecourse.model.instants import Micros
from duecourse.server.core.effects import Assignment
from duecourse.server.core.events import End, Event, Hold, Report, Start, Unsent
from duecourse.server.core.lease import Holder, Lease
from duecourse.server.core.task import (
    DEFAULT_POLICY,
    Attempt,
    Delivery,
    Epoch,
    Lane,
    Progress,
    ShardId,
    Task,
    TaskKey,
    TaskState,
)
from duecourse.server.leadership import Member
from duecourse.server.streams.hub import Hub
from duecourse.server.streams.worker_stream import WorkerStream
from duecourse.server.telemetry.metrics import Metrics
from duecourse.v1 import worker_service_pb2 as pb

SHARDS = 4
UTC: Micros = 1_800_000_000 * bounds.SECOND
HEARTBEAT: Micros = 5 * bounds.SECOND
INCARNATION = "an-incarnation-of-w"


class ScriptedPort:
    """A node's loop that only writes down what it is told."""

    def __init__(self) -> None:
        self.now: Micros = 0
        self.epochs: dict[ShardId, Epoch] = {ShardId(shard): Epoch(1) for shard in range(SHARDS)}
        self.events: list[tuple[ShardId, Event]] = []
        self.credits: dict[int, int] = {}
        self.type_deltas: list[dict[str, int]] = []
        self.subscribed: list[Holder] = []

    def shard_of(self, namespace: str, task_id: str) -> ShardId:
        return self.shard_of_slot(slots.slot_of(namespace, task_id))

    def shard_of_slot(self, slot: int) -> ShardId:
        return ShardId(slots.shard_of_slot(slot, SHARDS))

    def leads(self, shard: ShardId) -> bool:
        return shard in self.epochs

    def leader_of(self, shard: ShardId) -> str:
        return "" if shard in self.epochs else "elsewhere:7400"

    def terms(self) -> Sequence[tuple[ShardId, Epoch]]:
        return list(self.epochs.items())

    def post(self, shard: ShardId, event: Event) -> None:
        if self.leads(shard):
            self.events.append((shard, event))

    def subscribe(self, holder: Holder, queues: frozenset[str], task_types: frozenset[str]) -> None:
        self.subscribed.append(holder)
        self.credits[holder.stream_id] = 0

    def credit(self, holder: Holder, delta: int, task_type_deltas: Mapping[str, int]) -> int:
        self.type_deltas.append(dict(task_type_deltas))
        unused = min(self.credits[holder.stream_id], -delta) if delta < 0 else 0
        self.credits[holder.stream_id] += delta if delta > 0 else -unused
        return unused

    def give_back(self, holder: Holder, lanes: Iterable[Lane]) -> None:
        self.credits[holder.stream_id] += len(list(lanes))

    def unsubscribe(self, holder: Holder) -> None:
        self.subscribed.remove(holder)
        del self.credits[holder.stream_id]

    def elapsed(self) -> Micros:
        return self.now

    def utc(self) -> Micros:
        return UTC + self.now

    def posted(self, kind: type[Any]) -> list[Any]:
        return [event for _, event in self.events if isinstance(event, kind)]

    @property
    def ends(self) -> list[End]:
        return self.posted(End)

    @property
    def starts(self) -> list[Start]:
        return self.posted(Start)

    @property
    def reports(self) -> list[Report]:
        return self.posted(Report)

    @property
    def holds(self) -> list[Hold]:
        return self.posted(Hold)

    @property
    def unsent(self) -> list[Unsent]:
        return self.posted(Unsent)


class ScriptedView:
    """A cluster whose members a test names."""

    coordination = "scripted"

    def __init__(self) -> None:
        self.nodes: list[Member] = []
        self.listeners: list[Callable[[], None]] = []

    def members(self) -> Sequence[Member]:
        return self.nodes

    def is_current(self) -> bool:
        return True

    def leader(self, shard: ShardId) -> Member | None:
        return None

    def subscribe(self, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)

    def become(self, **addresses: str) -> None:
        """Have these nodes, by name, and no others."""
        self.nodes = [
            Member(node_id=node_id, address=address, peer_address="", version="1")
            for node_id, address in addresses.items()
        ]
        for listener in self.listeners:
            listener()


class ScriptedWorker:
    """The worker's end of one stream."""

    def __init__(self, node: "Node", stream: WorkerStream) -> None:
        self.node = node
        self.stream = stream
        self.number = 0

    def say(self, **event: Any) -> None:
        """Send a message with the next number."""
        self.number += 1
        self.stream.receive(pb.StreamAssignmentsRequest(number=self.number, **event), self.node.port.now)

    def introduce(self, worker: str = "w", stream_number: int = 1, **fields: Any) -> None:
        """Say Hello."""
        self.say(hello=a_hello(worker, stream_number, **fields))

    def hear(self) -> list[pb.StreamAssignmentsResponse]:
        """Read all that waits."""
        messages = []
        while (message := self.stream.take()) is not None:
            messages.append(message)
        return messages

    def hear_events(self) -> list[str]:
        """Read all that waits; return the names of the events."""
        return [str(message.WhichOneof("event")) for message in self.hear()]

    def beat(self, tokens: Sequence[bytes], last_assignments: int, **progress: str) -> None:
        """Say that these leases are held, and how far some tasks have come."""
        digest = 0
        for token in tokens:
            digest ^= int.from_bytes(token[:8], "big")
        self.say(
            heartbeat=pb.WorkerHeartbeat(
                last_assignments=last_assignments,
                lease_count=len(tokens),
                lease_digest=digest,
                progress=[a_reference(task_id, progress=text) for task_id, text in progress.items()],
            )
        )

    def list_leases(self, answers: int, last_assignments: int, *leases: tuple[bytes, str, bool]) -> None:
        """Answer what is held."""
        held = pb.LeasesHeld(answers=answers, last_assignments=last_assignments)
        for token, task_id, started in leases:
            held.leases.add(lease_token=token, task_id=task_id, started=started)
        self.say(leases_held=held)


class Node:
    """A hub, and the loop beside it."""

    def __init__(self, max_streams: int = 8, node_id: str = "n1") -> None:
        self.port = ScriptedPort()
        self.view = ScriptedView()
        self.metrics = Metrics()
        self.hub = Hub(
            self.port, self.view, self.metrics, node_id=node_id, heartbeat=HEARTBEAT, max_streams=max_streams
        )
        self.wakes = 0

    def open(self) -> ScriptedWorker:
        """Open a stream, without a word yet."""
        return ScriptedWorker(self, self.hub.open(self._woken))

    def connect(self, worker: str = "w", stream_number: int = 1, **fields: Any) -> ScriptedWorker:
        """Open a stream, say Hello and hear Welcome."""
        one = self.open()
        one.introduce(worker, stream_number, **fields)
        assert one.hear_events() == ["welcome"]
        return one

    def assign(
        self, worker: ScriptedWorker, *task_ids: str, payload: bytes = b"payload", last_read: int = 1
    ) -> list[Lease]:
        """Grant tasks to a worker and send them; returns the leases."""
        assignments = [self.grant(worker, task_id, payload, last_read) for task_id in task_ids]
        assert self.hub.assign(assignments) == []
        return [assignment.lease for assignment in assignments]

    def grant(
        self, worker: ScriptedWorker, task_id: str, payload: bytes = b"payload", last_read: int = 1
    ) -> Assignment:
        """Make an assignment of a task to a worker."""
        holder = next(holder for holder in self.port.subscribed if holder.stream_id == worker.stream.stream_id)
        return an_assignment(task_id, holder, self.port.shard_of("default", task_id), payload, last_read)

    def end_streams(self) -> None:
        """Break all streams off."""
        for stream in list(self.hub._streams.values()):
            stream.end(None)

    def pass_time(self, duration: Micros, step: Micros = bounds.SECOND) -> None:
        """Let time pass as a loop does that is alive, in steps."""
        until = self.port.now + duration
        while self.port.now < until:
            self.port.now = min(until, self.port.now + step)
            self.hub.tick(self.port.now)

    def _woken(self) -> None:
        self.wakes += 1


def a_token(task_id: str) -> bytes:
    return task_id.encode().ljust(16, b"-")


def a_hello(worker: str = "w", stream_number: int = 1, **fields: Any) -> pb.Hello:
    fields = {
        "protocol_version": 1,
        "incarnation": INCARNATION,
        "queues": ["default"],
        "task_types": ["send"],
        **fields,
    }
    return pb.Hello(worker=worker, stream_number=stream_number, **fields)


def a_reference(task_id: str, **fields: Any) -> pb.AttemptRef:
    return pb.AttemptRef(lease_token=a_token(task_id), task_id=task_id, **fields)


def succeeded(*task_ids: str, **fields: Any) -> pb.Succeeded:
    return pb.Succeeded(attempts=[pb.Success(attempt=a_reference(task_id), **fields) for task_id in task_ids])


def an_assignment(
    task_id: str, holder: Holder, shard: ShardId, payload: bytes = b"payload", last_read: int = 1
) -> Assignment:
    token = a_token(task_id)
    lease_time = UTC - bounds.SECOND
    attempt = Attempt(2, 1, token, holder.worker, holder.incarnation, "n1", Epoch(1), 77, lease_time, lease_time)
    progress = Progress(TaskState.LEASED, UTC, 3, 1, 2, 2, 0, False, False, attempt)
    lane = Lane("default", "default", "send", 3, "tenant")
    run_at = UTC + 1_500_000
    task = Task(TaskKey("default", task_id), shard, lane, b"u" * 16, 5, run_at, lease_time, DEFAULT_POLICY, progress)
    lease = Lease(task, token, holder, bounds.DEFAULT_LEASE, 0, 0, 0)
    delivery = Delivery(payload, "text/plain", {"traceparent": "00-1-2-03"})
    return Assignment(lease, delivery, last_read, 90 * bounds.SECOND + 250_000, bounds.SECOND // 2)
