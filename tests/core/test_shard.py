"""What a shard does around its tasks: writes that fail, loads that come late, leases that move, terms that end."""

from dataclasses import replace

import pytest
from core.builders import START, a_holder, a_lane, a_submission
from core.one_shard import LEASE, OneShard, held, waiting

from duecourse.model import bounds
from duecourse.model.instants import Now
from duecourse.server.core import callers, errors, events
from duecourse.server.core.effects import Cancelled, CancelResult, Effects, StopReason, Submitted, Verdict
from duecourse.server.core.events import OutcomeKind
from duecourse.server.core.task import AttemptOutcome, FailureReason, Policy, ShardId, TaskKey, TaskState

KEY = TaskKey("default", "task")
LISTENING = bounds.SILENT_INTERVALS * bounds.DEFAULT_HEARTBEAT + bounds.LISTEN_MARGIN


def a_grant(shard: OneShard, token: bytes = b"a token") -> events.Grant:
    return events.Grant(shard.shard.near.tasks[KEY], shard.holder, token, LEASE, 1)


def refuse(shard: OneShard) -> None:
    """Let the store refuse the only write that waits, for its data."""
    (write,) = shard.waiting
    shard.waiting = []
    shard.holds_commits = False
    shard.handle(events.WriteRefused(write, "the data"))


def set_back(shard: OneShard) -> None:
    """Give the task the revision of another one, though its attempt is the same: so may a store that fell back."""
    row = shard.store.rows[KEY]
    shard.store.rows[KEY] = replace(row, progress=replace(row.progress, revision=row.progress.revision + 7))


# Nothing before its commit.


def test_nothing_leaves_before_its_commit() -> None:
    shard = OneShard()
    shard.holds_commits = True
    shard.submit_only()
    assert not shard.out.answers
    shard.commit()
    assert [answer for _, answer in shard.out.answers] == [Submitted(b"task", created=True)]
    assert shard.out.ready
    token = shard.grant()
    assert not shard.out.assignments
    shard.commit()
    assert [assignment.lease.token for assignment in shard.out.assignments] == [token]
    assert shard.end(token, OutcomeKind.SUCCEEDED) is None
    shard.commit()
    assert [verdict for _, _, verdict in shard.out.verdicts] == [Verdict.RECORDED]


def test_an_assignment_brings_what_was_submitted() -> None:
    shard = waiting()
    shard.grant()
    assert shard.out.assignments[0].delivery.payload == b"task"


@pytest.mark.parametrize("is_held", [False, True])
def test_what_the_store_has_forgotten_and_takes_anew_is_in_memory_once(is_held: bool) -> None:
    shard = waiting()
    if is_held:
        forgotten = shard.grant()
    del shard.store.rows[KEY]
    shard.submit()
    assert len(shard.shard.near.tasks) == 1
    if is_held:
        assert forgotten not in shard.shard.leases.by_token
        assert shard.out.lost == [(shard.holder, forgotten)]
    token = shard.grant()
    assert shard.end(token, OutcomeKind.SUCCEEDED) is Verdict.RECORDED
    assert shard.shard.tasks_in_memory == 0


def test_events_for_a_task_wait_for_its_write_and_keep_their_order() -> None:
    shard = waiting()
    shard.holds_commits = True
    token = shard.grant()
    shard.start(token)
    first = shard.cancel()
    shard.end(token, OutcomeKind.RETRYABLE)
    second = shard.cancel()
    shard.holds_commits = False
    shard.commit()
    assert shard.progress().state is TaskState.CANCELLED
    assert shard.answer(first) == Cancelled(CancelResult.REQUESTED, TaskState.RUNNING, earlier_attempt_may_run=False)
    assert shard.answer(second) == Cancelled(
        CancelResult.ALREADY_FINISHED, TaskState.CANCELLED, earlier_attempt_may_run=False
    )


# Writes that fail.


