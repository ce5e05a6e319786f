"""What can come of a call besides its answer.

::

    DuecourseError
    ├── Refused               the request is at fault: sent again as it is, it gets the same answer
    │   ├── InvalidArgument   `field` names what is at fault
    │   ├── TaskNotFound
    │   ├── TaskExists        the id is taken by a task that was submitted with another request
    │   ├── RevisionMismatch  the task has changed: read it again, then decide
    │   ├── RequestIdReused
    │   └── NotPermitted
    ├── Unavailable           surely nothing was done, and a later try may succeed
    │   └── Overloaded        the server has too much to do and said so
    ├── OutcomeUncertain      it may or may not have been done: repeated with the same ids, it tells
    │   └── DeadlineExceeded  no answer came in time; for a read it means no more than that
    └── ServerFault           the server broke, or answered what this version does not understand

Before it raises Unavailable or OutcomeUncertain, the client has tried again, with the same ids, for as long as it may.
This module is also the only one that reads statuses: of whole calls, and of the items of a batch.
"""

import dataclasses
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import ClassVar, Final

import grpc
from google.rpc import error_details_pb2, status_pb2

from duecourse.v1 import error_reason_pb2, task_service_pb2

DOMAIN: Final = "duecourse.dev"
_TASK_PREFIX: Final = re.compile(r"^tasks?(\[\d+\])?\.")
_DETAILS_KEY: Final = "grpc-status-details-bin"
_REASON_PREFIX: Final = "ERROR_REASON_"
# gRPC tells only in words that a request never left this machine. Whatever is not recognised counts as perhaps sent.
NEVER_SENT: Final = ("failed to connect to all addresses", "DNS resolution failed", "name resolution failed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What a status says, wherever it came from."""

    code: grpc.StatusCode
    reason: str = ""
    message: str = ""
    field: str = ""
    retry_after: timedelta | None = None
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)


class DuecourseError(Exception):
    """The root of all. `reason` is the server's word for it, empty if it gave none."""

    is_worth_retrying: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        field: str = "",
        retry_after: timedelta | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.field = field
        """The path of the field at fault, if it is one field's; in a task it begins there: `retry_policy.jitter`."""
        self.retry_after = retry_after
        """How long the server asks to wait before another try."""
        self.metadata = metadata or {}
        """More from the server, for people: an `error_id` to find in its log, for example."""
        self.is_of_change = True
        """The call was to change something; False for one that only reads."""
        self.task_id: str | None = None
        """The task that the call was about; a submission that is repeated with it is the same submission."""

    def as_kind(self, kind: "type[DuecourseError]") -> "DuecourseError":
        """Make a copy of another kind, or of the same."""
        return kind(
            self.message,
            reason=self.reason,
            field=self.field,
            retry_after=self.retry_after,
            metadata=self.metadata,
        )


class Refused(DuecourseError):
    """The request is at fault."""


class InvalidArgument(Refused):
    """A field is missing, malformed or out of bounds."""


class TaskNotFound(Refused):
    """There is no such task in the namespace."""


class TaskExists(Refused):
    """The id is taken by a task that was submitted with another request."""


class RevisionMismatch(Refused):
    """The task does not have the expected revision."""


class RequestIdReused(Refused):
    """The request id was used before, for another request."""


class NotPermitted(Refused):
    """The server does not know the caller, or does not allow it."""


class Unavailable(DuecourseError):
    """Surely nothing was done; the cluster cannot serve this now."""

    is_worth_retrying = True


class Overloaded(Unavailable):
    """Too much waits in the server already; surely nothing was done."""


class OutcomeUncertain(DuecourseError):
    """The answer was lost. A repeat with the same ids is safe, and tells."""

    is_worth_retrying = True


class DeadlineExceeded(OutcomeUncertain):
    """No answer came in time."""


class ServerFault(DuecourseError):
    """The server broke, or answered what this version does not understand."""


