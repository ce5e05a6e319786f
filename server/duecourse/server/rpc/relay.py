"""What another node answered, as an error of this one: read from the status of a call, or from an item of a batch.

A refusal is relayed as it is, so that a caller is told the same whichever node it asked. What says that the other node
does not lead the shard becomes `NotThere`, and a lost answer `OutcomeUncertain`: these two are for `routing`, which
tries again.
"""

from dataclasses import dataclass, replace
from typing import Final

import grpc
from google.rpc import error_details_pb2 as details
from grpc import aio

from duecourse.client.errors import NEVER_SENT, status_of
from duecourse.server.core import errors
from duecourse.server.rpc import status
from duecourse.server.rpc.status import Refusal, Relayed
from duecourse.v1 import error_reason_pb2 as reasons
from duecourse.v1 import task_service_pb2

_PREFIX: Final = "ERROR_REASON_"
_NOT_THERE: Final = frozenset(
    (reasons.ERROR_REASON_NOT_SHARD_LEADER, reasons.ERROR_REASON_NO_LEADER, reasons.ERROR_REASON_DRAINING)
)
# What gRPC says by itself while it may have been about a request that the other node has read.
_LOST: Final = frozenset(
    (
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
    )
)
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


@dataclass
class NotThere(errors.DomainError):
    """The node that was asked does not lead the shard, or was not reached; surely nothing was applied."""

    detail: str


def of_call(failed: aio.AioRpcError) -> errors.DomainError:
    """Tell what a call that did not end OK says."""
    told = status_of(failed)
    reason = reasons.ERROR_REASON_UNSPECIFIED
    refusal = Refusal(code=failed.code(), reason=reason, message=failed.details() or "")
    for detail in told.details:
        match detail.TypeName():
            case "google.rpc.ErrorInfo":
                info = details.ErrorInfo.FromString(detail.value)
                reason = _reason(info.reason) if info.domain == status.DOMAIN else reason
                refusal = replace(refusal, reason=reason, metadata=dict(info.metadata))
            case "google.rpc.RetryInfo":
                delay = details.RetryInfo.FromString(detail.value).retry_delay
                refusal = replace(refusal, retry_after=delay.ToMicroseconds())
            case _:
                refusal = replace(refusal, detail=detail)
    if reason == reasons.ERROR_REASON_UNSPECIFIED:
        return _of_transport(failed)
    return _of_refusal(refusal)


def of_item(error: task_service_pb2.ItemError, sent_as: str, known_as: str) -> errors.DomainError:
    """Tell what the error of an item says; the item was sent under one path, and its caller knows it by another."""
    field = error.field
    if field.startswith(sent_as):
        field = known_as + field[len(sent_as) :]
    refusal = Refusal(
        code=_CODES.get(error.code, grpc.StatusCode.UNKNOWN),
        reason=error.reason,
        message=error.message.replace(error.field, field, 1) if error.field else error.message,
        field_path=field,
        retry_after=error.retry_delay.ToMicroseconds() if error.HasField("retry_delay") else None,
    )
    return _of_refusal(refusal)


def _of_refusal(refusal: Refusal) -> errors.DomainError:
    if refusal.reason in _NOT_THERE:
        return NotThere(refusal.message)
    if refusal.reason == reasons.ERROR_REASON_OUTCOME_UNCERTAIN:
        return errors.OutcomeUncertain()
    return Relayed(refusal)


def _of_transport(failed: aio.AioRpcError) -> errors.DomainError:
    message = failed.details() or failed.code().name
    if failed.code() not in _LOST or message.startswith(NEVER_SENT):
        return NotThere(message)
    return errors.OutcomeUncertain()


def _reason(name: str) -> reasons.ErrorReason.ValueType:
    """Look a reason up; one that only newer nodes know is a fault of ours, as far as this one can tell."""
    try:
        return reasons.ErrorReason.Value(_PREFIX + name)
    except ValueError:
        return reasons.ERROR_REASON_INVARIANT_VIOLATED