def test_a_refused_insert_is_answered_and_leaves_nothing() -> None:
    shard = OneShard()
    shard.holds_commits = True
    origin = shard.submit_only()
    refuse(shard)
    assert shard.answer(origin) == errors.StoreFailed("the data")
    assert not shard.shard.lines.busy
    assert isinstance(shard.submit(), Submitted)


def test_a_refused_grant_gives_its_credit_back_once_and_is_tried_again_after_a_pause() -> None:
    """Without one it would be granted and refused as fast as the store answers, for ever."""
    shard = waiting()
    shard.holds_commits = True
    shard.grant()
    refuse(shard)
    assert len(shard.out.unmatched) == 1
    assert shard.shard.is_settled
    shard.pass_time(4 * bounds.SECOND)
    assert not shard.is_ready()
    shard.pass_time(2 * bounds.SECOND)
    assert shard.is_ready()


def test_who_cancels_what_could_not_be_granted_is_answered_after_the_pause() -> None:
    shard = waiting()
    shard.holds_commits = True
    shard.grant()
    refuse(shard)
    origin = shard.cancel()
    shard.pass_time(6 * bounds.SECOND)
    assert shard.answer(origin) == Cancelled(CancelResult.PREVENTED, TaskState.CANCELLED, earlier_attempt_may_run=False)


def test_what_was_granted_and_does_not_decode_fails_at_once_and_costs_nothing() -> None:
    shard = waiting()
    shard.holds_commits = True
    shard.grant()
    [write] = shard.waiting
    shard.holds_commits = False
    shard.store.commit(shard.shard.fence, shard.waiting, shard.now().earliest)
    shard.waiting = []
    shard.handle(events.Committed([write], {}, set(), {0: False}))
    progress = shard.progress()
    assert (progress.state, progress.failure_reason) == (TaskState.FAILED, FailureReason.RECORD_CORRUPT)
    assert progress.attempt is not None
    assert (progress.attempts_used, progress.attempt.outcome) == (0, AttemptOutcome.RETURNED)
    assert not shard.out.assignments
    assert len(shard.out.unmatched) == 1
    assert not shard.shard.leases.by_task
    assert not shard.is_ready()


def test_a_refused_cancellation_is_answered_and_the_task_waits_on() -> None:
    shard = waiting()
    shard.holds_commits = True
    origin = shard.cancel()
    refuse(shard)
    assert shard.answer(origin) == errors.StoreFailed("the data")
    assert shard.is_ready()


def test_a_refused_outcome_leaves_the_attempt_open() -> None:
    shard, token = held(TaskState.RUNNING)
    shard.holds_commits = True
    shard.end(token, OutcomeKind.RETRYABLE)
    refuse(shard)
    assert shard.progress().state is TaskState.RUNNING
    assert shard.lease().token == token
    assert shard.end(token, OutcomeKind.SUCCEEDED) is Verdict.RECORDED


@pytest.mark.parametrize("kind", [OutcomeKind.SUCCEEDED, OutcomeKind.NON_RETRYABLE])
def test_an_outcome_that_is_repeated_is_recorded_and_in_other_words_it_is_not(kind: OutcomeKind) -> None:
    shard, token = held(TaskState.RUNNING)
    assert shard.end(token, kind, digest=b"a word") is Verdict.RECORDED
    assert shard.end(token, kind, digest=b"a word") is Verdict.RECORDED
    assert shard.end(token, kind, digest=b"another") is Verdict.LEASE_LOST


def test_a_cancellation_that_met_another_revision_is_handled_again() -> None:
    shard = waiting()
    outdated = shard.shard.near.tasks[KEY]
    shard.grant()
    shard.end(shard.attempt().lease_token, OutcomeKind.RETURNED)
    current = shard.shard.near.tasks[KEY]
    shard.shard.near.take(current)
    outdated.progress = type(outdated.progress)(TaskState.PENDING, START, 1, 1, 0, 0, 0, False, False, None)
    shard.shard.near.place(outdated, [], START)
    answer = shard.answer(shard.cancel())
    assert isinstance(answer, Cancelled)
    assert answer.result is CancelResult.PREVENTED
    assert shard.progress().state is TaskState.CANCELLED


