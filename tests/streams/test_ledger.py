"""The ledger holds what the worker's own books hold, however assignments, lists and outcomes cross."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from streams.node_side import an_assignment

from duecourse.server.core.lease import Holder
from duecourse.server.core.task import ShardId
from duecourse.server.streams.ledger import Ledger


def digest_of(tokens: set[bytes]) -> tuple[int, int]:
    digest = 0
    for token in tokens:
        digest ^= int.from_bytes(token[:8], "big")
    return len(tokens), digest


class LedgerAndWorker(RuleBasedStateMachine):
    """The worker receives assignments late; what it says arrives at once and in order."""

    tokens = Bundle("tokens")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.holder = Holder(1, "default", "w", "i", 0)
        self.sent = 0
        self.on_the_way: list[tuple[int, bytes]] = []
        self.received = 0
        self.held: set[bytes] = set()
        self.counted: set[bytes] = set()
        self.unrecorded: set[bytes] = set()
        self.count = 0

    @rule(target=tokens, size=st.integers(1, 3))
    def assign(self, size: int) -> bytes:
        self.sent += 1
        token = b""
        for _ in range(size):
            self.count += 1
            assignment = an_assignment(f"task-{self.count}", self.holder, ShardId(0))
            assignment.lease.assignment_number = self.sent
            self.ledger.assigned(assignment.lease)
            token = assignment.lease.token
            self.on_the_way.append((self.sent, token))
        return token

    @rule()
    def receive(self) -> None:
        if self.received < self.sent:
            self.received += 1
            received = {token for number, token in self.on_the_way if number == self.received}
            self.held |= received
            self.counted |= received

    @rule(token=tokens)
    def end(self, token: bytes) -> None:
        if token in self.held:
            self.held.discard(token)
            self.counted.discard(token)
            self.unrecorded.add(token)
            self.ledger.conclude(token)

    @rule(token=tokens)
    def record(self, token: bytes) -> None:
        if token in self.unrecorded:
            self.ledger.decided(token)
            self.unrecorded.discard(token)

    @rule(token=tokens)
    def lose(self, token: bytes) -> None:
        if token in self.held:
            self.ledger.lost(token)
            self.held.discard(token)
            self.counted.discard(token)

    @rule(share=st.integers(1, 3))
    def list_all(self, share: int) -> None:
        listed = self.held | self.unrecorded
        led = {token for token in listed if token[0] % share == 0}
        self.ledger.reset(listed, led, self.received)
        self.counted = self.held & led

    @invariant()
    def the_digests_agree(self) -> None:
        assert self.ledger.digest(self.received) == digest_of(self.counted)
        assert self.ledger.undecided == len(self.unrecorded)


LedgerAndWorker.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLedgerAndWorker = LedgerAndWorker.TestCase


def test_a_lease_that_was_dropped_by_the_worker_leaves_with_its_list() -> None:
    ledger = Ledger()
    assignment = an_assignment("t", Holder(1, "default", "w", "i", 0), ShardId(0))
    assignment.lease.assignment_number = 1
    ledger.assigned(assignment.lease)
    ledger.reset(set(), set(), 0)
    assert ledger.digest(1)[0] == 1, "it was not received yet"
    ledger.reset(set(), set(), 1)
    assert ledger.digest(1) == (0, 0)


def test_outcomes_that_the_worker_has_forgotten_leave_with_its_list() -> None:
    ledger = Ledger()
    ledger.conclude(b"forgotten")
    ledger.conclude(b"still unrecorded")
    ledger.reset({b"still unrecorded"}, {b"still unrecorded"}, 0)
    assert ledger.undecided == 1
    assert ledger.digest(0) == (0, 0)
