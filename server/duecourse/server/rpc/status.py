"""From an error to what its caller is told: the table of codes, reasons and details, and the only place that knows it.

Every status that is not OK carries `google.rpc.ErrorInfo` with a reason of `ErrorReason` and the domain
`duecourse.dev`; `RetryInfo` where a retry helps; `BadRequest`, `ResourceInfo`, `PreconditionFailure` or `QuotaFailure`
where they say more. UNAVAILABLE means: retry this call. ABORTED: a sequencer check failed, start again from a read.
Nothing of our insides is told: no traceback, no SQL, no unexpected exception's text.
"""

import secrets
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details
from google.rpc import status_pb2
from grpc_status import rpc_status

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core import errors
from duecourse.server.streams.errors import ProtocolViolation, StreamEnded
from duecourse.server.telemetry import logs
from duecourse.v1 import error_reason_pb2 as reasons
from duecourse.v1 import task_service_pb2

DOMAIN: Final = "duecourse.dev"
_PREFIX: Final = "ERROR_REASON_"
_SOON: Final = 100 * bounds.MILLISECOND
_LATER: Final = bounds.SECOND

_log = logs.get("rpc")


class Relayed(errors.DomainError):
    """What another node refused: its caller is told as that node told it."""

    def __init__(self, refusal: "Refusal") -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a caller is told."""

    code: grpc.StatusCode
    reason: reasons.ErrorReason.ValueType
    message: str
    metadata: dict[str, str] = field(default_factory=dict)
    field_path: str = ""
    """The field at fault, if it is one field's."""
    retry_after: Micros | None = None
    detail: Message | None = None
    """One more; packed already, if it came from another node."""

    @property
    def number(self) -> int:
        """The canonical number of the code."""
        number: int = self.code.value[0]
        return number


def refusal(error: BaseException) -> Refusal:
    """Look an error up in the table. One that is not in it is our own fault: logged, and told by its id alone."""
    if isinstance(error, Relayed):
        return error.refusal
    for look_up in (_of_request, _of_moment, _of_stream):
        found = look_up(error)
        if found is not None:
            return found
    if not isinstance(error, errors.InvariantViolated):
        error = violated(error)
    return Refusal(
        code=grpc.StatusCode.INTERNAL,
        reason=reasons.ERROR_REASON_INVARIANT_VIOLATED,
        message="the server broke one of its own invariants",
        metadata={"error_id": error.error_id},
    )


def violated(error: BaseException) -> errors.InvariantViolated:
    """Log an error that nobody expected, under an id that its caller is told."""
    error_id = secrets.token_hex(8)
    _log.error("unexpected_error", error_id=error_id, exc_info=error)
    return errors.InvariantViolated(error_id)


def deadline_exceeded() -> Refusal:
    """Tell that a call took longer than it may; whether it was carried out is not known."""
    return Refusal(
        code=grpc.StatusCode.DEADLINE_EXCEEDED,
        reason=reasons.ERROR_REASON_OUTCOME_UNCERTAIN,
        message="no answer in time; a retry with the same ids is safe",
        retry_after=_SOON,
    )


def item_error(error: errors.DomainError, item: task_service_pb2.ItemError) -> None:
    """Fill in the error of one item of a batch."""
    found = refusal(error)
    item.code = found.number
    item.reason = found.reason
    error_id = found.metadata.get("error_id")
    item.message = f"{found.message}; error_id {error_id}" if error_id else found.message
    item.field = found.field_path
    if found.retry_after is not None:
        item.retry_delay.seconds, rest = divmod(found.retry_after, bounds.SECOND)
        item.retry_delay.nanos = rest * 1_000


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", found: Refusal) -> NoReturn:
    """End a call with a status."""
    await context.abort_with_status(rpc_status.to_status(_status(found)))  # type: ignore[no-untyped-call]
    raise AssertionError("abort raises")


def _status(found: Refusal) -> status_pb2.Status:
    status = status_pb2.Status(code=found.number, message=found.message)
    _add(
        status,
        details.ErrorInfo(
            reason=reasons.ErrorReason.Name(found.reason).removeprefix(_PREFIX), domain=DOMAIN, metadata=found.metadata
        ),
    )
    if found.detail is not None:
        _add(status, found.detail)
    if found.retry_after is not None:
        retry = details.RetryInfo()
        retry.retry_delay.FromMicroseconds(found.retry_after)
        _add(status, retry)
    return status


def _add(status: status_pb2.Status, detail: Message) -> None:
    packed = status.details.add()
    if isinstance(detail, AnyMessage):
        packed.CopyFrom(detail)
    else:
        packed.Pack(detail)