# Loads that come late.


def test_a_load_that_meets_a_repeated_submission_does_not_lose_the_task() -> None:
    shard = OneShard(horizon=bounds.BUCKET)
    shard.submit(delay=2 * bounds.BUCKET)
    assert not shard.shard.near.tasks
    reached = shard.shard.near.advance(START + 4 * bounds.BUCKET)
    shard.holds_commits = True
    again = shard.submit_only(delay=2 * bounds.BUCKET)
    tasks, cut = shard.store.snapshot().buckets(ShardId(0), reached, shard.shard.near.horizon, bounds.HEAD)
    shard.handle(events.BucketsLoaded(tasks, cut))
    shard.holds_commits = False
    shard.commit()
    assert shard.answer(again) == Submitted(b"task", created=False)
    assert KEY in shard.shard.near.tasks


def test_a_read_that_meets_a_repeated_submission_does_not_lose_the_task() -> None:
    shard = waiting()
    shard.shard.near.take(shard.shard.near.tasks[KEY])
    shard.shard.lines.busy[KEY] = [events.Submit([(a_submission(), object())])]
    shard.handle(events.TasksRead([(KEY, shard.store.snapshot().task(KEY))]))
    assert shard.is_ready()


def test_the_audit_finds_what_memory_misses_and_counts_it() -> None:
    shard = waiting()
    shard.handle(events.Audited(shard.store.snapshot().oldest_due(ShardId(0), START + 1, 10)))
    assert shard.out.audit_misses == 0
    shard.shard.near.take(shard.shard.near.tasks[KEY])
    shard.handle(events.Audited(shard.store.snapshot().oldest_due(ShardId(0), START + 1, 10)))
    assert shard.out.audit_misses == 1
    assert shard.is_ready()


def test_the_audit_calls_nothing_missed_that_is_still_being_read() -> None:
    """Its store was away for longer than the horizon reaches, and the audit is the first to hear of it again."""
    shard = OneShard(horizon=bounds.BUCKET)
    shard.submit(delay=2 * bounds.BUCKET)
    near = shard.shard.near
    reached = near.advance(START + 4 * bounds.BUCKET)
    shard.elapsed = 3 * bounds.BUCKET
    snapshot = shard.store.snapshot()
    audited = events.Audited(snapshot.oldest_due(ShardId(0), shard.now().earliest, 10))
    assert audited.tasks
    shard.handle(audited)
    assert not near.tasks
    tasks, cut = snapshot.buckets(ShardId(0), reached, near.horizon, bounds.HEAD)
    shard.handle(events.BucketsLoaded(tasks, cut, reached))
    near.take(near.tasks[KEY])
    assert shard.out.audit_misses == 0
    shard.handle(audited)
    assert shard.out.audit_misses == 1


def test_the_audit_calls_nothing_missed_that_has_changed_since_it_was_read() -> None:
    """It was held then, was returned, and had been beyond its lane's cursor until just now."""
    shard, token = held(TaskState.LEASED)
    audited = events.Audited(shard.store.snapshot().held(ShardId(0)))
    shard.end(token, events.OutcomeKind.RETURNED)
    shard.pass_time(bounds.MINUTE)
    shard.shard.near.take(shard.shard.near.tasks[KEY])
    shard.handle(audited)
    assert shard.is_ready()
    assert shard.out.audit_misses == 0


def test_the_audit_finds_a_lease_of_a_store_that_has_fallen_back() -> None:
    shard, token = held(TaskState.RUNNING)
    lease = shard.shard.leases.by_task[KEY]
    shard.handle(events.Audited(shard.store.snapshot().held(ShardId(0))))
    assert shard.shard.leases.by_task[KEY] is lease
    shard.shard.leases.drop(lease)
    shard.handle(events.Audited(shard.store.snapshot().held(ShardId(0))))
    assert shard.shard.leases.by_task[KEY].token == token