_BY_REASON: Final[Mapping[str, type[DuecourseError]]] = {
    "INVALID_FIELD": InvalidArgument,
    "RUN_AT_OUT_OF_RANGE": InvalidArgument,
    "TASK_NOT_FOUND": TaskNotFound,
    "TASK_EXISTS": TaskExists,
    "REVISION_MISMATCH": RevisionMismatch,
    "REQUEST_ID_REUSED": RequestIdReused,
    "OUTCOME_UNCERTAIN": OutcomeUncertain,
    "OVERLOADED": Overloaded,
}
_BY_CODE: Final[Mapping[grpc.StatusCode, type[DuecourseError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: Refused,
    grpc.StatusCode.ALREADY_EXISTS: Refused,
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.ABORTED: Refused,
    grpc.StatusCode.UNAUTHENTICATED: NotPermitted,
    grpc.StatusCode.PERMISSION_DENIED: NotPermitted,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    # A server that stops ends the calls that are still open with it.
    grpc.StatusCode.CANCELLED: OutcomeUncertain,
}
_CODES: Final[Mapping[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}


def from_call(failed: grpc.aio.AioRpcError, address: str) -> DuecourseError:
    """Tell what became of a call to `address` that did not end OK."""
    details = _call_details(failed)
    if details.reason == "" and details.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        details = dataclasses.replace(details, message=f"no answer from {address} in time")
    return from_details(details)


def from_item(item: task_service_pb2.ItemError) -> DuecourseError:
    """Tell what became of one item of a batch."""
    code = _CODES.get(item.code, grpc.StatusCode.UNKNOWN)
    retry_after = item.retry_delay.ToTimedelta() if item.HasField("retry_delay") else None
    try:
        reason = error_reason_pb2.ErrorReason.Name(item.reason).removeprefix(_REASON_PREFIX)
    except ValueError:  # a newer server's: the code decides
        reason = str(item.reason)
    return from_details(
        Details(code=code, reason=reason, message=item.message, field=item.field, retry_after=retry_after)
    )


def from_details(details: Details) -> DuecourseError:
    """Choose the exception: by the reason, else by the code."""
    kind = _BY_REASON.get(details.reason) or _BY_CODE.get(details.code, ServerFault)
    if details.code is grpc.StatusCode.UNAVAILABLE and kind is ServerFault:
        surely_nothing = bool(details.reason) or details.message.startswith(NEVER_SENT)
        kind = Unavailable if surely_nothing else OutcomeUncertain
    # Which task of the request it was says nothing to a caller, who did not see the request.
    field = _TASK_PREFIX.sub("", details.field)
    message = details.message.replace(details.field, field, 1) if field != details.field else details.message
    return kind(
        message or details.code.name,
        reason=details.reason,
        field=field,
        retry_after=details.retry_after,
        metadata=details.metadata,
    )


def _call_details(failed: grpc.aio.AioRpcError) -> Details:
    reason = field = ""
    retry_after = None
    metadata: Mapping[str, str] = {}
    for detail in status_of(failed).details:
        match detail.TypeName():
            case "google.rpc.ErrorInfo":
                info = error_details_pb2.ErrorInfo.FromString(detail.value)
                if info.domain == DOMAIN:
                    reason, metadata = info.reason, dict(info.metadata)
            case "google.rpc.BadRequest":
                violations = error_details_pb2.BadRequest.FromString(detail.value).field_violations
                field = violations[0].field if violations else ""
            case "google.rpc.RetryInfo":
                retry_after = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay.ToTimedelta()
    return Details(
        code=failed.code(),
        reason=reason,
        message=failed.details() or "",
        field=field,
        retry_after=retry_after,
        metadata=metadata,
    )


def status_of(failed: grpc.aio.AioRpcError) -> status_pb2.Status:
    """Read the details of a call's status; empty if it came from gRPC itself, or from something in between."""
    for key, value in failed.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    return status_pb2.Status()
