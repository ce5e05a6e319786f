"""A worker's protocol machine in the hands of a test: the test is the clock, the nodes and the handlers."""

from collections.abc import Callable
from typing import Any

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.v1 import worker_service_pb2 as pb
from duecourse.worker import results
from duecourse.worker.attempt import Attempt, Outcome, StopReason
from duecourse.worker.capacity import Capacity, Introduction
from duecourse.worker.holdings import Action, Start, Stop
from duecourse.worker.node_stream import NodeStream
from duecourse.worker.protocol import Protocol

TYPES = ("note", "block")


class Machine:
    """A protocol machine, what it has asked of its runner, and what it has said."""

    def __init__(self, *, slots: int = 4, prefetch: int = 0, threads: int = 4) -> None:
        capacity = Capacity(slots=slots, prefetch=prefetch, threads=threads, threaded=frozenset({"block"}))
        self.protocol = Protocol(
            Introduction(
                namespace="default",
                worker="tester",
                incarnation="0123456789abcdef",
                queues=("default",),
                task_types=TYPES,
                library="test",
            ),
            capacity,
        )
        self.now: Micros = 1_000 * bounds.SECOND
        self.running: dict[str, Attempt] = {}
        self.started: list[str] = []
        self.stopped: list[tuple[str, StopReason]] = []
        self.streams: dict[str, NodeStream] = {}
        self.said: dict[str, list[pb.StreamAssignmentsRequest]] = {}
        self.assigned: dict[str, int] = {}
        self.on_start: Callable[[Attempt], None] = lambda attempt: None
        self.on_said: Callable[[str, pb.StreamAssignmentsRequest], None] = lambda address, message: None

    def open(self, address: str = "a", *, welcome: bool = True, **fields: Any) -> NodeStream:
        """Open a stream, and let the node welcome the worker."""
        stream = self.streams[address] = self.protocol.opened(address, self.now)
        self.said[address] = []
        self.assigned[address] = 0
        self.flush()
        if welcome:
            fields.setdefault("terms", [pb.Term(shard=1, epoch=1)])
            fields.setdefault("node_id", address)
            self.hear(address, welcome=pb.Welcome(protocol_version=1, **fields))
            self.flush()
        return stream

    def close(self, address: str = "a") -> None:
        """End a stream."""
        self.protocol.closed(self.streams.pop(address))

    def hear(self, address: str = "a", **event: Any) -> None:
        """Let a node say something, and send nothing yet."""
        message = pb.StreamAssignmentsResponse(**event)
        self.perform(self.protocol.received(self.streams[address], message, self.now))

    def assign(self, *assignments: pb.Assignment, address: str = "a", last_read: int | None = None) -> None:
        """Let a node send a batch; by default it has read all that was said."""
        self.assigned[address] += 1
        read = len(self.said[address]) if last_read is None else last_read
        batch = pb.Assignments(number=self.assigned[address], last_read=read, assignments=assignments)
        self.hear(address, assignments=batch)

    def end(self, *task_ids: str, outcome: Outcome = results.NO_RESULT) -> None:
        """Let handlers end, all in one turn and alike."""
        self.perform(self.protocol.ended([(self.running.pop(task_id), outcome) for task_id in task_ids], self.now))

    def record(self, *tokens: bytes, address: str = "a") -> None:
        """Let a node say that outcomes are recorded."""
        self.hear(address, outcomes_recorded=pb.OutcomesRecorded(recorded=tokens))

    def wait(self, duration: Micros, *, tick: bool = True) -> None:
        """Let time pass, with the ticker or without it."""
        self.now += duration
        if tick:
            self.perform(self.protocol.tick(self.now))

    def drain(self) -> None:
        """Let the worker begin to stop."""
        self.protocol.drain()

    def flush(self) -> list[pb.StreamAssignmentsRequest]:
        """Send everything that waits, on all streams; return it."""
        sent = []
        for address, stream in self.streams.items():
            messages = self.protocol.outgoing(stream, self.now)
            assert not stream.has_outgoing
            for message in messages:
                assert message.number == len(self.said[address]) + 1
                self.said[address].append(message)
                self.on_said(address, message)
            sent.extend(messages)
        return sent

    def told(self, event: str, address: str = "a") -> list[Any]:
        """Flush, and return what was said under one name on a stream since it was opened."""
        self.flush()
        return [getattr(one, event) for one in self.said[address] if one.WhichOneof("event") == event]

    def ids(self, event: str, address: str = "a") -> list[str]:
        """Flush, and return the tasks that were named under started, succeeded, failed or returned."""
        attempts = [attempt for batch in self.told(event, address) for attempt in batch.attempts]
        is_plain = event in ("started", "returned")
        return [attempt.task_id if is_plain else attempt.attempt.task_id for attempt in attempts]

    def credit(self, address: str = "a") -> int:
        """Flush, and return the sum of the credit that was told on a stream."""
        return sum(one.delta for one in self.told("credit", address))

    def perform(self, actions: list[Action]) -> None:
        """Do what a runner would."""
        for action in actions:
            match action:
                case Start(attempts):
                    for attempt in attempts:
                        self.on_start(attempt)
                        self.running[attempt.task_id] = attempt
                        self.started.append(attempt.task_id)
                case Stop(attempts, reason):
                    self.stopped.extend((attempt.task_id, reason) for attempt in attempts)