def test_the_audit_has_read_what_does_not_decode_but_for_what_memory_knows() -> None:
    shard = waiting()
    other, out = TaskKey(KEY.namespace, "another"), Effects()
    shard.shard.handle(events.Audited([], [KEY, other]), shard.now(), out)
    assert out.task_reads == [(ShardId(0), other)]
    shard.handle(events.TasksRead([(other, False)]))
    assert shard.out.audit_misses == 0
    assert shard.is_ready()


def test_a_backlog_larger_than_memory_drains_in_order() -> None:
    shard = OneShard(head=4)
    for number in range(100):
        shard.submit(f"task {number:03}")
    assert len(shard.shard.near.tasks) <= 8
    served = []
    while shard.shard.near.tasks:
        task = min(shard.shard.near.tasks.values(), key=lambda task: task.sequence)
        served.append(task.task_id)
        shard.end(shard.grant(task.task_id), OutcomeKind.SUCCEEDED, task.task_id)
    assert served == [f"task {number:03}" for number in range(100)]
    assert not shard.shard.near.heads


def test_an_outcome_for_a_lease_that_memory_lacks_is_recorded() -> None:
    shard, token = held(TaskState.RUNNING)
    shard.shard.leases.drop(shard.lease())
    assert shard.end(token, OutcomeKind.SUCCEEDED) is Verdict.RECORDED


def test_a_record_that_does_not_decode_is_said_to_be_corrupt() -> None:
    shard = OneShard()
    out = Effects()
    origin = object()
    shard.shard.handle(events.Cancel(KEY, "", b"", None, 0, origin), shard.now(), out)
    assert out.task_reads == [(ShardId(0), KEY)]
    shard.handle(events.TasksRead([(KEY, False)]))
    assert shard.answer(origin) == errors.RecordCorrupt("task")
    assert not shard.shard.lines.busy


def test_an_outcome_of_a_record_that_does_not_decode_is_not_asked_for_for_ever() -> None:
    shard, token = held(TaskState.RUNNING)
    attempt = shard.attempt()
    shard.take_over()
    shard.shard.leases.drop(shard.lease())
    end = events.End(KEY, token, shard.holder, OutcomeKind.SUCCEEDED, b"digest")
    out = Effects()
    shard.shard.handle(events.AttemptRead(end, attempt), shard.now(), out)
    assert out.task_reads == [(ShardId(0), KEY)]
    shard.handle(events.TasksRead([(KEY, False)]))
    assert shard.out.verdicts == [(shard.holder, token, Verdict.UNKNOWN_TOKEN)]


# Leases that move.


def test_a_new_term_adopts_what_its_worker_lists_and_renews_it() -> None:
    shard, token = held(TaskState.LEASED)
    shard.take_over()
    lease = shard.lease()
    assert lease.holder is None
    shard.hold(token, has_started=True)
    assert lease.holder is shard.holder
    assert shard.progress().state is TaskState.RUNNING
    assert shard.attempt().epoch == shard.shard.fence.epoch, "the adoption is stored"
    shard.pass_time(2 * LEASE)
    assert shard.progress().state is TaskState.RUNNING


def test_a_new_term_expires_nothing_before_it_has_listened() -> None:
    shard, _ = held(TaskState.RUNNING)
    shard.elapsed += bounds.HOUR
    shard.take_over()
    shard.pass_time(LISTENING - bounds.SECOND, is_renewed=False)
    assert shard.progress().state is TaskState.RUNNING


def test_an_outcome_that_was_known_while_nobody_led_is_recorded_though_its_time_is_over() -> None:
    shard, token = held(TaskState.RUNNING, Policy(attempt_timeout=bounds.MINUTE))
    shard.elapsed += bounds.HOUR
    shard.take_over()
    shard.pass_time(LISTENING - bounds.SECOND, is_renewed=False)
    assert shard.end(token, OutcomeKind.SUCCEEDED) is Verdict.RECORDED


