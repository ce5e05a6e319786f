"""The protocol machine, scenario by scenario."""

from typing import Any

import pytest
from services.scripted_node import assignment, token_of
from services.worker_machine import Machine

from duecourse.model import bounds
from duecourse.v1 import worker_service_pb2 as pb
from duecourse.worker.attempt import Failed, FailureKind, StopReason, Success
from duecourse.worker.errors import ProtocolViolated
from duecourse.worker.outcomes import MAX_UNRECORDED


@pytest.fixture
def machine() -> Machine:
    """Return a machine of four slots with one stream that serves."""
    machine = Machine()
    machine.open()
    return machine


def digest_of(*tokens: bytes) -> int:
    digest = 0
    for token in tokens:
        digest ^= int.from_bytes(token[:8], "big")
    return digest


def verdict(token: bytes, kind: pb.OutcomeVerdict.ValueType, leader: str = "") -> pb.OutcomesRecorded:
    return pb.OutcomesRecorded(others=[pb.OutcomeRecord(lease_token=token, verdict=kind, leader=leader)])


def beat(machine: Machine) -> None:
    """Let a heartbeat interval pass, and the node "a" confirm what it is told then."""
    machine.wait(5 * bounds.SECOND)
    machine.flush()
    machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))


class TestOpening:
    def test_hello_comes_first_and_says_who_and_what(self) -> None:
        machine = Machine()
        machine.open(welcome=False)
        (hello,) = machine.told("hello")
        assert (hello.protocol_version, hello.worker, hello.stream_number) == (1, "tester", 0)
        assert list(hello.task_types) == ["note", "block"]
        assert machine.credit() == 0

    def test_all_slots_are_out_after_welcome(self, machine: Machine) -> None:
        assert machine.credit() == 4
        assert machine.protocol.free == 0

    def test_streams_to_one_node_are_counted(self, machine: Machine) -> None:
        machine.close()
        machine.open()
        assert machine.told("hello")[0].stream_number == 1

    def test_another_protocol_version_is_refused(self) -> None:
        machine = Machine()
        machine.open(welcome=False)
        with pytest.raises(ProtocolViolated):
            machine.hear(welcome=pb.Welcome(protocol_version=2))

    @pytest.mark.parametrize("event", [{"heartbeat": pb.NodeHeartbeat()}, {}])
    def test_nothing_may_come_before_welcome(self, event: dict[str, Any]) -> None:
        machine = Machine()
        machine.open(welcome=False)
        with pytest.raises(ProtocolViolated):
            machine.hear(**event)

    def test_welcome_may_not_come_twice(self, machine: Machine) -> None:
        with pytest.raises(ProtocolViolated):
            machine.hear(welcome=pb.Welcome(protocol_version=1))

    def test_a_batch_that_was_missed_is_noticed(self, machine: Machine) -> None:
        machine.assigned["a"] = 1
        with pytest.raises(ProtocolViolated):
            machine.assign(assignment("t"))

    def test_unknown_events_are_counted_and_ignored(self, machine: Machine) -> None:
        unknown = pb.StreamAssignmentsResponse.FromString(b"\xfa\x06\x02hi")
        assert machine.protocol.received(machine.streams["a"], unknown, machine.now) == []
        assert machine.protocol.unknown_event_count == 1

    def test_messages_of_a_stream_that_was_replaced_are_ignored(self, machine: Machine) -> None:
        older = machine.streams["a"]
        machine.open()
        message = pb.StreamAssignmentsResponse(assignments=pb.Assignments(number=1, assignments=[assignment("t")]))
        assert machine.protocol.received(older, message, machine.now) == []


