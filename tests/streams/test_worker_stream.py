"""One worker's stream, by scenario."""

from typing import cast

import pytest
from google.protobuf.duration_pb2 import Duration
from streams.node_side import (
    HEARTBEAT,
    INCARNATION,
    UTC,
    Node,
    a_hello,
    a_reference,
    a_token,
    succeeded,
)

from duecourse.model import bounds
from duecourse.server.core.effects import StopReason, Verdict
from duecourse.server.core.events import OutcomeKind
from duecourse.server.core.task import Epoch, ShardId, TaskKey
from duecourse.server.streams import outbox, reading
from duecourse.server.streams.errors import ProtocolViolation, StreamEnded
from duecourse.v1 import worker_service_pb2 as pb

UNKNOWN_KIND = cast(pb.FailureKind.ValueType, 99)


@pytest.fixture
def node() -> Node:
    return Node()


# Opening.


def test_hello_is_answered_by_welcome_with_the_terms_of_the_node(node: Node) -> None:
    worker = node.open()
    worker.introduce(protocol_version=7)
    (message,) = worker.hear()
    welcome = message.welcome
    assert welcome.protocol_version == 1
    assert welcome.node_id == "n1"
    assert welcome.stream_id == worker.stream.stream_id
    assert welcome.heartbeat_interval.ToMicroseconds() == HEARTBEAT
    assert [(term.shard, term.epoch) for term in welcome.terms] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    (holder,) = node.port.subscribed
    assert (holder.namespace, holder.worker, holder.incarnation) == ("default", "w", INCARNATION)


def test_what_hello_lists_proves_presence_to_every_shard_and_no_absence(node: Node) -> None:
    node.connect(lease_tokens=[a_token("a")])
    assert [shard for shard, _ in node.port.events] == [0, 1, 2, 3]
    for hold in node.port.holds:
        assert hold.leases == {a_token("a"): (None, False)}
        assert not hold.is_complete


@pytest.mark.parametrize(
    "first",
    [
        {"credit": pb.Credit(delta=1)},
        {"heartbeat": pb.WorkerHeartbeat()},
        {"goodbye": pb.Goodbye()},
        {},
        {"hello": pb.Hello()},
        {"hello": a_hello(protocol_version=0)},
        {"hello": a_hello(worker="")},
        {"hello": a_hello(worker="w\n")},
        {"hello": a_hello(incarnation="short")},
        {"hello": a_hello(namespace="..")},
        {"hello": a_hello(queues=[])},
        {"hello": a_hello(queues=["a b"])},
        {"hello": a_hello(queues=[f"q{n}" for n in range(257)])},
        {"hello": a_hello(task_types=[])},
        {"hello": a_hello(task_types=[f"t{n}" for n in range(1025)])},
        {"hello": a_hello(stream_number=-1)},
        {"hello": a_hello(lease_tokens=[b"short"])},
        {"hello": a_hello(lease_tokens=[b"x" * 65])},
    ],
)
def test_a_stream_that_does_not_begin_with_a_proper_hello_is_ended_alone(node: Node, first: dict[str, object]) -> None:
    healthy = node.connect("healthy")
    worker = node.open()
    worker.say(**first)
    assert isinstance(worker.stream.error, ProtocolViolation)
    assert worker.hear() == []
    assert node.hub.streams == 1
    assert not healthy.stream.is_ended


def test_a_second_hello_ends_the_stream(node: Node) -> None:
    worker = node.connect()
    worker.introduce()
    assert isinstance(worker.stream.error, ProtocolViolation)
    assert node.port.subscribed == []


@pytest.mark.parametrize("number", [0, 1, 3, -1, 2**62])
def test_a_gap_in_the_numbers_ends_the_stream(node: Node, number: int) -> None:
    worker = node.connect()
    worker.stream.receive(pb.StreamAssignmentsRequest(number=number, goodbye=pb.Goodbye()), 0)
    assert isinstance(worker.stream.error, ProtocolViolation)