@pytest.mark.parametrize("further", [0, 3])
def test_the_grace_ends_one_lease_time_after_the_first_takeover(further: int) -> None:
    shard, _ = held(TaskState.RUNNING)
    shard.elapsed += bounds.SECOND
    shard.take_over()
    first = shard.elapsed
    for _ in range(further):
        shard.elapsed += 5 * bounds.SECOND
        shard.take_over()
    shard.pass_time(first + LEASE - shard.elapsed - bounds.SECOND, is_renewed=False)
    assert shard.progress().state is TaskState.RUNNING
    shard.pass_time(2 * bounds.SECOND, is_renewed=False)
    assert shard.attempt().outcome is AttemptOutcome.LEASE_LOST


def test_the_time_of_an_attempt_goes_on_through_a_takeover() -> None:
    shard, token = held(TaskState.RUNNING, Policy(attempt_timeout=40 * bounds.SECOND))
    shard.pass_time(20 * bounds.SECOND)
    shard.take_over()
    shard.hold(token, has_started=True)
    shard.pass_time(19 * bounds.SECOND)
    assert not shard.out.stops
    shard.pass_time(2 * bounds.SECOND)
    assert [reason for _, _, reason in shard.out.stops] == [StopReason.TIMED_OUT]


def test_a_cancellation_goes_on_through_a_takeover() -> None:
    shard, token = held(TaskState.RUNNING)
    shard.cancel()
    shard.take_over()
    shard.out.stops.clear()
    shard.hold(token, has_started=True)
    assert shard.out.stops == [(shard.holder, token, StopReason.CANCELLED)]
    shard.end(token, OutcomeKind.RETRYABLE)
    assert shard.progress().state is TaskState.CANCELLED


@pytest.mark.parametrize("why", list(StopReason))
def test_a_new_stream_is_told_what_the_old_one_was_asked_to_stop(why: StopReason) -> None:
    shard, token = held(TaskState.RUNNING, Policy(attempt_timeout=bounds.MINUTE))
    if why is StopReason.CANCELLED:
        shard.cancel()
    else:
        shard.pass_time(bounds.MINUTE + bounds.SECOND)
    shard.out.stops.clear()
    shard.new_stream()
    shard.hold(token, has_started=True)
    assert shard.out.stops == [(shard.holder, token, why)]


def test_an_assignment_that_was_lost_with_its_stream_is_returned_by_the_next_one() -> None:
    shard, _ = held(TaskState.LEASED)
    shard.lease().assignment_number = 7
    shard.hold(last=3)
    assert shard.progress().state is TaskState.LEASED
    shard.new_stream()
    shard.hold(last=0)
    assert shard.attempt().outcome is AttemptOutcome.RETURNED


def test_an_assignment_that_a_new_stream_listed_and_lists_no_more_is_returned() -> None:
    """The numbers of the old stream mean nothing on the new one."""
    shard, token = held(TaskState.LEASED)
    shard.lease().assignment_number = 7
    shard.new_stream()
    shard.hold(token, last=0)
    shard.hold(last=0)
    assert shard.attempt().outcome is AttemptOutcome.RETURNED


def test_an_adoption_that_finds_another_revision_is_written_after_a_read() -> None:
    shard, token = held(TaskState.LEASED)
    shard.take_over()
    set_back(shard)
    shard.hold(token, has_started=True)
    assert shard.progress().state is TaskState.RUNNING
    assert shard.attempt().epoch == shard.shard.fence.epoch


def test_what_is_absent_ends_although_another_revision_is_found() -> None:
    shard, _ = held(TaskState.LEASED)
    set_back(shard)
    shard.hold(last=1)
    assert shard.attempt().outcome is AttemptOutcome.RETURNED
    assert shard.progress().attempts_used == 0