class TestRunning:
    def test_an_assignment_starts_at_once_and_its_outcome_is_kept_until_recorded(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        assert machine.started == ["t"]
        machine.wait(2_500 * bounds.MILLISECOND, tick=False)
        machine.end("t", outcome=Success(b"1", "application/json"))
        (batch,) = machine.told("succeeded")
        (success,) = batch.attempts
        assert success.attempt.lease_token == token_of("t")
        assert success.attempt.started_ago.ToMilliseconds() == 2_500
        assert (success.result, success.content_type) == (b"1", "application/json")
        assert not machine.protocol.is_idle
        machine.record(token_of("t"))
        assert machine.protocol.is_idle

    def test_a_payload_is_not_kept_until_its_outcome_is_recorded(self, machine: Machine) -> None:
        machine.assign(assignment("t", payload=b"x"))
        attempt = machine.running["t"]
        machine.end("t")
        assert attempt.assignment.task.payload == b""

    def test_outcomes_of_one_turn_share_a_message_and_credit_follows_them(self, machine: Machine) -> None:
        machine.assign(*[assignment(f"t{i}") for i in range(4)])
        machine.flush()
        machine.end("t0", "t1", "t2")
        machine.end("t3", outcome=Failed(FailureKind.NON_RETRYABLE, "ValueError", "no", 1_500 * bounds.MILLISECOND))
        sent = machine.flush()
        assert [one.WhichOneof("event") for one in sent] == ["succeeded", "failed", "credit"]
        assert sent[2].credit.delta == 4
        (failure,) = sent[1].failed.attempts
        assert failure.kind == pb.FAILURE_KIND_NON_RETRYABLE
        assert (failure.failure.type, failure.failure.message) == ("ValueError", "no")
        assert failure.retry_after.ToMilliseconds() == 1_500

    def test_large_results_are_spread_over_messages_that_a_node_takes(self) -> None:
        machine = Machine(slots=64)
        machine.open()
        machine.assign(*[assignment(f"t{i}") for i in range(64)])
        large = Success(bytes(bounds.MAX_RESULT_BYTES), "application/octet-stream")
        machine.end(*machine.started, outcome=large)
        assert len(machine.ids("succeeded")) == 64
        assert max(one.ByteSize() for one in machine.said["a"]) <= bounds.MAX_REQUEST_BYTES // 2

    def test_started_is_told_only_of_attempts_that_take_a_while(self, machine: Machine) -> None:
        machine.assign(assignment("short"), assignment("long"))
        machine.wait(100 * bounds.MILLISECOND)
        machine.end("short")
        machine.wait(800 * bounds.MILLISECOND)
        assert machine.ids("started") == ["long"]
        machine.wait(800 * bounds.MILLISECOND)
        assert machine.ids("started") == ["long"]

    def test_a_start_is_told_once_however_long_nothing_could_be_sent(self, machine: Machine) -> None:
        machine.assign(assignment("long"))
        machine.flush()
        for _ in range(20):
            machine.wait(100 * bounds.MILLISECOND)
        assert machine.ids("started") == ["long"]

    def test_an_attempt_out_of_time_is_asked_to_stop_once(self, machine: Machine) -> None:
        machine.assign(assignment("t", seconds_left=2))
        machine.wait(1_900 * bounds.MILLISECOND)
        assert machine.stopped == []
        machine.wait(200 * bounds.MILLISECOND)
        machine.wait(200 * bounds.MILLISECOND)
        assert machine.stopped == [("t", StopReason.TIMED_OUT)]

    def test_more_than_the_credit_and_unknown_types_are_handed_back(self, machine: Machine) -> None:
        machine.assign(*[assignment(f"t{i}") for i in range(4)], assignment("much"))
        assert machine.ids("returned") == ["much"]
        machine.end("t0")
        machine.flush()
        machine.assign(assignment("odd", "never-registered"))
        assert machine.ids("returned") == ["much", "odd"]

    def test_an_assignment_that_is_held_already_is_not_run_twice(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.assign(assignment("t"))
        assert machine.started == ["t"]
        assert machine.ids("returned") == []
        assert machine.protocol.out + len(machine.running) + machine.protocol.free == 4

    def test_prefetched_attempts_wait_in_order_for_a_slot(self) -> None:
        machine = Machine(slots=1, prefetch=2)
        machine.open()
        machine.assign(assignment("t1"), assignment("t2", "block"), assignment("t3"))
        assert machine.started == ["t1"]
        machine.end("t1")
        machine.end("t2")
        assert machine.started == ["t1", "t2", "t3"]

    def test_handlers_in_threads_wait_for_a_thread_and_hold_up_no_others(self) -> None:
        machine = Machine(slots=4, threads=1)
        machine.open()
        machine.assign(assignment("b1", "block"), assignment("b2", "block"), assignment("n1"))
        assert machine.started == ["b1", "n1"]
        machine.end("b1")
        assert machine.started == ["b1", "n1", "b2"]

    def test_task_types_with_fewer_threads_than_slots_have_credit_of_their_own(self) -> None:
        machine = Machine(slots=4, threads=2)
        machine.open()
        (first,) = machine.told("credit")
        assert (first.delta, dict(first.task_type_deltas)) == (4, {"block": 2})
        machine.assign(assignment("b1", "block"), assignment("n1"))
        assert machine.flush() == []
        machine.end("b1")
        machine.end("n1")
        assert dict(machine.told("credit")[-1].task_type_deltas) == {"block": 1}

    def test_a_heavy_batch_is_cut_up_so_that_one_attempt_does_not_keep_it_all(self, machine: Machine) -> None:
        machine.assign(*[assignment(f"t{i}", payload=bytes(200_000)) for i in range(2)])
        one = machine.running["t0"].assignment
        assert one.task.payload == bytes(200_000)


class TestLateAssignments:
    def test_the_lease_counts_from_the_sending_of_the_message_that_was_read(self, machine: Machine) -> None:
        machine.wait(14 * bounds.SECOND + 1, tick=False)
        machine.assign(assignment("late", lease_seconds=15), last_read=1)
        assert machine.started == []
        assert machine.ids("returned") == ["late"]
        assert machine.protocol.holdings.late_count == 1

    def test_one_that_came_with_time_to_be_renewed_is_started(self, machine: Machine) -> None:
        machine.wait(8 * bounds.SECOND, tick=False)
        machine.assign(assignment("timely", lease_seconds=15), last_read=1)
        assert machine.started == ["timely"]

    def test_one_that_came_with_less_is_started_once_it_is_renewed(self, machine: Machine) -> None:
        machine.wait(8 * bounds.SECOND + 1, tick=False)
        machine.assign(assignment("late", lease_seconds=15), assignment("longer"), last_read=1)
        assert machine.started == ["longer"]
        assert machine.protocol.holdings.waiting == 1
        machine.wait(0)
        machine.flush()
        machine.wait(5 * bounds.SECOND, tick=False)
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))
        assert machine.started == ["longer", "late"]

    def test_one_that_waits_to_be_renewed_keeps_its_turn(self) -> None:
        machine = Machine(slots=1, prefetch=3)
        machine.open()
        machine.assign(assignment("running"))
        machine.wait(8 * bounds.SECOND + 1, tick=False)
        machine.assign(assignment("first", lease_seconds=15), last_read=1)
        machine.end("running")
        assert machine.started == ["running"]
        machine.assign(assignment("second"), assignment("third"))
        assert machine.started == ["running", "second"]
        machine.wait(0)
        machine.flush()
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))
        machine.end("second")
        assert machine.started == ["running", "second", "first"]

    def test_one_that_became_short_while_it_waited_for_a_slot_waits_for_a_renewal_too(self) -> None:
        machine = Machine(slots=1, prefetch=1)
        machine.open()
        machine.assign(assignment("running", lease_seconds=60), assignment("next", lease_seconds=15))
        machine.wait(8 * bounds.SECOND + 1)
        machine.flush()
        machine.end("running")
        assert machine.started == ["running"]
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))
        assert machine.started == ["running", "next"]

    def test_one_that_is_to_start_within_some_time_does_not_wait(self, machine: Machine) -> None:
        machine.wait(8 * bounds.SECOND + 1, tick=False)
        urgent = assignment("urgent", lease_seconds=15)
        urgent.start_within.FromSeconds(3)
        machine.assign(urgent, last_read=1)
        assert machine.started == ["urgent"]
        machine.wait(0)
        assert machine.told("leases_held")

    @pytest.mark.parametrize("end", ["returned", "lost", "cancelled", "drained"])
    def test_one_that_waits_to_be_renewed_ends_as_others_do(self, machine: Machine, end: str) -> None:
        machine.wait(8 * bounds.SECOND + 1, tick=False)
        machine.assign(late := assignment("late", lease_seconds=15), last_read=1)
        match end:
            case "returned":
                machine.wait(6 * bounds.SECOND - 1)
                assert machine.ids("returned") == []
                machine.wait(1)
            case "lost":
                machine.hear(lease_lost=pb.LeaseLost(lease_tokens=[late.lease_token]))
            case "cancelled":
                machine.hear(
                    cancel_requested=pb.CancelRequested(
                        lease_tokens=[late.lease_token], reason=pb.STOP_REASON_CANCELLED
                    )
                )
            case "drained":
                machine.drain()
        assert machine.ids("returned") == ([] if end == "lost" else ["late"])
        assert machine.protocol.holdings.waiting == 0
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))
        assert machine.started == []

    def test_a_message_that_was_never_sent_counts_for_nothing(self, machine: Machine) -> None:
        machine.assign(assignment("t"), last_read=0)
        assert machine.started == []

    def test_one_that_waits_is_returned_when_its_margin_is_gone(self) -> None:
        machine = Machine(slots=1, prefetch=1)
        machine.open()
        machine.assign(assignment("t1", lease_seconds=60), assignment("t2", lease_seconds=15))
        machine.wait(14 * bounds.SECOND + 1)
        assert machine.ids("returned") == ["t2"]

    def test_a_heartbeat_that_the_node_confirms_renews_what_waits(self) -> None:
        machine = Machine(slots=1, prefetch=1)
        machine.open()
        machine.assign(assignment("t1", lease_seconds=60), assignment("t2", lease_seconds=15))
        machine.wait(5 * bounds.SECOND)
        machine.flush()
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))
        machine.wait(14 * bounds.SECOND)
        machine.end("t1")
        assert machine.started == ["t1", "t2"]

    def test_a_renewal_counts_from_the_sending_of_the_heartbeat(self) -> None:
        machine = Machine(slots=1, prefetch=1)
        machine.open()
        machine.assign(assignment("t1", lease_seconds=60), assignment("t2", lease_seconds=15))
        machine.wait(5 * bounds.SECOND)
        machine.flush()
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))
        machine.wait(14 * bounds.SECOND + 1, tick=False)
        machine.end("t1")
        assert machine.started == ["t1"]

    def test_a_heartbeat_that_was_sent_before_the_lease_came_does_not_renew_it(self) -> None:
        machine = Machine(slots=1, prefetch=1)
        machine.open()
        machine.wait(6 * bounds.SECOND)
        machine.flush()
        beat = len(machine.said["a"])
        machine.assign(assignment("t1", lease_seconds=60), assignment("t2", lease_seconds=15), last_read=1)
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=beat))
        machine.wait(9 * bounds.SECOND)
        machine.end("t1")
        assert machine.started == ["t1"]

    def test_other_messages_than_signs_of_life_do_not_renew(self) -> None:
        machine = Machine(slots=1, prefetch=1)
        machine.open()
        machine.assign(assignment("t1", lease_seconds=60), assignment("t2", lease_seconds=15))
        machine.wait(4 * bounds.SECOND)
        machine.hear(cancel_requested=pb.CancelRequested(lease_tokens=[token_of("t1")]))
        machine.flush()
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))
        machine.wait(11 * bounds.SECOND)
        assert machine.ids("returned") == ["t2"]

    def test_one_past_its_start_deadline_is_returned(self) -> None:
        machine = Machine(slots=1, prefetch=1)
        machine.open()
        bounded = assignment("t2")
        bounded.start_within.FromMilliseconds(500)
        machine.assign(assignment("t1"), bounded)
        machine.wait(501 * bounds.MILLISECOND, tick=False)
        machine.end("t1")
        assert machine.started == ["t1"]
        assert machine.ids("returned") == ["t2"]

    def test_one_that_was_under_way_for_longer_than_its_time_and_the_grace_is_returned(self) -> None:
        for way, expected in ((6, ["t"]), (8, [])):
            machine = Machine()
            machine.open()
            sent = len(machine.said["a"])
            machine.wait(way * bounds.SECOND)
            machine.assign(assignment("t", lease_seconds=60, seconds_left=2), last_read=sent)
            assert machine.started == expected

    def test_one_without_time_left_is_returned(self, machine: Machine) -> None:
        machine.assign(assignment("t", seconds_left=0))
        assert machine.ids("returned") == ["t"]

    def test_the_node_of_a_term_that_is_over_renews_nothing_any_more(self) -> None:
        machine = Machine(slots=1, prefetch=1)
        machine.open()
        machine.assign(assignment("t1", lease_seconds=3_600), assignment("t2", lease_seconds=15))
        machine.wait(5 * bounds.SECOND)
        machine.flush()
        renewed = len(machine.said["a"])
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=renewed))
        machine.hear(term_ended=pb.TermEnded(terms=[pb.Term(shard=1, epoch=1)]))
        machine.wait(5 * bounds.SECOND)
        machine.flush()
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))
        machine.wait(8_500 * bounds.MILLISECOND)
        assert machine.ids("returned") == []
        machine.wait(bounds.SECOND)
        assert machine.ids("returned") == ["t2"]

    def test_the_end_of_an_earlier_term_says_nothing_of_a_later_one(self) -> None:
        machine = Machine(slots=1, prefetch=1)
        machine.open()
        machine.hear(term_started=pb.TermStarted(request=1, terms=[pb.Term(shard=1, epoch=2)]))
        machine.hear(term_ended=pb.TermEnded(terms=[pb.Term(shard=1, epoch=1)]))
        machine.assign(assignment("t1", epoch=2, lease_seconds=3_600), assignment("t2", epoch=2, lease_seconds=15))
        for _ in range(5):
            machine.wait(5 * bounds.SECOND)
            machine.flush()
            machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))
        assert machine.ids("returned") == []

    def test_a_term_of_another_shard_leaves_what_is_renewed_alone(self, machine: Machine) -> None:
        machine.assign(assignment("t", lease_seconds=15))
        for _ in range(6):
            beat(machine)
        machine.hear(term_started=pb.TermStarted(request=1, terms=[pb.Term(shard=2, epoch=1)]))
        machine.flush()
        machine.wait(15 * bounds.SECOND - 1)
        assert machine.stopped == []
        machine.wait(1)
        assert machine.stopped == [("t", StopReason.LEASE_LOST)]

    def test_a_list_that_is_wanted_leaves_what_is_renewed_alone(self, machine: Machine) -> None:
        machine.assign(assignment("t", lease_seconds=15))
        for _ in range(6):
            beat(machine)
        machine.hear(leases_wanted=pb.LeasesWanted(request=3))
        machine.flush()
        machine.wait(bounds.SECOND)
        assert machine.stopped == []

    @pytest.mark.parametrize("is_told_of_the_end", [True, False])
    def test_what_a_node_confirmed_while_another_led_renews_nothing(self, is_told_of_the_end: bool) -> None:
        machine = Machine()
        machine.open()
        machine.open("b", terms=[])
        machine.assign(assignment("t", lease_seconds=15))
        beat(machine)
        if is_told_of_the_end:
            machine.hear(term_ended=pb.TermEnded(terms=[pb.Term(shard=1, epoch=1)]))
        machine.hear("b", term_started=pb.TermStarted(request=1, terms=[pb.Term(shard=1, epoch=2)]))
        # Only the node that does not lead confirms what it is told.
        beat(machine)
        beat(machine)
        machine.hear(term_started=pb.TermStarted(request=1, terms=[pb.Term(shard=1, epoch=3)]))
        machine.flush()
        machine.wait(5 * bounds.SECOND - 1)
        assert machine.stopped == []
        machine.wait(1)
        assert machine.stopped == [("t", StopReason.LEASE_LOST)]

    def test_the_list_that_answers_a_new_term_renews(self, machine: Machine) -> None:
        machine.assign(assignment("t", lease_seconds=15))
        machine.wait(10 * bounds.SECOND)
        machine.hear(term_started=pb.TermStarted(request=1, terms=[pb.Term(shard=1, epoch=2)]))
        assert machine.told("leases_held")
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))
        machine.wait(15 * bounds.SECOND - 1)
        assert machine.stopped == []

    def test_the_list_that_answers_a_new_term_renews_however_soon_it_follows_another(self, machine: Machine) -> None:
        machine.assign(assignment("t", lease_seconds=15), assignment("u", shard=2, lease_seconds=15))
        machine.wait(10 * bounds.SECOND)
        machine.hear(term_started=pb.TermStarted(request=1, terms=[pb.Term(shard=1, epoch=2)]))
        machine.flush()
        machine.wait(4 * bounds.MILLISECOND)
        machine.hear(term_started=pb.TermStarted(request=2, terms=[pb.Term(shard=2, epoch=2)]))
        machine.flush()
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))
        machine.wait(15 * bounds.SECOND - 1)
        assert machine.stopped == []

    def test_an_assignment_of_a_term_that_is_over_makes_nobody_its_leader(self, machine: Machine) -> None:
        machine.assign(assignment("t", lease_seconds=15))
        machine.hear(term_ended=pb.TermEnded(terms=[pb.Term(shard=1, epoch=3)]))
        machine.assign(assignment("late", epoch=3, lease_seconds=60))
        for _ in range(3):
            beat(machine)
        assert machine.stopped == [("t", StopReason.LEASE_LOST)]

    def test_a_lease_that_was_long_under_way_is_listed_at_once(self, machine: Machine) -> None:
        machine.wait(5 * bounds.SECOND)
        machine.flush()
        named = len(machine.said["a"])
        machine.wait(4 * bounds.SECOND)
        machine.assign(assignment("in time", lease_seconds=15), last_read=named)
        assert not machine.told("leases_held")
        machine.wait(5 * bounds.SECOND)
        machine.assign(assignment("late", lease_seconds=15), last_read=named)
        machine.wait(0)
        (held,) = machine.told("leases_held")
        assert (held.answers, {lease.task_id for lease in held.leases}) == (0, {"in time", "late"})
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))
        assert machine.started == ["in time", "late"]
        machine.assign(assignment("later", lease_seconds=15), last_read=named)
        machine.wait(bounds.SECOND - 1)
        assert len(machine.told("leases_held")) == 1, "not at every message"
        machine.wait(1)
        assert len(machine.told("leases_held")) == 2
        machine.wait(4 * bounds.SECOND)
        assert machine.ids("returned") == []
        machine.wait(1)
        assert machine.ids("returned") == ["later"]
        assert machine.stopped == []

    def test_one_list_answers_all_that_was_asked(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        for request in (1, 3):
            machine.hear(term_started=pb.TermStarted(request=request, terms=[pb.Term(shard=request, epoch=2)]))
        machine.hear(leases_wanted=pb.LeasesWanted(request=2))
        assert [held.answers for held in machine.told("leases_held")] == [3]

    def test_renewals_outlive_the_stream_that_brought_them(self) -> None:
        machine = Machine(slots=1, prefetch=1)
        machine.open()
        machine.assign(assignment("t1", lease_seconds=60), assignment("t2", lease_seconds=15))
        machine.wait(5 * bounds.SECOND)
        machine.flush()
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=len(machine.said["a"])))
        machine.close()
        machine.wait(13 * bounds.SECOND)
        machine.end("t1")
        assert machine.started == ["t1", "t2"]