def test_an_event_of_a_newer_worker_is_counted_and_ignored(node: Node) -> None:
    worker = node.connect()
    worker.say()
    worker.say(credit=pb.Credit(delta=1))
    assert node.metrics.unknown_events == 1
    assert not worker.stream.is_ended


# Assignments.


def test_an_assignment_carries_all_that_a_handler_needs(node: Node) -> None:
    worker = node.connect()
    (lease,) = node.assign(worker, "a", last_read=1)
    (message,) = worker.hear()
    batch = message.assignments
    assert (batch.number, batch.last_read) == (1, 1)
    (sent,) = batch.assignments
    assert sent.lease_token == lease.token
    assert (sent.shard, sent.epoch, sent.attempt, sent.fencing_token) == (lease.task.shard, 1, 2, 77)
    assert sent.lease.ToMicroseconds() == bounds.DEFAULT_LEASE
    assert sent.time_left.ToMicroseconds() == 90_250_000
    assert sent.start_within.ToMicroseconds() == 500_000
    task = sent.task
    assert (task.namespace, task.task_id, task.queue, task.task_type) == ("default", "a", "default", "send")
    assert (task.uid, task.payload, task.content_type) == (b"u" * 16, b"payload", "text/plain")
    assert (task.priority, task.fairness_key, task.round) == (3, "tenant", 1)
    assert dict(task.headers) == {"traceparent": "00-1-2-03"}
    assert task.run_at.ToMicroseconds() == UTC + 1_500_000


def test_assignments_of_one_turn_leave_in_one_message_that_names_the_lowest_message_read(node: Node) -> None:
    worker = node.connect()
    worker.say(credit=pb.Credit(delta=5))
    first = node.assign(worker, "a", "b", last_read=2)
    second = node.assign(worker, "c", last_read=1)
    (message,) = worker.hear()
    assert [item.task.task_id for item in message.assignments.assignments] == ["a", "b", "c"]
    assert message.assignments.last_read == 1
    assert {lease.assignment_number for lease in first + second} == {1}
    (third,) = node.assign(worker, "d")
    assert third.assignment_number == 2
    assert [message.assignments.number for message in worker.hear()] == [2]


def test_large_payloads_are_spread_over_messages_that_a_client_takes_by_default(node: Node) -> None:
    worker = node.connect()
    node.assign(worker, *[f"t{n}" for n in range(20)], payload=b"x" * bounds.MAX_PAYLOAD_BYTES)
    messages = worker.hear()
    assert [message.assignments.number for message in messages] == list(range(1, len(messages) + 1))
    assert sum(len(message.assignments.assignments) for message in messages) == 20
    assert max(message.ByteSize() for message in messages) < 2 * 1024 * 1024


def test_a_heartbeat_overtakes_assignments_but_a_stop_and_the_loss_of_one_do_not(node: Node) -> None:
    worker = node.connect()
    (a, b) = node.assign(worker, "a", "b")
    holder = a.holder
    assert holder is not None
    node.hub.stops([(holder, a.token, StopReason.CANCELLED)])
    node.hub.lost([(holder, b.token)])
    node.assign(worker, "c")
    node.pass_time(HEARTBEAT)
    assert worker.hear_events() == ["heartbeat", "assignments", "cancel_requested", "lease_lost", "assignments"]


def test_no_list_is_asked_for_before_what_is_lost_is_told(node: Node) -> None:
    worker = node.connect()
    listed = a_token("listed")
    worker.list_leases(0, 0, (listed, "listed", True))
    (sent,) = node.assign(worker, "sent")
    holder = sent.holder
    assert holder is not None
    worker.hear()
    (waiting,) = node.assign(worker, "waiting")
    worker.beat([], 0)
    node.hub.lost([(holder, lease) for lease in (waiting.token, sent.token, listed)])
    messages = worker.hear()
    assert [message.WhichOneof("event") for message in messages] == [
        "lease_lost",
        "leases_wanted",
        "assignments",
        "lease_lost",
    ]
    assert list(messages[0].lease_lost.lease_tokens) == [sent.token, listed]
    assert list(messages[3].lease_lost.lease_tokens) == [waiting.token]