def test_what_is_absent_while_its_task_is_being_written_is_returned_afterwards() -> None:
    shard, _ = held(TaskState.LEASED)
    shard.new_stream()
    shard.holds_commits = True
    shard.submit_only()
    shard.hold(last=0)
    shard.holds_commits = False
    shard.commit()
    assert shard.attempt().outcome is AttemptOutcome.RETURNED
    assert shard.progress().attempts_used == 0


def test_a_replaced_leader_does_not_call_its_successors_lease_lost() -> None:
    shard = waiting()
    replaced = shard.shard
    shard.take_over()
    token = shard.grant()
    out = Effects()
    leases: dict[bytes, tuple[TaskKey | None, bool]] = {token: (KEY, False)}
    replaced.handle(events.Hold(shard.holder, leases, 1, is_complete=True), shard.now(), out)
    if out.task_reads:
        replaced.handle(events.TasksRead([(KEY, shard.store.snapshot().task(KEY))]), shard.now(), out)
    assert not out.lost


def test_another_worker_proves_nothing() -> None:
    shard, _ = held(TaskState.LEASED)
    shard.holder = a_holder(9, incarnation="another")
    shard.hold(last=100)
    assert shard.progress().state is TaskState.LEASED


def test_a_lease_that_is_over_is_told_to_who_lists_it() -> None:
    shard, token = held(TaskState.RUNNING)
    shard.end(token, OutcomeKind.RETRYABLE)
    shard.hold(token)
    assert shard.out.lost == [(shard.holder, token)]