class TestLeaseLoss:
    def test_a_handler_is_told_when_its_lease_has_ended_without_renewal(self, machine: Machine) -> None:
        machine.assign(assignment("t", lease_seconds=15))
        machine.close()
        machine.wait(15 * bounds.SECOND - 1)
        assert machine.stopped == []
        machine.wait(1)
        machine.wait(bounds.SECOND)
        assert machine.stopped == [("t", StopReason.LEASE_LOST)]

    def test_the_outcome_of_such_a_handler_is_sent_all_the_same(self, machine: Machine) -> None:
        machine.assign(assignment("t", lease_seconds=15))
        machine.close()
        machine.wait(20 * bounds.SECOND)
        machine.end("t")
        machine.open()
        assert machine.ids("succeeded") == ["t"]

    def test_a_handler_whose_lease_is_lost_is_stopped_and_its_outcome_is_not_sent(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.hear(lease_lost=pb.LeaseLost(lease_tokens=[token_of("t")]))
        assert machine.stopped == [("t", StopReason.LEASE_LOST)]
        assert machine.protocol.out == 3
        machine.end("t")
        assert machine.ids("succeeded") == []
        assert machine.credit() == 5
        assert machine.protocol.is_idle

    def test_one_that_waits_and_lost_its_lease_is_forgotten(self) -> None:
        machine = Machine(slots=1, prefetch=1)
        machine.open()
        machine.assign(assignment("t1"), assignment("t2"))
        machine.hear(lease_lost=pb.LeaseLost(lease_tokens=[token_of("t2")]))
        machine.end("t1")
        assert machine.started == ["t1"]
        assert machine.ids("returned") == []

    def test_an_unrecorded_outcome_waits_for_its_verdict_though_the_lease_is_lost(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.end("t")
        machine.hear(lease_lost=pb.LeaseLost(lease_tokens=[token_of("t")]))
        assert machine.ids("succeeded") == ["t"]
        assert not machine.protocol.is_idle

    def test_welcome_tells_of_leases_that_were_lost_meanwhile(self, machine: Machine) -> None:
        machine.assign(assignment("t1"), assignment("t2"))
        machine.close()
        machine.open(lost_lease_tokens=[token_of("t1")])
        assert machine.stopped == [("t1", StopReason.LEASE_LOST)]
        (held,) = machine.told("leases_held")
        assert [lease.task_id for lease in held.leases] == ["t2"]


class TestEpochs:
    def test_lower_epochs_than_a_term_started_are_returned_to_its_leader(self, machine: Machine) -> None:
        machine.open("b", terms=[])
        machine.hear("b", term_started=pb.TermStarted(request=7, terms=[pb.Term(shard=1, epoch=5)]))
        machine.assign(assignment("old", epoch=4), assignment("other", shard=2, epoch=4))
        assert machine.started == ["other"]
        assert machine.ids("returned", "b") == ["old"]
        assert machine.protocol.stale_count == 1

    def test_assignments_teach_epochs_too(self, machine: Machine) -> None:
        machine.assign(assignment("new", epoch=9))
        machine.assign(assignment("old", epoch=8))
        assert machine.started == ["new"]

    def test_of_a_shard_that_is_named_twice_the_higher_epoch_counts(self, machine: Machine) -> None:
        terms = [pb.Term(shard=1, epoch=5), pb.Term(shard=1, epoch=3)]
        machine.hear(term_started=pb.TermStarted(request=1, terms=terms))
        machine.assign(assignment("old", epoch=4))
        assert machine.ids("returned") == ["old"]

    def test_the_end_of_a_term_teaches_its_epoch(self, machine: Machine) -> None:
        machine.hear(term_ended=pb.TermEnded(terms=[pb.Term(shard=1, epoch=5)]))
        machine.assign(assignment("old", epoch=4))
        assert machine.ids("returned") == ["old"]

    def test_epochs_are_remembered_when_streams_end(self, machine: Machine) -> None:
        machine.assign(assignment("new", epoch=9))
        machine.close()
        machine.open(terms=[pb.Term(shard=1, epoch=3)])
        machine.assign(assignment("old", epoch=3))
        assert machine.started == ["new"]

    def test_a_refused_assignment_gives_its_credit_back(self, machine: Machine) -> None:
        machine.assign(assignment("new", epoch=9), assignment("old", epoch=8))
        machine.flush()
        assert machine.protocol.out == 3
        assert machine.credit() == 5


class TestLeasesHeld:
    def test_nothing_is_listed_when_nothing_is_held(self, machine: Machine) -> None:
        assert machine.told("leases_held") == []

    def test_that_nothing_is_held_any_more_is_said_on_a_new_stream(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.end("t")
        machine.flush()
        machine.record(token_of("t"))
        machine.close()
        machine.open()
        (held,) = machine.told("leases_held")
        assert (held.answers, list(held.leases)) == (0, [])

    def test_a_new_term_is_answered_with_all_that_is_held(self) -> None:
        machine = Machine(slots=2, prefetch=1)
        machine.open()
        machine.assign(assignment("run"), assignment("done"), assignment("wait"))
        machine.flush()
        machine.hear(lease_lost=pb.LeaseLost())
        machine.end("done")
        machine.hear(term_started=pb.TermStarted(request=7, terms=[pb.Term(shard=1, epoch=2)]))
        (held,) = machine.told("leases_held")
        assert (held.answers, held.last_assignments) == (7, 1)
        assert {lease.task_id: lease.started for lease in held.leases} == {"run": True, "wait": True, "done": True}

    def test_what_has_not_started_is_listed_as_such(self) -> None:
        machine = Machine(slots=1, prefetch=1)
        machine.open()
        machine.assign(assignment("run"), assignment("wait"))
        machine.hear(leases_wanted=pb.LeasesWanted(request=3))
        (held,) = machine.told("leases_held")
        assert held.answers == 3
        assert {lease.task_id: lease.started for lease in held.leases} == {"run": True, "wait": False}

    def test_a_new_stream_proves_presence_in_hello_and_lists_after_welcome(self, machine: Machine) -> None:
        machine.assign(assignment("t1"), assignment("t2"))
        machine.end("t2")
        machine.close()
        machine.open()
        (hello,) = machine.told("hello")
        assert set(hello.lease_tokens) == {token_of("t1"), token_of("t2")}
        (held,) = machine.told("leases_held")
        assert (held.answers, held.last_assignments) == (0, 0)
        assert {lease.task_id for lease in held.leases} == {"t1", "t2"}

    def test_it_goes_out_before_the_outcomes_that_it_lists(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.end("t")
        machine.close()
        machine.open()
        events = [one.WhichOneof("event") for one in machine.said["a"]]
        assert events == ["hello", "leases_held", "succeeded", "credit"]


class TestDigest:
    def test_what_another_node_leads_is_listed_and_not_counted(self, machine: Machine) -> None:
        machine.assign(assignment("own"), assignment("other", shard=2))
        machine.open("b", terms=[pb.Term(shard=2, epoch=2)])
        machine.hear(leases_wanted=pb.LeasesWanted(request=1))
        (held,) = machine.told("leases_held")
        assert {lease.task_id for lease in held.leases} == {"own", "other"}
        machine.end("other")
        machine.flush()
        machine.record(token_of("other"), address="b")
        machine.wait(5 * bounds.SECOND)
        last = machine.told("heartbeat")[-1]
        assert (last.lease_count, last.lease_digest) == (1, digest_of(token_of("own")))

    def test_what_has_moved_to_another_node_is_counted_until_the_next_list(self, machine: Machine) -> None:
        machine.assign(assignment("moved"))
        machine.hear(term_ended=pb.TermEnded(terms=[pb.Term(shard=1, epoch=1)]))
        machine.wait(5 * bounds.SECOND)
        assert machine.told("heartbeat")[-1].lease_count == 1
        machine.hear(leases_wanted=pb.LeasesWanted(request=1))
        machine.wait(5 * bounds.SECOND)
        assert machine.told("heartbeat")[-1].lease_count == 0


class TestOutcomes:
    @pytest.mark.parametrize("kind", [pb.OUTCOME_VERDICT_LEASE_LOST, pb.OUTCOME_VERDICT_UNKNOWN_TOKEN])
    def test_a_refused_outcome_is_dropped(self, machine: Machine, kind: pb.OutcomeVerdict.ValueType) -> None:
        machine.assign(assignment("t"))
        machine.end("t")
        machine.flush()
        machine.hear(outcomes_recorded=verdict(token_of("t"), kind))
        assert machine.protocol.is_idle
        assert machine.protocol.outcomes.refused_count == 1

    def test_outcomes_are_sent_again_on_a_new_stream(self, machine: Machine) -> None:
        machine.assign(assignment("sent"), assignment("unsent"))
        machine.end("sent")
        machine.flush()
        machine.end("unsent")
        machine.close()
        machine.open()
        assert sorted(machine.ids("succeeded")) == ["sent", "unsent"]

    def test_outcomes_of_a_shard_are_sent_again_to_its_new_term(self, machine: Machine) -> None:
        machine.assign(assignment("t1"), assignment("t2", shard=2))
        machine.end("t1")
        machine.end("t2")
        machine.flush()
        machine.hear(term_started=pb.TermStarted(request=1, terms=[pb.Term(shard=1, epoch=2)]))
        assert machine.ids("succeeded") == ["t1", "t2", "t1"]

    def test_not_leader_sends_the_outcome_to_the_leader_that_is_named(self, machine: Machine) -> None:
        machine.open("b", terms=[])
        machine.assign(assignment("t"))
        machine.end("t")
        machine.flush()
        machine.hear(outcomes_recorded=verdict(token_of("t"), pb.OUTCOME_VERDICT_NOT_LEADER, "b"))
        assert machine.ids("succeeded", "b") == ["t"]

    def test_not_leader_finds_the_leader_by_the_address_that_its_cluster_knows(self, machine: Machine) -> None:
        machine.open("b", node_id="n2", terms=[])
        node = pb.WorkerNode(node_id="n2", address="n2.example:7400")
        machine.hear(cluster_changed=pb.ClusterChanged(nodes=[node]))
        machine.assign(assignment("t"))
        machine.end("t")
        machine.flush()
        machine.hear(outcomes_recorded=verdict(token_of("t"), pb.OUTCOME_VERDICT_NOT_LEADER, leader="n2.example:7400"))
        assert machine.ids("succeeded", "b") == ["t"]

    def test_not_leader_without_an_address_goes_to_the_leader_that_is_known(self, machine: Machine) -> None:
        machine.open("b", terms=[])
        machine.assign(assignment("t"))
        machine.end("t")
        machine.flush()
        machine.hear("b", term_started=pb.TermStarted(request=1, terms=[pb.Term(shard=1, epoch=2)]))
        machine.hear(outcomes_recorded=verdict(token_of("t"), pb.OUTCOME_VERDICT_NOT_LEADER))
        assert machine.ids("succeeded", "b") == ["t"]

    def test_an_outcome_that_an_older_leader_never_answered_is_sent_to_one_that_is_connected_later(
        self, machine: Machine
    ) -> None:
        machine.assign(assignment("t"))
        machine.end("t")
        machine.flush()
        machine.open("b", terms=[pb.Term(shard=1, epoch=2)])
        assert machine.ids("succeeded", "b") == ["t"]

    def test_not_leader_without_a_leader_is_tried_again_later(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.end("t")
        machine.flush()
        machine.wait(bounds.SECOND)
        machine.hear(outcomes_recorded=verdict(token_of("t"), pb.OUTCOME_VERDICT_NOT_LEADER))
        assert machine.ids("succeeded") == ["t"]
        machine.wait(bounds.SECOND)
        assert machine.ids("succeeded") == ["t", "t"]

    def test_not_leader_waits_for_a_term_on_any_stream(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.end("t")
        machine.flush()
        machine.hear(outcomes_recorded=verdict(token_of("t"), pb.OUTCOME_VERDICT_NOT_LEADER))
        machine.open("b", terms=[])
        machine.hear("b", term_started=pb.TermStarted(request=1, terms=[pb.Term(shard=1, epoch=2)]))
        assert "t" in machine.ids("succeeded", "b")

    def test_an_outcome_goes_to_the_shards_leader_wherever_its_attempt_came_from(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.open("b", terms=[pb.Term(shard=1, epoch=2)])
        machine.end("t")
        assert machine.ids("succeeded", "b") == ["t"]
        assert machine.ids("succeeded", "a") == []

    def test_no_credit_is_given_while_too_many_outcomes_wait(self) -> None:
        machine = Machine(slots=1_024)
        machine.open()
        for part in range(MAX_UNRECORDED // 1_024):
            ids = [f"t{part}-{i}" for i in range(1_024)]
            machine.assign(*[assignment(task_id) for task_id in ids])
            machine.end(*ids)
            machine.flush()
        assert machine.protocol.out == 0
        machine.record(*[token_of(f"t0-{i}") for i in range(1_024)])
        assert machine.protocol.out == 1_024


class TestHeartbeats:
    def test_one_is_sent_every_interval_of_the_welcome(self) -> None:
        machine = Machine()
        machine.open(heartbeat_interval={"seconds": 2})
        machine.wait(1_900 * bounds.MILLISECOND)
        assert machine.told("heartbeat") == []
        for _ in range(60):
            machine.wait(100 * bounds.MILLISECOND)
            machine.flush()
        assert len(machine.told("heartbeat")) in (3, 4)

    def test_the_digest_covers_what_came_and_has_no_outcome_sent(self, machine: Machine) -> None:
        machine.assign(assignment("t1"), assignment("t2"), assignment("t3"))
        machine.end("t3")
        machine.wait(5 * bounds.SECOND)
        (beat,) = machine.told("heartbeat")
        assert (beat.last_assignments, beat.lease_count) == (1, 2)
        assert beat.lease_digest == digest_of(token_of("t1"), token_of("t2"))

    def test_the_digest_covers_what_was_listed_on_the_stream(self, machine: Machine) -> None:
        machine.assign(assignment("t1"), assignment("t2"))
        machine.close()
        machine.open()
        machine.wait(5 * bounds.SECOND)
        (beat,) = machine.told("heartbeat")
        assert (beat.last_assignments, beat.lease_count) == (0, 2)
        assert beat.lease_digest == digest_of(token_of("t1"), token_of("t2"))

    def test_lost_leases_leave_the_digest(self, machine: Machine) -> None:
        machine.assign(assignment("t1"), assignment("t2"))
        machine.hear(lease_lost=pb.LeaseLost(lease_tokens=[token_of("t1")]))
        machine.wait(5 * bounds.SECOND)
        (beat,) = machine.told("heartbeat")
        assert (beat.lease_count, beat.lease_digest) == (1, digest_of(token_of("t2")))

    def test_progress_is_told_once_per_change(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.running["t"].progress = "half"
        for _ in range(2):
            machine.wait(5 * bounds.SECOND)
            machine.flush()
        first, second = machine.told("heartbeat")
        assert [(one.task_id, one.progress) for one in first.progress] == [("t", "half")]
        assert list(second.progress) == []

    def test_progress_is_told_again_to_a_leader_that_asks_what_is_held(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.running["t"].progress = "half"
        machine.wait(5 * bounds.SECOND)
        machine.flush()
        machine.hear(leases_wanted=pb.LeasesWanted(request=1))
        machine.wait(5 * bounds.SECOND)
        assert [[one.progress for one in beat.progress] for beat in machine.told("heartbeat")] == [["half"], ["half"]]

    def test_each_node_is_told_the_progress_of_what_it_may_lead(self, machine: Machine) -> None:
        machine.open("b")
        machine.assign(assignment("t"))
        machine.running["t"].progress = "half"
        machine.wait(5 * bounds.SECOND)
        machine.flush()
        machine.hear("b", term_started=pb.TermStarted(request=1, terms=[pb.Term(shard=0, epoch=9)]))
        machine.wait(5 * bounds.SECOND)
        (beat, *_) = [beat for beat in machine.told("heartbeat", "b") if beat.progress]
        assert [(one.task_id, one.progress) for one in beat.progress] == [("t", "half")]

    def test_the_progress_of_many_takes_several_heartbeats(self) -> None:
        machine = Machine(slots=2 * bounds.MAX_BATCH)
        machine.open()
        tasks = [f"t{number}" for number in range(bounds.MAX_BATCH + 1)]
        machine.assign(*map(assignment, tasks))
        for task_id in tasks:
            machine.running[task_id].progress = "x" * bounds.MAX_PROGRESS_BYTES
        machine.wait(5 * bounds.SECOND)
        beats = machine.told("heartbeat")
        assert [len(beat.progress) for beat in beats] == [bounds.MAX_BATCH, 1]
        assert {beat.lease_count for beat in beats} == {len(tasks)}

    def test_a_node_that_is_silent_for_two_intervals_is_dead(self, machine: Machine) -> None:
        stream = machine.streams["a"]
        assert not machine.protocol.is_silent(stream, machine.now + 10 * bounds.SECOND)
        assert machine.protocol.is_silent(stream, machine.now + 10 * bounds.SECOND + 1)
        machine.wait(5 * bounds.SECOND)
        machine.hear(heartbeat=pb.NodeHeartbeat(last_read=1))
        assert not machine.protocol.is_silent(stream, machine.now + 10 * bounds.SECOND)


class TestCancelling:
    def test_what_has_not_started_is_returned_at_once(self) -> None:
        machine = Machine(slots=1, prefetch=1)
        machine.open()
        machine.assign(assignment("t1"), assignment("t2"))
        machine.hear(cancel_requested=pb.CancelRequested(lease_tokens=[token_of("t2")]))
        assert machine.ids("returned") == ["t2"]
        machine.end("t1")
        assert machine.started == ["t1"]

    def test_what_runs_is_asked_to_stop_and_said_to_be_started(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        request = pb.CancelRequested(lease_tokens=[token_of("t")], reason=pb.STOP_REASON_CANCELLED)
        machine.hear(cancel_requested=request)
        machine.hear(cancel_requested=request)
        assert machine.stopped == [("t", StopReason.CANCELLED)]
        assert "t" in machine.ids("started")

    def test_the_servers_time_limit_stops_too(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        reason = pb.STOP_REASON_TIMED_OUT
        machine.hear(cancel_requested=pb.CancelRequested(lease_tokens=[token_of("t"), b"unknown"], reason=reason))
        assert machine.stopped == [("t", StopReason.TIMED_OUT)]

    def test_a_lost_lease_is_told_though_a_stop_was_asked_for_before(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.hear(cancel_requested=pb.CancelRequested(lease_tokens=[token_of("t")]))
        machine.hear(lease_lost=pb.LeaseLost(lease_tokens=[token_of("t")]))
        assert machine.stopped == [("t", StopReason.CANCELLED), ("t", StopReason.LEASE_LOST)]


class TestCredit:
    def test_a_second_node_gets_half_of_what_is_unused(self, machine: Machine) -> None:
        machine.open("b")
        assert machine.credit("b") == 0
        machine.wait(bounds.SECOND)
        assert machine.credit("a") == 2
        machine.hear(credit_returned=pb.CreditReturned(count=2))
        assert machine.credit("b") == 2
        assert machine.protocol.out == 4

    def test_withdrawn_credit_that_became_assignments_is_not_given_twice(self, machine: Machine) -> None:
        machine.open("b")
        machine.wait(bounds.SECOND)
        machine.assign(assignment("t1"), assignment("t2"), assignment("t3"))
        machine.hear(credit_returned=pb.CreditReturned(count=1))
        assert machine.credit("b") == 1
        assert machine.protocol.out == 1

    def test_the_credit_of_a_stream_that_ended_goes_to_others(self, machine: Machine) -> None:
        machine.open("b")
        machine.close("a")
        assert machine.credit("b") == 4

    def test_a_single_slot_goes_round_nodes_that_have_nothing(self) -> None:
        machine = Machine(slots=1)
        machine.open("a")
        machine.open("b")
        holders = []
        for _ in range(4):
            (holder,) = [address for address in "ab" if machine.credit(address) == 1]
            holders.append(holder)
            machine.wait(bounds.SECOND)
            machine.flush()
            machine.hear(holder, credit_returned=pb.CreditReturned(count=1))
        assert holders == ["a", "b", "a", "b"]

    def test_a_node_that_drains_gets_none_and_gives_back(self, machine: Machine) -> None:
        machine.open("b")
        machine.hear(draining=pb.Draining())
        assert machine.credit("a") == 0
        machine.hear(credit_returned=pb.CreditReturned(count=4))
        assert machine.credit("a") == 0
        assert machine.credit("b") == 4


class TestDemand:
    @pytest.fixture
    def machine(self) -> Machine:
        """Return a machine of one slot, whose credit is on the stream to a, with streams to b and c beside it."""
        machine = Machine(slots=1)
        for address in "abc":
            machine.open(address)
            machine.hear(address, cluster_changed=pb.ClusterChanged())
        return machine

    def out(self, machine: Machine) -> str:
        """Tell where the credit is that nodes were told of."""
        machine.flush()
        return "".join(address for address, stream in machine.streams.items() if stream.account.out)

    def wants(self, machine: Machine, address: str, waiting: int = 5) -> None:
        machine.hear(address, demand=pb.Demand(waiting=waiting))
        machine.flush()

    def works(self, machine: Machine, address: str, task_id: str) -> None:
        machine.assign(assignment(task_id), address=address)
        machine.end(task_id)
        machine.flush()

    def test_credit_stays_where_it_is_when_nothing_waits(self, machine: Machine) -> None:
        for _ in range(10):
            machine.wait(bounds.SECOND)
        assert self.out(machine) == "a"
        assert len(machine.told("credit", "a")) == 1

    def test_credit_moves_to_where_work_waits_as_soon_as_it_is_back(self, machine: Machine) -> None:
        self.wants(machine, "b")
        assert [one.delta for one in machine.told("credit", "a")] == [1, -1]
        assert self.out(machine) == "a"
        machine.hear("a", credit_returned=pb.CreditReturned(count=1))
        assert self.out(machine) == "b"

    def test_a_single_slot_goes_back_at_once_to_where_work_waits(self, machine: Machine) -> None:
        self.wants(machine, "b")
        machine.hear("a", credit_returned=pb.CreditReturned(count=1))
        for number in range(20):
            assert self.out(machine) == "b"
            self.works(machine, "b", f"t{number}")
        assert self.out(machine) == "b"

    def test_nodes_where_work_waits_have_a_single_slot_in_turn(self, machine: Machine) -> None:
        for address in "abc":
            self.wants(machine, address)
        turns = ""
        for number in range(9):
            address = self.out(machine)
            turns += address
            self.works(machine, address, f"t{number}")
        assert sorted(turns) == sorted("abc" * 3)

    def test_it_stays_with_the_last_one_when_nothing_waits_any_more(self, machine: Machine) -> None:
        self.wants(machine, "b")
        machine.hear("a", credit_returned=pb.CreditReturned(count=1))
        self.wants(machine, "b", 0)
        for _ in range(20):
            machine.wait(bounds.SECOND)
        assert self.out(machine) == "b"

    def test_credit_that_was_used_meanwhile_is_not_given_twice(self, machine: Machine) -> None:
        self.wants(machine, "b")
        machine.assign(assignment("t"))
        machine.hear("a", credit_returned=pb.CreditReturned(count=0))
        assert self.out(machine) == ""
        machine.end("t")
        assert self.out(machine) == "b"

    def test_credit_that_the_node_was_not_told_of_moves_without_asking(self) -> None:
        machine = Machine(slots=1)
        machine.open("a")
        machine.open("b")
        machine.assign(assignment("t"))
        machine.end("t")
        machine.hear("b", demand=pb.Demand(waiting=1))
        assert self.out(machine) == "b"

    def test_no_more_moves_than_waits(self) -> None:
        machine = Machine(slots=10)
        for address in "abc":
            machine.open(address)
            machine.hear(address, cluster_changed=pb.ClusterChanged())
        self.wants(machine, "c", 3)
        assert machine.streams["a"].account.withdrawing == 3
        machine.hear("a", credit_returned=pb.CreditReturned(count=3))
        assert [machine.credit(address) for address in "abc"] == [7, 0, 3]

    def test_a_demand_that_is_not_repeated_moves_nothing_any_more(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        self.wants(machine, "c")
        machine.wait(10 * bounds.SECOND)
        machine.end("t")
        assert self.out(machine) == "b"

    def test_the_credit_of_a_node_that_drains_goes_to_others_at_once(self, machine: Machine) -> None:
        machine.hear("a", draining=pb.Draining())
        machine.flush()
        self.wants(machine, "a")
        machine.hear("a", credit_returned=pb.CreditReturned(count=1))
        assert self.out(machine) in ("b", "c")

    def test_threads_are_for_the_nodes_where_work_waits(self) -> None:
        machine = Machine(slots=9, threads=6)
        for address in "abc":
            machine.open(address)
        self.wants(machine, "b")
        machine.wait(0)
        machine.flush()
        assert machine.streams["b"].account.limited["block"] == 6


class TestDraining:
    def test_goodbye_is_said_and_what_waits_is_returned(self) -> None:
        machine = Machine(slots=1, prefetch=2)
        machine.open()
        machine.assign(assignment("t1"), assignment("t2"), assignment("t3"))
        machine.drain()
        assert machine.ids("returned") == ["t2", "t3"]
        assert len(machine.told("goodbye")) == 1
        assert machine.protocol.out == 0

    def test_what_was_on_its_way_is_returned(self, machine: Machine) -> None:
        machine.drain()
        machine.assign(assignment("t"))
        assert machine.started == []
        assert machine.ids("returned") == ["t"]

    def test_it_is_over_when_all_outcomes_are_recorded(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.drain()
        machine.end("t")
        assert machine.credit() == 4
        assert not machine.protocol.is_idle
        machine.record(token_of("t"))
        assert machine.protocol.is_idle

    def test_a_stream_opened_meanwhile_gets_no_credit(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.drain()
        machine.close()
        machine.open()
        machine.end("t")
        assert machine.credit() == 0
        assert len(machine.told("goodbye")) == 1
        assert machine.ids("succeeded") == ["t"]

    def test_what_still_runs_at_the_end_is_asked_to_stop(self, machine: Machine) -> None:
        machine.assign(assignment("t"))
        machine.drain()
        machine.perform(machine.protocol.stop_running())
        assert machine.stopped == [("t", StopReason.SHUTDOWN)]
