"""What must hold of what is said: a node says nothing before it is true in the store, a worker stands by its word."""

from typing import Any, Final

import grpc
from simulation.history import History, Record
from simulation.loop import Process
from simulation.network import Status

from duecourse.model.instants import Micros
from duecourse.server.core.task import HELD, TERMINAL, AttemptOutcome, TaskKey, TaskState
from duecourse.v1 import task_pb2, task_service_pb2, worker_service_pb2

_SAID: Final = {
    "succeeded": AttemptOutcome.SUCCEEDED,
    worker_service_pb2.FAILURE_KIND_RETRYABLE: AttemptOutcome.FAILED,
    worker_service_pb2.FAILURE_KIND_NON_RETRYABLE: AttemptOutcome.FAILED,
    worker_service_pb2.FAILURE_KIND_TIMED_OUT: AttemptOutcome.TIMED_OUT,
    worker_service_pb2.FAILURE_KIND_CANCELLED: AttemptOutcome.CANCELLED,
    "returned": AttemptOutcome.RETURNED,
}
_MOMENTS: Final = {
    "succeeded": "outcome said",
    "failed": "outcome said",
    "returned": "outcome said",
    "leases_held": "leases held",
}
"""What a worker says at which a fault may strike."""
_FAULTS_OF_OURS: Final = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)