def test_a_lease_that_is_listed_while_it_ends_is_told_to_be_over_in_the_end() -> None:
    shard, token = held(TaskState.RUNNING)
    shard.pass_time(LEASE - bounds.SECOND // 2, is_renewed=False)
    shard.new_stream()
    shard.holds_commits = True
    shard.elapsed += bounds.SECOND
    shard.handle(events.Tick())
    shard.hold(token, has_started=True)
    shard.holds_commits = False
    shard.commit()
    assert shard.attempt().outcome is AttemptOutcome.LEASE_LOST
    assert (shard.holder, token) in shard.out.lost


def test_a_start_that_is_listed_while_the_task_is_being_written_is_not_forgotten() -> None:
    shard, token = held(TaskState.LEASED)
    shard.holds_commits = True
    shard.cancel()
    shard.new_stream()
    shard.hold(token, has_started=True)
    shard.holds_commits = False
    shard.commit()
    assert shard.progress().state is TaskState.RUNNING


def test_an_assignment_that_did_not_leave_the_node_is_returned() -> None:
    shard, _ = held(TaskState.LEASED)
    lease = shard.lease()
    shard.handle(events.Unsent(lease))
    assert shard.progress().state is TaskState.PENDING
    shard.handle(events.Unsent(lease))
    assert shard.progress().revision == 3


def test_a_sign_of_life_is_stored_once_a_lease_time() -> None:
    shard, _ = held(TaskState.RUNNING)
    before = shard.progress().revision
    shard.pass_time(5 * LEASE)
    assert 4 <= shard.progress().revision - before <= 5
    assert shard.attempt().sign_of_life >= START + 4 * LEASE


def test_a_handlers_word_is_stored_once_and_stays_with_its_attempt() -> None:
    shard, token = held(TaskState.RUNNING, Policy(initial_backoff=bounds.SECOND, jitter=0.0))
    shard.pass_time(bounds.DEFAULT_HEARTBEAT)
    before = shard.progress().revision
    shard.report(token, "half")
    assert shard.progress().revision == before
    shard.pass_time(LEASE - bounds.SECOND)
    assert (shard.attempt().progress, shard.progress().revision) == ("half", before + 1)
    shard.end(token, OutcomeKind.RETRYABLE)
    assert shard.attempt().progress == "half"
    shard.pass_time(bounds.SECOND)
    shard.grant()
    assert shard.attempt().progress == ""
    assert [attempt.progress for attempt in shard.store.rows[KEY].attempts] == ["half", ""]


def test_a_handler_that_talks_all_the_time_is_stored_once_a_heartbeat_with_its_sign_of_life() -> None:
    shard, token = held(TaskState.RUNNING)
    before = shard.progress().revision
    for number in range(4 * LEASE // bounds.SECOND):
        shard.report(token, f"row {number}")
        shard.pass_time(bounds.SECOND)
    beats = 4 * LEASE // bounds.DEFAULT_HEARTBEAT
    assert beats // 2 <= shard.progress().revision - before <= beats
    assert shard.attempt().sign_of_life >= START + 4 * LEASE - 2 * bounds.DEFAULT_HEARTBEAT
    assert shard.attempt().progress >= f"row {(4 * LEASE - 2 * bounds.DEFAULT_HEARTBEAT) // bounds.SECOND}"


def test_a_word_that_comes_while_the_task_is_being_written_is_stored_after_it() -> None:
    shard, token = held(TaskState.LEASED)
    shard.pass_time(bounds.DEFAULT_HEARTBEAT)
    shard.holds_commits = True
    shard.start(token)
    shard.report(token, "half")
    shard.holds_commits = False
    shard.commit()
    shard.pass_time(bounds.SECOND)
    assert (shard.progress().state, shard.attempt().progress) == (TaskState.RUNNING, "half")


def test_a_word_that_the_store_refused_is_tried_again() -> None:
    shard, token = held(TaskState.RUNNING)
    shard.report(token, "half")
    shard.holds_commits = True
    shard.pass_time(bounds.DEFAULT_HEARTBEAT)
    refuse(shard)
    assert shard.attempt().progress == ""
    shard.pass_time(bounds.DEFAULT_HEARTBEAT + bounds.SECOND)
    assert shard.attempt().progress == "half"


def test_a_word_under_a_token_that_is_not_the_tasks_changes_nothing() -> None:
    shard, token = held(TaskState.RUNNING)
    shard.submit("other")
    before = shard.progress()
    shard.report(b"unknown", "half")
    shard.report(token, "half", task_id="other")
    shard.pass_time(2 * bounds.DEFAULT_HEARTBEAT)
    assert shard.progress() == before


def test_a_new_term_keeps_the_word_that_was_stored_and_hears_the_next_one() -> None:
    shard, token = held(TaskState.RUNNING)
    shard.report(token, "half")
    shard.pass_time(bounds.DEFAULT_HEARTBEAT)
    shard.take_over()
    shard.hold(token, has_started=True)
    assert (shard.attempt().progress, shard.attempt().epoch) == ("half", shard.shard.fence.epoch)
    shard.report(token, "more")
    shard.pass_time(bounds.DEFAULT_HEARTBEAT + bounds.SECOND)
    assert shard.attempt().progress == "more"


def test_time_in_which_the_loop_did_not_run_is_not_the_workers_silence() -> None:
    shard, _ = held(TaskState.RUNNING)
    shard.pass_time(bounds.SECOND)
    shard.elapsed += 10 * LEASE
    shard.handle(events.Tick())
    assert shard.progress().state is TaskState.RUNNING
    shard.pass_time(LEASE + bounds.SECOND, is_renewed=False)
    assert shard.attempt().outcome is AttemptOutcome.LEASE_LOST


def test_a_lease_that_is_heard_of_just_after_a_pause_lasts_no_longer_for_the_pause() -> None:
    shard, token = held(TaskState.RUNNING)
    shard.pass_time(bounds.SECOND)
    shard.elapsed += LEASE
    shard.holder.renewed_at = shard.elapsed
    shard.hold(token, has_started=True)
    shard.handle(events.Tick())
    shard.pass_time(LEASE + bounds.SECOND, is_renewed=False)
    assert shard.attempt().outcome is AttemptOutcome.LEASE_LOST


# Time.


def test_a_task_is_due_only_when_the_whole_interval_of_the_clock_has_reached_it() -> None:
    shard = waiting()
    shard.submit("later", delay=bounds.MINUTE)
    due_time = shard.progress("later").due_time
    assert due_time is not None
    out = Effects()
    shard.shard.handle(events.Tick(), Now(due_time - 1, due_time + bounds.SECOND, 1), out)
    assert not out.ready
    shard.shard.handle(events.Tick(), Now(due_time, due_time + bounds.SECOND, 2), out)
    assert [task.task_id for task in out.ready] == ["later"]


def test_a_delay_counts_from_the_latest_that_it_may_be() -> None:
    shard = OneShard()
    out = Effects()
    now = Now(START, START + bounds.SECOND, 0)
    submissions = [(a_submission("now"), 1), (a_submission("later", delay=bounds.MINUTE), 2)]
    shard.shard.handle(events.Submit(submissions), now, out)
    assert [write.task.run_at for write in out.writes] == [START, START + bounds.SECOND + bounds.MINUTE]


def test_lateness_counts_from_what_was_wanted_or_acceptance() -> None:
    shard = OneShard()
    shard.submit(delay=bounds.SECOND, policy=Policy(initial_backoff=bounds.SECOND, jitter=0.0))
    shard.pass_time(bounds.SECOND)
    token = shard.grant()
    shard.elapsed += 3
    shard.start(token)
    shard.end(token, OutcomeKind.RETRYABLE)
    shard.pass_time(bounds.SECOND)
    token = shard.grant()
    shard.end(token, OutcomeKind.SUCCEEDED, start_time=shard.now().latest + 4)
    assert shard.out.lateness == [(3, False), (4, True)]
    shard.submit("past")
    shard.start(shard.grant("past"), "past")
    assert shard.out.lateness[-1] == (0, False)


# The end of a term.


def test_the_end_of_a_term_answers_everyone_who_waits() -> None:
    shard, _ = held(TaskState.LEASED)
    waits = shard.cancel(wait=bounds.SECOND)
    shard.submit("other")
    shard.holds_commits = True
    in_flight = shard.cancel("other")
    in_line = shard.cancel("other")
    resubmitted = shard.submit_only("other")
    out = Effects()
    for write in shard.waiting:
        callers.give_up(write, errors.OutcomeUncertain(), out)
    shard.shard.close(out)
    answers = dict(out.answers)
    assert len(answers) == len(out.answers) == 4
    assert answers[waits] == Cancelled(CancelResult.REQUESTED, TaskState.LEASED, earlier_attempt_may_run=False)
    assert isinstance(answers[in_flight], errors.OutcomeUncertain)
    assert answers[in_line] == answers[resubmitted] == errors.NoLeader(ShardId(0))


def test_the_end_of_a_term_gives_all_credit_back() -> None:
    shard = waiting()
    shard.submit("other")
    shard.holds_commits = True
    shard.grant("other")
    shard.submit_only()
    shard.handle(a_grant(shard))
    assert not shard.out.unmatched
    out = Effects()
    for write in shard.waiting:
        callers.give_up(write, errors.OutcomeUncertain(), out)
    shard.shard.close(out)
    assert out.unmatched == [(a_lane(), shard.holder)] * 2


def test_an_answer_of_the_store_that_comes_after_the_end_still_counts_for_those_who_wait() -> None:
    shard = waiting()
    shard.holds_commits = True
    cancelled = shard.cancel()
    submitted = shard.submit_only("other")
    shard.submit_only("third")
    answer = shard.store.commit(shard.shard.fence, shard.waiting, START)
    assert answer is not None
    out = Effects()
    callers.turn_away(answer, errors.NoLeader(ShardId(0)), out)
    assert isinstance(dict(out.answers)[cancelled], errors.OutcomeUncertain)
    assert isinstance(dict(out.answers)[submitted], errors.OutcomeUncertain)
    assert len(out.answers) == 3


def test_what_a_closed_shard_had_ready_is_passed_over() -> None:
    shard = waiting()
    (task,) = shard.shard.near.tasks.values()
    shard.shard.close(Effects())
    assert not task.is_ready