def _of_request(error: BaseException) -> Refusal | None:
    """Refusals that are the request's own fault: it gets the same answer again."""
    match error:
        case errors.InvalidField():
            is_far = isinstance(error, errors.RunAtOutOfRange)
            violation = details.BadRequest.FieldViolation(field=error.field, description=error.problem)
            return Refusal(
                code=grpc.StatusCode.INVALID_ARGUMENT,
                reason=reasons.ERROR_REASON_RUN_AT_OUT_OF_RANGE if is_far else reasons.ERROR_REASON_INVALID_FIELD,
                message=f"{error.field}: {error.problem}",
                field_path=error.field,
                detail=details.BadRequest(field_violations=[violation]),
            )
        case errors.TaskNotFound():
            return Refusal(
                code=grpc.StatusCode.NOT_FOUND,
                reason=reasons.ERROR_REASON_TASK_NOT_FOUND,
                message="no such task in this namespace",
                detail=_task(error.task_id),
            )
        case errors.TaskExists():
            return Refusal(
                code=grpc.StatusCode.ALREADY_EXISTS,
                reason=reasons.ERROR_REASON_TASK_EXISTS,
                message="the id is taken by a task that was submitted with another request",
                detail=_task(error.task_id),
            )
        case errors.RequestIdReused():
            return Refusal(
                code=grpc.StatusCode.ALREADY_EXISTS,
                reason=reasons.ERROR_REASON_REQUEST_ID_REUSED,
                message="the request id was used for another request on this task",
                detail=details.ResourceInfo(resource_type="duecourse.v1.request_id", resource_name=error.request_id),
            )
        case errors.RevisionMismatch():
            numbers = {"expected": str(error.expected), "current": str(error.current)}
            violation_of = details.PreconditionFailure.Violation(
                type="REVISION", subject="expected_revision", description=f"the task is at revision {error.current}"
            )
            return Refusal(
                code=grpc.StatusCode.ABORTED,
                reason=reasons.ERROR_REASON_REVISION_MISMATCH,
                message=f"the task is at revision {error.current}, not {error.expected}",
                metadata=numbers,
                detail=details.PreconditionFailure(violations=[violation_of]),
            )
        case errors.NodeNotFound():
            return Refusal(
                code=grpc.StatusCode.NOT_FOUND,
                reason=reasons.ERROR_REASON_NODE_NOT_FOUND,
                message="no live node has this name",
                detail=details.ResourceInfo(resource_type="duecourse.v1.Node", resource_name=error.node_id),
            )
        case errors.RecordCorrupt():
            return Refusal(
                code=grpc.StatusCode.DATA_LOSS,
                reason=reasons.ERROR_REASON_RECORD_CORRUPT,
                message="the stored record of this task does not decode",
                detail=_task(error.task_id),
            )
    return None


def _of_moment(error: BaseException) -> Refusal | None:
    """Refusals that will pass: the same request may be carried out later, or at another node."""
    match error:
        case errors.NotShardLeader():
            return _unavailable(
                reasons.ERROR_REASON_NOT_SHARD_LEADER,
                "another node leads the task's shard",
                {"shard": str(error.shard), "epoch": str(error.epoch), "leader": error.leader},
            )
        case errors.NoLeader():
            return _unavailable(
                reasons.ERROR_REASON_NO_LEADER, "no node leads the task's shard yet", {"shard": str(error.shard)}
            )
        case errors.StoreFailed():
            # What the store said is for our log, not for the client.
            return _unavailable(reasons.ERROR_REASON_STORE_UNAVAILABLE, "the store does not answer", {}, _LATER)
        case errors.Draining():
            return _unavailable(reasons.ERROR_REASON_DRAINING, "the node shuts down")
        case errors.NodeNotReached():
            return _unavailable(
                reasons.ERROR_REASON_NODE_NOT_REACHED,
                "the node is not reached from the one that was asked",
                {"node_id": error.node_id},
            )
        case errors.OutcomeUncertain():
            return _unavailable(
                reasons.ERROR_REASON_OUTCOME_UNCERTAIN,
                "an answer was lost on its way; a retry with the same ids is safe and tells",
            )
        case errors.Overloaded():
            violation = details.QuotaFailure.Violation(subject=error.what, description="too much waits already")
            return Refusal(
                code=grpc.StatusCode.RESOURCE_EXHAUSTED,
                reason=reasons.ERROR_REASON_OVERLOADED,
                message=f"{error.what}: too much waits already",
                retry_after=_LATER,
                detail=details.QuotaFailure(violations=[violation]),
            )
    return None


def _of_stream(error: BaseException) -> Refusal | None:
    """Why a worker's stream is ended."""
    match error:
        case ProtocolViolation():
            return Refusal(
                code=grpc.StatusCode.INVALID_ARGUMENT,
                reason=reasons.ERROR_REASON_PROTOCOL_VIOLATION,
                message=error.problem,
            )
        case StreamEnded():
            metadata = {"node_id": error.node_id} if error.node_id else {}
            return _unavailable(reasons.ERROR_REASON_STREAM_ENDED, error.why, metadata)
    return None


def _unavailable(
    reason: reasons.ErrorReason.ValueType,
    message: str,
    metadata: dict[str, str] | None = None,
    retry_after: Micros = _SOON,
) -> Refusal:
    return Refusal(
        code=grpc.StatusCode.UNAVAILABLE,
        reason=reason,
        message=message,
        metadata=metadata or {},
        retry_after=retry_after,
    )


def _task(task_id: str) -> details.ResourceInfo:
    return details.ResourceInfo(resource_type="duecourse.v1.Task", resource_name=task_id)