def test_the_ends_and_the_beginnings_of_terms_overtake_assignments(node: Node) -> None:
    worker = node.connect()
    node.assign(worker, "a")
    node.hub.terms_started([(ShardId(2), Epoch(2))])
    node.hub.term_ended(ShardId(1), Epoch(1))
    assert worker.hear_events() == ["term_ended", "term_started", "assignments"]


def test_a_term_that_is_over_is_not_said_to_have_begun_after_that(node: Node) -> None:
    worker = node.connect()
    node.hub.terms_started([(ShardId(1), Epoch(2)), (ShardId(2), Epoch(2))])
    node.hub.terms_started([(ShardId(3), Epoch(2))])
    node.hub.term_ended(ShardId(2), Epoch(2))
    ended, first, second = worker.hear()
    assert [term.shard for term in ended.term_ended.terms] == [2]
    assert [term.shard for term in first.term_started.terms] == [1]
    assert [term.shard for term in second.term_started.terms] == [3]


def test_what_waits_for_a_worker_that_does_not_read_is_bounded(node: Node) -> None:
    worker = node.connect()
    assignments = [node.grant(worker, f"t{n}", b"x" * bounds.MAX_PAYLOAD_BYTES) for n in range(100)]
    unsent = node.hub.assign(assignments)
    taken = 100 - len(unsent)
    assert 0 < taken <= outbox.MAX_BYTES // bounds.MAX_PAYLOAD_BYTES + 1
    assert unsent == [assignment.lease for assignment in assignments[taken:]]


def test_the_credit_of_what_found_no_room_comes_back_once_the_worker_reads(node: Node) -> None:
    worker = node.connect()
    holder = node.port.subscribed[0]
    assignments = [node.grant(worker, f"t{n}", b"x" * bounds.MAX_PAYLOAD_BYTES) for n in range(100)]
    unsent = node.hub.assign(assignments)
    assert node.port.credits[holder.stream_id] == 0
    worker.hear()
    assert node.port.credits[holder.stream_id] == len(unsent)


def test_a_worker_that_does_not_read_is_given_up_and_its_assignments_are_unsent(node: Node) -> None:
    worker = node.connect()
    leases = node.assign(worker, "a", "b")
    for _ in range(4):
        worker.beat([], 0)
        node.pass_time(HEARTBEAT)
    assert isinstance(worker.stream.error, StreamEnded)
    assert [event.lease for event in node.port.unsent] == leases
    assert worker.hear() == []
    assert node.hub.streams == 0


def test_a_worker_that_lets_answers_pile_up_is_given_up(node: Node) -> None:
    worker = node.connect()
    holder = node.port.subscribed[0]
    node.hub.verdicts((holder, b"%16d" % n, Verdict.UNKNOWN_TOKEN) for n in range(outbox.MAX_RECORDS + 1))
    node.hub.tick(node.port.now)
    assert isinstance(worker.stream.error, StreamEnded)


def test_an_assignment_for_a_stream_that_has_ended_comes_back(node: Node) -> None:
    worker = node.connect()
    assignment = node.grant(worker, "a")
    worker.stream.end(None)
    assert node.hub.assign([assignment]) == [assignment.lease]


# Outcomes.


def test_an_outcome_reaches_its_shard_and_what_became_of_it_the_worker(node: Node) -> None:
    worker = node.connect()
    (lease,) = node.assign(worker, "a")
    worker.hear()
    node.port.now = 10 * bounds.SECOND
    success = pb.Success(
        attempt=a_reference("a", started_ago=Duration(seconds=2, nanos=5_000)),
        result=b"{}",
        content_type="application/json",
    )
    worker.say(succeeded=pb.Succeeded(attempts=[success]))
    assert [shard for shard, _ in node.port.events] == [lease.task.shard]
    (end,) = node.port.ends
    assert end.key == TaskKey("default", "a")
    assert end.holder is lease.holder
    assert end.kind is OutcomeKind.SUCCEEDED
    assert end.result == (b"{}", "application/json")
    assert end.start_time == UTC + 8 * bounds.SECOND - 5
    node.hub.verdicts([(end.holder, end.lease_token, Verdict.RECORDED)])
    (message,) = worker.hear()
    assert list(message.outcomes_recorded.recorded) == [lease.token]