class WireChecks:
    """See the module's docstring."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._fail = history.fail
        self._coverage = history.coverage

    def client_says(self, client: Process, method: str, message: Any) -> None:
        """Remember what a worker says of its attempts' ends, and which cancellations are asked for."""
        if isinstance(message, task_service_pb2.CancelTaskRequest):
            self._history.cancel_asked.add(TaskKey("default", message.task_id))
        if not isinstance(message, worker_service_pb2.StreamAssignmentsRequest):
            if not client.name.startswith("client"):
                self._coverage[f"node passes {method.rpartition('/')[2]} on"] += 1
            return
        event = message.WhichOneof("event")
        self._coverage[f"worker says {event}"] += 1
        match event:
            case "succeeded":
                for success in message.succeeded.attempts:
                    self._said(success.attempt.lease_token, _SAID["succeeded"])
            case "failed":
                for failed in message.failed.attempts:
                    is_final = failed.kind == worker_service_pb2.FAILURE_KIND_NON_RETRYABLE
                    self._said(failed.attempt.lease_token, _SAID[failed.kind], is_final=is_final)
            case "returned":
                for reference in message.returned.attempts:
                    self._said(reference.lease_token, _SAID["returned"])
            case "leases_held":
                for lease in message.leases_held.leases:
                    self._listed(lease.lease_token)
            case "heartbeat" | "credit":
                return
        if self._history.is_traced:
            self._history.note(client.name, f"says {event} {_brief(message)}")
        if moment := _MOMENTS.get(event or ""):
            self._history.strike(moment, client)

    def _said(self, token: bytes, outcome: AttemptOutcome, *, is_final: bool = False) -> None:
        grant = self._history.grants.get(token)
        if grant is None:
            self._fail("S13", f"a worker tells of {outcome} under a token that nobody granted")
        elif grant.said is None:
            grant.said, grant.is_said_to_be_final = outcome, is_final
        elif grant.said is not outcome:
            self._fail("S13", f"a worker said {grant.said} and then {outcome}", grant.record.task.key)

    def _listed(self, token: bytes) -> None:
        grant = self._history.grants.get(token)
        if grant is not None:
            grant.record.listed.add(token)

    def server_says(self, server: Process, client: Process, method: str, request: Any, message: Any) -> None:
        """Check that nothing leaves a node before it is true in the store."""
        match message:
            case worker_service_pb2.StreamAssignmentsResponse():
                self._stream_says(server, client, message)
            case task_service_pb2.SubmitTaskResponse():
                self._acknowledged(client, request.task, message.submitted)
                self._history.strike("submission answered", server)
            case task_service_pb2.SubmitTasksResponse():
                for task, result in zip(request.tasks, message.results, strict=True):
                    if result.HasField("submitted"):
                        self._acknowledged(client, task, result.submitted)
                    elif result.error.code in [code.value[0] for code in _FAULTS_OF_OURS]:
                        self._fail("S20", f"{task.task_id}: {result.error.message}")
                    elif result.error.code == grpc.StatusCode.ALREADY_EXISTS.value[0]:
                        self._said_to_exist(task)
                self._history.strike("submission answered", server)
            case task_service_pb2.CancelTaskResponse():
                self._cancelled(request, message)
            case _:
                pass

    def _stream_says(self, server: Process, client: Process, message: Any) -> None:
        event = message.WhichOneof("event")
        self._coverage[f"node says {event}"] += 1
        match event:
            case "assignments":
                for assignment in message.assignments.assignments:
                    grant = self._history.grants.get(assignment.lease_token)
                    if grant is None:
                        self._fail("S4", f"{assignment.task.task_id} was assigned before its grant was durable")
                self._history.strike("assignments said", server)
            case "outcomes_recorded":
                for token in message.outcomes_recorded.recorded:
                    self._verdict(token, worker_service_pb2.OUTCOME_VERDICT_RECORDED)
                for other in message.outcomes_recorded.others:
                    self._verdict(other.lease_token, other.verdict)
                self._history.strike("outcomes recorded", server)
            case "cancel_requested":
                for token in message.cancel_requested.lease_tokens:
                    self._stop_asked(token, message.cancel_requested.reason)
                self._history.strike("cancel requested", server)
            case "lease_lost":
                for token in message.lease_lost.lease_tokens:
                    grant = self._history.grants.get(token)
                    if grant is not None and grant.outcome is None and self._is_kept(grant.record):
                        self._fail("S13", "a worker is told that a current lease is lost", grant.record.task.key)
            case "heartbeat":
                return
        if self._history.is_traced:
            self._history.note(server.name, f"says {event} to {client} {_brief(message)}")

    def _verdict(self, token: bytes, verdict: int) -> None:
        grant = self._history.grants.get(token)
        self._coverage[f"verdict {worker_service_pb2.OutcomeVerdict.Name(verdict).lower()}"] += 1  # type: ignore[arg-type]
        key = None if grant is None else grant.record.task.key
        is_known = grant is not None and self._is_kept(grant.record)
        match verdict:
            case worker_service_pb2.OUTCOME_VERDICT_RECORDED:
                if grant is None or grant.outcome is None:
                    self._fail("S13", "an outcome is said to be recorded, and is not", key)
                elif grant.outcome is not grant.said and (grant.outcome, grant.said) != (
                    AttemptOutcome.LEASE_LOST,
                    AttemptOutcome.RETURNED,
                ):
                    self._fail("S13", f"{grant.said} is said to be recorded, {grant.outcome} is", key)
            case worker_service_pb2.OUTCOME_VERDICT_LEASE_LOST:
                if is_known and grant is not None and grant.outcome is None:
                    self._fail("S13", "an outcome is refused, while its attempt is open", key)
                elif is_known and grant is not None and grant.is_recorded_as_said:
                    self._fail("S13", f"{grant.said} is refused, and is what is recorded", key)
            case worker_service_pb2.OUTCOME_VERDICT_UNKNOWN_TOKEN:
                if is_known:
                    self._fail("S13", "a token is said to be unknown, and is not", key)
            case _:
                pass

    def _is_kept(self, record: Record) -> bool:
        """Tell whether the store holds a task, and it decodes."""
        return not record.is_gone and record.task.key not in self._history.spoiled

    def _stop_asked(self, token: bytes, reason: int) -> None:
        grant = self._history.grants.get(token)
        self._coverage[f"stop {worker_service_pb2.StopReason.Name(reason).lower()}"] += 1  # type: ignore[arg-type]
        if reason == worker_service_pb2.STOP_REASON_CANCELLED and (
            grant is None or not grant.record.progress.cancel_requested
        ):
            key = None if grant is None else grant.record.task.key
            self._fail("S9", "a worker is asked to stop before the cancellation is durable", key)

    def _acknowledged(self, client: Process, asked: Any, submitted: Any) -> None:
        task_id, created = asked.task_id, submitted.created
        key = TaskKey("default", task_id)
        record = self._history.records.get(key)
        self._coverage["answer created" if created else "answer existing"] += 1
        if record is None:
            self._fail("S1", f"{task_id} is acknowledged and not stored", key)
            return
        if record.acknowledged_at is None:
            record.acknowledged_at = self._history.now
        if record.payload != asked.payload:
            self._fail("S2", f"{task_id} is acknowledged to another request than the one that is stored", key)
        if record.task.uid != submitted.uid:
            self._fail("S2", f"{task_id} is acknowledged under another uid", key)
        if client.name.startswith("client"):
            # What one node tells another is passed on.
            if created and record.was_told_created:
                self._fail("S2", f"{task_id} is said to be created twice", key)
            record.was_told_created |= created

    def _said_to_exist(self, asked: Any) -> None:
        """Check that an id which is said to be another task's is."""
        key = TaskKey("default", asked.task_id)
        record = self._history.records.get(key)
        if record is None or (record.payload == asked.payload and not record.is_gone):
            self._fail("S2", f"{asked.task_id} is said to be another task, and is not", key)

    def _cancelled(self, request: Any, answer: Any) -> None:
        key = TaskKey("default", request.task_id)
        record = self._history.records.get(key)
        result = task_service_pb2.CancelResult.Name(answer.result).removeprefix("CANCEL_RESULT_")
        self._coverage[f"answer {result.lower()}"] += 1
        if self._history.is_traced:
            self._history.note("client", f"is told {result} of {request.task_id}")
        if record is None:
            self._fail("S9", f"{request.task_id} is said to be {result} and was never there", key)
            return
        progress = record.progress
        state = TaskState(task_pb2.TaskState.Name(answer.state).removeprefix("TASK_STATE_").lower())
        is_final = progress.state in TERMINAL
        # What runs may go on while the answer is under way.
        if state is not progress.state and (result != "REQUESTED" or state not in HELD):
            self._fail("S9", f"{key.task_id} is said to be {state} and is {progress.state}", key)
        match result:
            case "PREVENTED":
                record.is_prevented = True
                if progress.state is not TaskState.CANCELLED:
                    self._fail("S8", f"{key.task_id} is said to be prevented and is {progress.state}", key)
                latest = record.grants.get(progress.attempt_count)
                if latest is not None and latest.outcome is AttemptOutcome.RETURNED and latest.started_at is not None:
                    self._fail("S8", f"{key.task_id} is said to be prevented, and had begun", key)
                may_run = any(grant.started_at is not None for grant in record.grants.values() if grant.is_lost)
                if may_run and not answer.earlier_attempt_may_run:
                    self._fail("S8", f"{key.task_id} is said to be prevented, and an earlier attempt may run", key)
            case "REQUESTED":
                if not progress.cancel_requested and not record.is_gone:
                    self._fail("S9", f"the cancellation of {key.task_id} is answered and not durable", key)
            case "ALREADY_FINISHED":
                if not is_final:
                    self._fail("S9", f"{key.task_id} is said to be finished and is {progress.state}", key)

    def server_refuses(self, server: Process, method: str, request: Any, status: Status, since: Micros) -> None:
        """Check that nothing but what may go wrong goes wrong."""
        called = method.rpartition("/")[2]
        self._coverage[f"refused {called} {status.code.name}"] += 1
        if self._history.is_traced:
            self._history.note(server.name, f"refuses {called}: {status.code.name} {status.details}")
        if called == "CancelTask" and status.code is grpc.StatusCode.DATA_LOSS:
            if TaskKey("default", request.task_id) not in self._history.spoiled:
                self._fail("S20", f"{server} says that {request.task_id} does not decode, and it does")
        elif status.code in _FAULTS_OF_OURS:
            self._fail("S20", f"{server} ended {method} with {status.code.name}: {status.details}")
        elif method.endswith("StreamAssignments") and status.code is grpc.StatusCode.INVALID_ARGUMENT:
            self._fail("S20", f"a stream was ended for a violation of the protocol: {status.details}")
        elif called == "CancelTask" and status.code is grpc.StatusCode.NOT_FOUND:
            record = self._history.records.get(TaskKey("default", request.task_id))
            acknowledged_at = None if record is None or record.is_gone else record.acknowledged_at
            if record is not None and acknowledged_at is not None and acknowledged_at < since:
                self._fail("S1", f"{request.task_id} was acknowledged and is not found", record.task.key)
        elif called == "SubmitTask" and status.code is grpc.StatusCode.ALREADY_EXISTS:
            self._said_to_exist(request.task)


def _brief(message: Any) -> str:
    """Say which attempts a message is about."""
    event = getattr(message, message.WhichOneof("event") or "", None)
    tokens: list[bytes] = []
    for name in ("lease_tokens", "recorded"):
        tokens += getattr(event, name, ())
    for name in ("attempts", "assignments", "leases", "others"):
        for one in getattr(event, name, ()):
            tokens.append(
                one.attempt.lease_token
                if hasattr(one, "attempt") and hasattr(one.attempt, "lease_token")
                else one.lease_token
            )
    return " ".join(token.hex()[:6] for token in tokens)
