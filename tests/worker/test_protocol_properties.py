"""What the protocol machine promises, whatever two nodes, the handlers and the time do to it.

The nodes here keep their own books of credit, leases and outcomes from what is said on the wire, and compare.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from services.scripted_node import assignment, token_of
from services.worker_machine import TYPES, Machine

from duecourse.model import bounds
from duecourse.v1 import worker_service_pb2 as pb
from duecourse.worker.attempt import Attempt, Phase

NODES = ("a", "b")
ADDRESSES = (*NODES, "b too")
"""At the last one the second node is, under another address."""
SHARDS = (1, 2, 3)
LEASE = 15


@dataclass
class Node:
    """One node's books of its stream."""

    credit: int = 0
    withdrawn: int = 0
    held: set[bytes] = field(default_factory=set)
    sent_at: list[int] = field(default_factory=list)
    assigned_at: dict[bytes, int] = field(default_factory=dict)
    terms: dict[int, int] = field(default_factory=dict)

    def digest(self) -> tuple[int, int]:
        digest = 0
        for token in self.held:
            digest ^= int.from_bytes(token[:8], "big")
        return len(self.held), digest


@given(
    age=st.integers(0, 3),
    events=st.lists(st.one_of(st.integers(0, 6_000), st.sampled_from(["flush", "beat", "late beat"])), max_size=12),
    last_wait=st.integers(0, 20_000),
)
def test_nothing_starts_that_has_less_than_the_margin_left(age: int, events: list[int | str], last_wait: int) -> None:
    machine = Machine(slots=1, prefetch=1)
    sent_at: list[int] = []
    machine.on_said = lambda address, message: sent_at.append(machine.now)
    machine.open()
    for _ in range(3):
        machine.wait(5 * bounds.SECOND)
        machine.flush()
    named = len(sent_at) - age
    machine.assign(assignment("t1", lease_seconds=3_600), assignment("t2", lease_seconds=LEASE), last_read=named)
    first_end = sent_at[named - 1] + LEASE * bounds.SECOND
    latest_start = first_end - bounds.LATE_ASSIGNMENT_MARGIN
    for event in events:
        if isinstance(event, int):
            machine.wait(event * bounds.MILLISECOND, tick=False)
            continue
        if event != "late beat":
            machine.wait(0)
            machine.flush()
        if event != "flush":
            named = len(sent_at) - (event == "late beat")
            latest_start = max(latest_start, sent_at[named - 1] + (LEASE - 1) * bounds.SECOND)
            machine.hear(heartbeat=pb.NodeHeartbeat(last_read=named))
    machine.wait(last_wait * bounds.MILLISECOND, tick=False)
    machine.end("t1")
    is_started = "t2" in machine.started
    is_renewed = latest_start > first_end - bounds.LATE_ASSIGNMENT_MARGIN
    is_short = first_end - machine.now < 7 * bounds.SECOND
    assert is_started or machine.ids("returned") == ["t2"] or (is_short and machine.protocol.holdings.waiting)
    if machine.now > latest_start or (is_short and not is_renewed):
        assert not is_started
    elif "beat" not in events and "late beat" not in events:
        assert is_started