def test_refusals_say_what_became_of_an_outcome(node: Node) -> None:
    worker = node.connect()
    holder = node.port.subscribed[0]
    node.hub.verdicts([(holder, a_token("a"), Verdict.LEASE_LOST), (holder, a_token("b"), Verdict.UNKNOWN_TOKEN)])
    (message,) = worker.hear()
    assert [(one.lease_token, one.verdict) for one in message.outcomes_recorded.others] == [
        (a_token("a"), pb.OUTCOME_VERDICT_LEASE_LOST),
        (a_token("b"), pb.OUTCOME_VERDICT_UNKNOWN_TOKEN),
    ]


def test_an_outcome_of_another_stream_is_found_by_its_task_id(node: Node) -> None:
    worker = node.connect()
    worker.say(succeeded=succeeded("old"))
    (end,) = node.port.ends
    assert end.key == TaskKey("default", "old")
    assert node.port.events[0][0] == node.port.shard_of("default", "old")


def test_an_outcome_for_a_shard_that_is_led_elsewhere_is_sent_there(node: Node) -> None:
    worker = node.connect()
    (lease,) = node.assign(worker, "a")
    worker.hear()
    del node.port.epochs[lease.task.shard]
    worker.say(succeeded=succeeded("a"))
    (message,) = worker.hear()
    (other,) = message.outcomes_recorded.others
    assert other.lease_token == lease.token
    assert other.verdict == pb.OUTCOME_VERDICT_NOT_LEADER
    assert other.leader == "elsewhere:7400"
    assert node.port.ends == []


def test_failures_are_told_apart_and_cut_to_their_bounds(node: Node) -> None:
    worker = node.connect()
    kinds = {
        pb.FAILURE_KIND_RETRYABLE: OutcomeKind.RETRYABLE,
        pb.FAILURE_KIND_NON_RETRYABLE: OutcomeKind.NON_RETRYABLE,
        pb.FAILURE_KIND_TIMED_OUT: OutcomeKind.TIMED_OUT,
        pb.FAILURE_KIND_CANCELLED: OutcomeKind.CANCELLED,
    }
    for kind in kinds:
        attempt = pb.FailedAttempt(attempt=a_reference("a"), kind=kind)
        attempt.failure.type = "é" * 255
        attempt.failure.message = "no\0" + "ü" * 5_000
        attempt.retry_after.seconds = 3
        worker.say(failed=pb.Failed(attempts=[attempt]))
    ends = node.port.ends
    assert [end.kind for end in ends] == list(kinds.values())
    assert len({end.digest for end in ends}) == len(kinds)
    failure = ends[0].failure
    assert failure is not None
    assert len(failure.type.encode()) <= bounds.MAX_FAILURE_TYPE_BYTES
    assert bounds.MAX_FAILURE_MESSAGE_BYTES - 4 <= len(failure.message.encode()) <= bounds.MAX_FAILURE_MESSAGE_BYTES
    assert failure.message.endswith(reading.CUT_MARK)
    assert "\0" not in failure.message
    assert ends[0].retry_after == 3 * bounds.SECOND


def test_a_result_that_is_too_long_is_left_out_and_the_attempt_completes(node: Node) -> None:
    worker = node.connect()
    worker.say(succeeded=succeeded("a", result=b"x" * (bounds.MAX_RESULT_BYTES + 1), content_type="image/png"))
    (end,) = node.port.ends
    assert end.kind is OutcomeKind.SUCCEEDED
    assert end.result is not None
    assert end.result[1] == "text/plain"
    assert end.result[0].decode().endswith(reading.CUT_MARK)


def test_a_result_at_its_bound_is_kept_byte_for_byte(node: Node) -> None:
    worker = node.connect()
    content = bytes(range(256)) * (bounds.MAX_RESULT_BYTES // 256)
    worker.say(succeeded=succeeded("a", result=content, content_type="x\ny"))
    (end,) = node.port.ends
    assert end.result == (content, "")


def test_equal_outcomes_have_equal_digests_and_different_ones_do_not(node: Node) -> None:
    worker = node.connect()
    for result, content_type in [(b"1", "a"), (b"1", "a"), (b"2", "a"), (b"1", "b"), (b"", "")]:
        worker.say(succeeded=succeeded("a", result=result, content_type=content_type))
    worker.say(returned=pb.Returned(attempts=[a_reference("a")]))
    one, same, *others = [end.digest for end in node.port.ends]
    assert one == same
    assert len({one, *others}) == 5


@pytest.mark.parametrize(
    ("ago", "expected"),
    [
        (Duration(seconds=-5), UTC),
        (Duration(seconds=2**62), UTC - bounds.SECOND),
        (Duration(seconds=-(2**62)), UTC),
        (Duration(nanos=-1), UTC),
        (Duration(nanos=500_000), UTC - 500),
    ],
)
def test_a_start_is_never_before_its_grant_nor_in_the_future(node: Node, ago: Duration, expected: int) -> None:
    worker = node.connect()
    node.assign(worker, "a")
    worker.hear()
    worker.say(started=pb.Started(attempts=[a_reference("a", started_ago=ago)]))
    (start,) = node.port.starts
    assert start.start_time == expected


def test_a_heartbeat_passes_on_what_handlers_say_of_their_progress(node: Node) -> None:
    worker = node.connect(lease_tokens=[a_token("listed")])
    node.assign(worker, "a", "quiet")
    worker.hear()
    worker.beat([a_token("a"), a_token("quiet"), a_token("listed")], 1, a="half", listed="nearly")
    assert [(report.key, report.lease_token, report.progress) for report in node.port.reports] == [
        (TaskKey("default", "a"), a_token("a"), "half"),
        (TaskKey("default", "listed"), a_token("listed"), "nearly"),
    ]
    shards = [shard for shard, event in node.port.events if event in node.port.reports]
    assert shards == [node.port.shard_of("default", "a"), node.port.shard_of("default", "listed")]


def test_a_word_on_what_the_worker_does_not_hold_is_passed_over(node: Node) -> None:
    worker = node.connect()
    node.assign(worker, "a")
    worker.hear()
    worker.say(succeeded=succeeded("a"))
    worker.beat([], 1, a="half", unknown="half")
    assert node.port.reports == []
    assert not worker.stream.is_ended


def test_a_word_that_is_too_long_is_cut(node: Node) -> None:
    worker = node.connect()
    node.assign(worker, "a")
    worker.hear()
    worker.beat([a_token("a")], 1, a="\0\N{SNOWMAN}" * bounds.MAX_PROGRESS_BYTES)
    (report,) = node.port.reports
    assert bounds.MAX_PROGRESS_BYTES - 3 <= len(report.progress.encode()) <= bounds.MAX_PROGRESS_BYTES
    assert report.progress.startswith("\N{REPLACEMENT CHARACTER}\N{SNOWMAN}")
    assert report.progress.endswith(reading.CUT_MARK)


def test_a_retry_after_that_makes_no_sense_is_clamped(node: Node) -> None:
    worker = node.connect()
    for seconds in (-1, 2**62):
        attempt = pb.FailedAttempt(attempt=a_reference("a"), kind=pb.FAILURE_KIND_RETRYABLE)
        attempt.retry_after.seconds = seconds
        worker.say(failed=pb.Failed(attempts=[attempt]))
    assert [end.retry_after for end in node.port.ends] == [0, bounds.MAX_BACKOFF]


@pytest.mark.parametrize(
    "event",
    [
        {"succeeded": pb.Succeeded(attempts=[pb.Success()])},
        {"succeeded": pb.Succeeded(attempts=[pb.Success(attempt=pb.AttemptRef(lease_token=b"x" * 16))])},
        {"returned": pb.Returned(attempts=[pb.AttemptRef(lease_token=b"x" * 16, task_id="../\n")])},
        {"started": pb.Started(attempts=[pb.AttemptRef(lease_token=b"x" * 99, task_id="a")])},
        {"failed": pb.Failed(attempts=[pb.FailedAttempt(attempt=a_reference("a"))])},
        {"failed": pb.Failed(attempts=[pb.FailedAttempt(attempt=a_reference("a"), kind=UNKNOWN_KIND)])},
        {"heartbeat": pb.WorkerHeartbeat(last_assignments=1)},
        {"heartbeat": pb.WorkerHeartbeat(last_assignments=-1)},
        {"leases_held": pb.LeasesHeld(answers=1)},
        {"leases_held": pb.LeasesHeld(answers=-1)},
        {"leases_held": pb.LeasesHeld(last_assignments=1)},
        {"leases_held": pb.LeasesHeld(leases=[pb.HeldLease(lease_token=b"x" * 16)])},
        {"credit": pb.Credit(delta=bounds.MAX_CREDIT + 1)},
        {"credit": pb.Credit(delta=-(2**31))},
        {"credit": pb.Credit(task_type_deltas={"unheard": 1})},
        {"credit": pb.Credit(task_type_deltas={"send": bounds.MAX_CREDIT + 1})},
    ],
)
def test_what_only_a_broken_library_says_ends_its_stream_alone(node: Node, event: dict[str, object]) -> None:
    healthy = node.connect("healthy")
    worker = node.connect()
    worker.say(**event)
    assert isinstance(worker.stream.error, ProtocolViolation)
    assert not healthy.stream.is_ended
    assert len(node.port.subscribed) == 1


# Leases.


def test_a_heartbeat_that_agrees_renews_all_leases_of_the_stream(node: Node) -> None:
    worker = node.connect()
    a, b = node.assign(worker, "a", "b")
    worker.hear()
    node.port.now = 7 * bounds.SECOND
    worker.beat([], 0)
    holder = a.holder
    assert holder is not None
    assert holder.renewed_at == 7 * bounds.SECOND, "it had not received them yet"
    node.port.now = 9 * bounds.SECOND
    worker.beat([a.token, b.token], 1)
    assert holder.renewed_at == 9 * bounds.SECOND
    assert worker.hear() == []


def test_a_heartbeat_that_differs_renews_nothing_and_asks_once_for_the_list(node: Node) -> None:
    worker = node.connect()
    a, b = node.assign(worker, "a", "b")
    worker.hear()
    holder = a.holder
    assert holder is not None
    node.port.now = bounds.SECOND
    worker.beat([a.token], 1)
    worker.beat([a.token], 1)
    assert holder.renewed_at == 0
    (message,) = worker.hear()
    request = message.leases_wanted.request
    worker.list_leases(request, 1, (a.token, "a", True))
    assert holder.renewed_at == bounds.SECOND
    holds = dict(node.port.events)
    assert len(holds) == 4
    assert all(hold.is_complete and hold.last_assignments == 1 for hold in node.port.holds)
    shard = a.task.shard
    (with_a,) = [hold for of, hold in node.port.events if of == shard]
    assert getattr(with_a, "leases", None) == {a.token: (TaskKey("default", "a"), True)}
    worker.beat([a.token], 1)
    assert worker.hear() == []
    assert b.token != a.token


def test_a_heartbeat_names_no_message_that_renewed_nothing(node: Node) -> None:
    worker = node.connect()
    (a,) = node.assign(worker, "a")
    worker.hear()
    worker.beat([a.token], 1)
    worker.beat([], 1)
    worker.say(credit=pb.Credit(delta=1))
    node.hub.check_began()
    node.hub.check_succeeded()
    node.pass_time(HEARTBEAT)
    assert [m.heartbeat.last_read for m in worker.hear() if m.HasField("heartbeat")] == [2]
    worker.list_leases(1, 1, (a.token, "a", False))
    node.hub.check_began()
    worker.beat([a.token], 1)
    node.hub.check_succeeded()
    node.pass_time(HEARTBEAT)
    assert [m.heartbeat.last_read for m in worker.hear() if m.HasField("heartbeat")] == [5]


def test_a_renewal_is_told_as_soon_as_the_terms_stood_after_it(node: Node) -> None:
    worker = node.connect()
    node.pass_time(HEARTBEAT // 2)
    worker.beat([], 0)
    assert worker.hear_events() == []
    node.hub.check_began()
    worker.beat([], 0)
    node.hub.check_succeeded()
    assert [m.heartbeat.last_read for m in worker.hear()] == [2]
    node.pass_time(HEARTBEAT // 2)
    assert worker.hear_events() == [], "it has been told lately"
    node.hub.check_began()
    node.hub.check_succeeded()
    assert [m.heartbeat.last_read for m in worker.hear()] == [3]
    node.hub.check_began()
    node.hub.check_succeeded()
    assert worker.hear_events() == [], "there is nothing new"
    node.pass_time(HEARTBEAT + HEARTBEAT // 2)
    assert [m.heartbeat.last_read for m in worker.hear()] == [3]


def test_a_heartbeat_names_what_was_read_before_the_check_began_and_only_if_it_succeeded(node: Node) -> None:
    worker = node.connect()
    worker.beat([], 0)
    node.hub.check_began()
    worker.beat([], 0)
    node.pass_time(HEARTBEAT)
    assert [m.heartbeat.last_read for m in worker.hear()] == [0]
    node.hub.check_succeeded()
    worker.beat([], 0)
    node.hub.check_began()
    node.pass_time(HEARTBEAT)
    assert [m.heartbeat.last_read for m in worker.hear()] == [2]


def test_what_a_worker_has_listed_is_confirmed_as_soon_as_the_terms_were_checked(node: Node) -> None:
    worker = node.connect(lease_tokens=[a_token("a")])
    worker.say(leases_held=pb.LeasesHeld(leases=[pb.HeldLease(lease_token=a_token("a"), task_id="a")]))
    for beats in [[2], []]:
        node.hub.check_began()
        node.hub.check_succeeded()
        assert [m.heartbeat.last_read for m in worker.hear()] == beats


def test_a_list_proves_absence_only_for_terms_announced_before_what_it_answers(node: Node) -> None:
    worker = node.connect()
    worker.list_leases(0, 0)
    assert [hold.is_complete for hold in node.port.holds] == [True] * 4
    node.port.events.clear()
    node.port.epochs[ShardId(2)] = Epoch(2)
    worker.list_leases(0, 0)
    assert sorted(shard for shard, _ in node.port.events) == [0, 1, 3], "the new term was not announced yet"
    node.port.events.clear()
    node.hub.terms_started([(ShardId(2), Epoch(2))])
    worker.list_leases(0, 0)
    assert sorted(shard for shard, _ in node.port.events) == [0, 1, 3], "the worker had not read of it"
    node.port.events.clear()
    (message,) = worker.hear()
    assert [(term.shard, term.epoch) for term in message.term_started.terms] == [(2, 2)]
    worker.list_leases(message.term_started.request, 0)
    assert sorted(shard for shard, _ in node.port.events) == [0, 1, 2, 3]
    assert all(hold.is_complete for hold in node.port.holds)


def test_what_is_listed_for_a_term_that_was_not_announced_is_presence_all_the_same(node: Node) -> None:
    worker = node.connect()
    shard = node.port.shard_of("default", "a")
    node.port.epochs[shard] = Epoch(2)
    worker.list_leases(0, 0, (a_token("a"), "a", True))
    (hold,) = [hold for of, hold in node.port.events if of == shard]
    assert getattr(hold, "is_complete", None) is False


def test_what_is_led_here_counts_once_its_worker_has_heard_of_it_and_until_it_is_told_otherwise(node: Node) -> None:
    worker = node.connect()
    token = a_token("a")
    shard = node.port.shard_of("default", "a")
    node.hub.term_ended(shard, Epoch(1))
    node.hub.terms_started([(shard, Epoch(2))])
    worker.hear()
    worker.list_leases(0, 0, (token, "a", True))
    worker.beat([], 0)
    assert worker.hear_events() == [], "this list was made before the term was told"
    worker.list_leases(1, 0, (token, "a", True))
    # The node leads it no more, and has not said so yet.
    del node.port.epochs[shard]
    worker.list_leases(0, 0, (token, "a", True))
    worker.beat([token], 0)
    assert worker.hear_events() == []
    node.hub.term_ended(shard, Epoch(2))
    worker.hear()
    worker.list_leases(0, 0, (token, "a", True))
    worker.beat([], 0)
    assert worker.hear_events() == []


def test_a_lease_that_was_adopted_although_a_later_list_lacks_it_is_asked_for(node: Node) -> None:
    worker = node.connect()
    worker.list_leases(0, 0)
    node.hub.adopted([(node.port.subscribed[0], a_token("gone"))])
    worker.beat([], 0)
    assert worker.hear_events() == ["leases_wanted"]


def test_a_lease_that_was_lost_is_no_longer_expected(node: Node) -> None:
    worker = node.connect()
    a, b = node.assign(worker, "a", "b")
    holder = a.holder
    assert holder is not None
    node.hub.lost([(holder, a.token)])
    worker.hear()
    node.port.now = bounds.SECOND
    worker.beat([b.token], 1)
    assert holder.renewed_at == bounds.SECOND


def test_outcomes_that_nobody_decides_are_asked_about(node: Node) -> None:
    worker = node.connect()
    worker.say(succeeded=succeeded(*[f"t{n}" for n in range(bounds.MAX_CREDIT + 1)]))
    worker.beat([], 0)
    assert worker.hear_events() == ["leases_wanted"]


# Credit.


def test_credit_is_given_withdrawn_and_returned(node: Node) -> None:
    worker = node.connect()
    worker.say(credit=pb.Credit(delta=10, task_type_deltas={"send": 4}))
    assert node.port.credits == {worker.stream.stream_id: 10}
    worker.say(credit=pb.Credit(delta=-3, task_type_deltas={"send": -1}))
    worker.say(credit=pb.Credit(delta=-30))
    assert [message.credit_returned.count for message in worker.hear()] == [3, 7]
    assert node.port.type_deltas == [{"send": 4}, {"send": -1}, {}]


def test_credit_that_became_assignments_is_no_longer_out(node: Node) -> None:
    worker = node.connect()
    worker.say(credit=pb.Credit(delta=bounds.MAX_CREDIT))
    node.assign(worker, "a", "b")
    worker.say(credit=pb.Credit(delta=2))
    assert not worker.stream.is_ended
    worker.say(credit=pb.Credit(delta=1))
    assert isinstance(worker.stream.error, ProtocolViolation)


def test_goodbye_voids_the_credit_and_outcomes_are_still_taken(node: Node) -> None:
    worker = node.connect()
    (lease,) = node.assign(worker, "a")
    worker.hear()
    worker.say(goodbye=pb.Goodbye())
    worker.say(goodbye=pb.Goodbye())
    assert node.port.subscribed == []
    worker.say(succeeded=succeeded("a"))
    (end,) = node.port.ends
    node.hub.verdicts([(end.holder, lease.token, Verdict.RECORDED)])
    assert worker.hear_events() == ["outcomes_recorded"]
    worker.say(credit=pb.Credit(delta=1))
    assert isinstance(worker.stream.error, ProtocolViolation)