class WorkerAndNodes(RuleBasedStateMachine):
    """A worker between two nodes."""

    @initialize(slots=st.integers(1, 5), prefetch=st.integers(0, 3), threads=st.integers(1, 5))
    def begin(self, slots: int, prefetch: int, threads: int) -> None:
        self.machine = Machine(slots=slots, prefetch=prefetch, threads=threads)
        self.machine.on_start = self.starts
        self.machine.on_said = self.reads
        self.total = slots + prefetch
        self.slots = slots
        self.nodes: dict[str, Node] = {}
        self.epochs = dict.fromkeys(SHARDS, 1)
        self.leaders: dict[int, str] = {}
        self.count = 0
        self.is_draining = False
        self.refused: set[str] = set()
        self.shard_of: dict[bytes, int] = {}
        self.latest_end: dict[bytes, int] = {}
        self.owed: set[bytes] = set()
        self.lost: set[bytes] = set()
        self.open("a", set())

    def starts(self, attempt: Attempt) -> None:
        assert attempt.task_id not in self.refused
        assert attempt.token not in self.owed
        assert attempt.token not in self.lost
        assert self.machine.now <= self.latest_end[attempt.token] - bounds.LATE_ASSIGNMENT_MARGIN

    # The stream.

    @rule(address=st.sampled_from(ADDRESSES), leads=st.sets(st.sampled_from(SHARDS)))
    def open(self, address: str, leads: set[int]) -> None:
        terms = [
            pb.Term(shard=shard, epoch=self.epochs[shard]) for shard in leads if self.leaders.get(shard) == address
        ]
        self.nodes[address] = Node(terms={term.shard: term.epoch for term in terms})
        stream = self.machine.open(address, welcome=False)
        self.machine.hear(address, welcome=pb.Welcome(protocol_version=1, node_id=address[0], terms=terms))
        assert stream.is_serving
        for other in set(self.nodes) - {address}:
            if other[0] == address[0]:
                assert not self.machine.streams.pop(other).is_serving
                del self.nodes[other]
        self.flush()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.nodes)))
        self.machine.close(address)
        del self.nodes[address]

    @rule()
    def flush(self) -> None:
        self.machine.flush()
        for address, node in self.nodes.items():
            assert node.credit == self.machine.streams[address].account.out

    def reads(self, address: str, message: pb.StreamAssignmentsRequest) -> None:
        node = self.nodes[address]
        node.sent_at.append(self.machine.now)
        match message.WhichOneof("event"):
            case "credit":
                node.credit += message.credit.delta
                assert node.credit + node.withdrawn >= 0
                if message.credit.delta < 0:
                    node.credit -= message.credit.delta
                    node.withdrawn = -message.credit.delta
            case "goodbye":
                node.credit = node.withdrawn = 0
            case "leases_held":
                listed = {lease.lease_token for lease in message.leases_held.leases}
                assert listed == {*self.machine.protocol.holdings.held, *self.machine.protocol.outcomes.unrecorded}
                node.held = {
                    token
                    for token in listed
                    if self.shard_of[token] in node.terms and not self.was_told(address, token)
                }
            case "heartbeat":
                assert (message.heartbeat.lease_count, message.heartbeat.lease_digest) == node.digest()
            case "succeeded":
                node.held -= {one.attempt.lease_token for one in message.succeeded.attempts}
            case "returned":
                node.held -= {one.lease_token for one in message.returned.attempts}

    def was_told(self, address: str, token: bytes) -> bool:
        """Tell whether the outcome of a lease was said on the stream before the message at hand."""
        for message in self.machine.said[address][:-1]:
            told = {one.attempt.lease_token for one in message.succeeded.attempts}
            if token in told | {one.lease_token for one in message.returned.attempts}:
                return True
        return False

    # What nodes say.

    @precondition(lambda self: self.nodes)
    @rule(
        data=st.data(),
        count=st.integers(1, 3),
        task_type=st.sampled_from(TYPES),
        shard=st.sampled_from(SHARDS),
        age=st.integers(0, 5),
        is_stale=st.booleans(),
    )
    def assign(self, data: st.DataObject, count: int, task_type: str, shard: int, age: int, is_stale: bool) -> None:
        self.flush()
        address = data.draw(st.sampled_from(sorted(self.nodes)))
        node = self.nodes[address]
        epoch = self.epochs[shard] - (is_stale and self.epochs[shard] > 1)
        known = self.machine.protocol._terms.highest(shard)
        last_read = max(1, len(node.sent_at) - age)
        batch = []
        for _ in range(min(count, node.credit)):
            self.count += 1
            task_id = f"t{self.count}"
            batch.append(assignment(task_id, task_type, shard=shard, epoch=epoch, lease_seconds=LEASE))
            token = token_of(task_id)
            self.latest_end[token] = node.sent_at[last_read - 1] + LEASE * bounds.SECOND
            self.shard_of[token] = shard
            node.assigned_at[token] = len(node.sent_at)
            node.credit -= 1
            if epoch < known:
                self.refused.add(task_id)
            else:
                node.held.add(token)
        self.machine.assign(*batch, address=address, last_read=last_read)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), age=st.integers(0, 5))
    def beat(self, data: st.DataObject, age: int) -> None:
        address = data.draw(st.sampled_from(sorted(self.nodes)))
        node = self.nodes[address]
        named = max(1, len(node.sent_at) - age)
        for token in self.latest_end:
            # By the contract's letter a later heartbeat renews; the machine may be stricter, never laxer.
            if token in self.machine.protocol.holdings.held:
                end = node.sent_at[named - 1] + LEASE * bounds.SECOND
                self.latest_end[token] = max(self.latest_end[token], end)
        self.machine.hear(address, heartbeat=pb.NodeHeartbeat(last_read=named))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), shard=st.sampled_from(SHARDS))
    def begin_term(self, data: st.DataObject, shard: int) -> None:
        address = data.draw(st.sampled_from(sorted(self.nodes)))
        self.epochs[shard] += 1
        self.leaders[shard] = address
        term = pb.Term(shard=shard, epoch=self.epochs[shard])
        self.nodes[address].terms[shard] = self.epochs[shard]
        self.machine.hear(address, term_started=pb.TermStarted(request=self.epochs[shard], terms=[term]))

    @precondition(lambda self: self.leaders)
    @rule(data=st.data(), is_late=st.booleans())
    def end_term(self, data: st.DataObject, is_late: bool) -> None:
        shard = data.draw(st.sampled_from(sorted(self.leaders)))
        address = self.leaders[shard]
        if address not in self.nodes:
            return
        term = pb.Term(shard=shard, epoch=self.epochs[shard] - is_late)
        self.machine.hear(address, term_ended=pb.TermEnded(terms=[term]))
        if not is_late:
            del self.leaders[shard]
            self.nodes[address].terms.pop(shard, None)
            assert self.machine.protocol._terms.leader(shard) is not self.machine.streams[address]

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def answer_withdrawals(self, data: st.DataObject) -> None:
        self.flush()
        for address, node in self.nodes.items():
            if node.withdrawn:
                void = min(node.withdrawn, node.credit)
                node.credit -= void
                node.withdrawn = 0
                self.machine.hear(address, credit_returned=pb.CreditReturned(count=void))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), waiting=st.sampled_from([0, 1, 2, 50]))
    def demand(self, data: st.DataObject, waiting: int) -> None:
        address = data.draw(st.sampled_from(sorted(self.nodes)))
        self.machine.hear(address, demand=pb.Demand(waiting=waiting))
        account = self.machine.streams[address].account
        if waiting and not self.is_draining and self.machine.protocol.free == 0:
            # What is idle elsewhere comes here, or all of it is on its way.
            others = [stream.account for stream in self.machine.streams.values() if stream.account is not account]
            is_settled = account.out or any(other.withdrawing for other in others) or account.withdrawing
            assert is_settled or not any(other.out for other in others if not other.demand)

    @precondition(lambda self: self.nodes and self.owed)
    @rule(
        data=st.data(),
        kind=st.sampled_from(
            [
                pb.OUTCOME_VERDICT_RECORDED,
                pb.OUTCOME_VERDICT_LEASE_LOST,
                pb.OUTCOME_VERDICT_UNKNOWN_TOKEN,
                pb.OUTCOME_VERDICT_NOT_LEADER,
            ]
        ),
    )
    def answer_outcome(self, data: st.DataObject, kind: pb.OutcomeVerdict.ValueType) -> None:
        self.flush()
        address = data.draw(st.sampled_from(sorted(self.nodes)))
        token = data.draw(st.sampled_from(sorted(self.owed)))
        if not self.was_told_at_all(address, token):
            return
        leader = data.draw(st.sampled_from(["", *ADDRESSES]))
        record = pb.OutcomeRecord(lease_token=token, verdict=kind, leader=leader)
        if kind != pb.OUTCOME_VERDICT_NOT_LEADER:
            self.owed.discard(token)
            for node in self.nodes.values():
                node.held.discard(token)
        self.machine.hear(address, outcomes_recorded=pb.OutcomesRecorded(others=[record]))

    def was_told_at_all(self, address: str, token: bytes) -> bool:
        self.machine.said[address].append(pb.StreamAssignmentsRequest())
        try:
            return self.was_told(address, token)
        finally:
            self.machine.said[address].pop()

    @precondition(lambda self: self.nodes and self.machine.protocol.holdings.held)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.machine.protocol.holdings.held)))
        self.lost.add(token)
        for node in self.nodes.values():
            node.held.discard(token)
        address = data.draw(st.sampled_from(sorted(self.nodes)))
        self.machine.hear(address, lease_lost=pb.LeaseLost(lease_tokens=[token]))

    @precondition(lambda self: self.nodes and self.machine.protocol.holdings.held)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.machine.protocol.holdings.held)))
        address = data.draw(st.sampled_from(sorted(self.nodes)))
        if self.machine.protocol.holdings.held[token].phase is Phase.WAITING:
            self.owed.add(token)
        self.machine.hear(address, cancel_requested=pb.CancelRequested(lease_tokens=[token]))

    # What the worker does.

    @precondition(lambda self: self.machine.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.machine.running)))
        if token_of(task_id) not in self.lost:
            self.owed.add(token_of(task_id))
        self.machine.end(task_id)

    @rule(duration=st.sampled_from([1, 1_000, 5_000, 7_250, 14_500]), ticks=st.booleans())
    def wait(self, duration: int, ticks: bool) -> None:
        self.machine.wait(duration * bounds.MILLISECOND, tick=ticks)

    @precondition(lambda self: not self.is_draining and self.count >= 10)
    @rule()
    def drain(self) -> None:
        self.is_draining = True
        self.machine.drain()
        for node in self.nodes.values():
            node.credit = node.withdrawn = 0

    # What always holds.

    @invariant()
    def credit_is_conserved(self) -> None:
        if not hasattr(self, "machine"):
            return
        protocol = self.machine.protocol
        assert len(protocol.holdings.running) == len(self.machine.running) <= self.slots
        assert protocol.out + protocol.holdings.waiting + len(protocol.holdings.running) + protocol.free == self.total
        assert protocol.free >= 0
        assert all(stream.account.out >= 0 for stream in self.machine.streams.values())
        if self.nodes and not self.is_draining:
            withdrawing = any(stream.account.withdrawing for stream in self.machine.streams.values())
            assert protocol.free == 0 or withdrawing

    @invariant()
    def no_outcome_is_dropped_before_its_verdict(self) -> None:
        if not hasattr(self, "machine"):
            return
        unrecorded = self.machine.protocol.outcomes.unrecorded
        assert self.owed <= set(unrecorded)
        assert not self.lost & set(unrecorded)
        assert all(attempt.phase is Phase.ENDED for attempt in unrecorded.values())
        # What was returned unstarted is owed as well.
        self.owed |= set(unrecorded)

    @invariant()
    def every_outcome_is_queued_or_sent_or_has_no_home(self) -> None:
        if not hasattr(self, "machine"):
            return
        outcomes = self.machine.protocol.outcomes
        serials = {stream.serial for stream in self.machine.streams.values()}
        queued = {one.token for stream in self.machine.streams.values() for one in stream.outcomes}
        for token, attempt in outcomes.unrecorded.items():
            is_queued = token in queued
            assert is_queued == attempt.is_queued
            assert is_queued or attempt.sent_on in serials or token in outcomes._homeless

    def teardown(self) -> None:
        """When all is well again, everything ends."""
        if not hasattr(self, "machine"):
            return
        self.machine.drain()
        for address in NODES:
            self.nodes[address] = Node()
            self.machine.open(address)
        self.machine.end(*list(self.machine.running))
        for _ in range(3):
            self.machine.wait(bounds.SECOND)
            for address in NODES:
                self.machine.flush()
                self.machine.record(*list(self.machine.protocol.outcomes.unrecorded), address=address)
        assert self.machine.protocol.is_idle


TestWorkerAndNodes = WorkerAndNodes.TestCase
TestWorkerAndNodes.settings = settings(max_examples=120, stateful_step_count=60)
