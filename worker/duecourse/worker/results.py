"""What a handler's end means: its return value as a Success, its exception as a Failed."""

import asyncio
import json
from datetime import timedelta
from typing import Final

from duecourse.model import bounds
from duecourse.worker.attempt import Failed, FailureKind, Outcome, StopReason, Success
from duecourse.worker.errors import NonRetryable, RetryAfter
from duecourse.worker.text import cut

NO_RESULT: Final = Success(b"", "")
_WHEN_STOPPED: Final = {
    StopReason.CANCELLED: FailureKind.CANCELLED,
    StopReason.TIMED_OUT: FailureKind.TIMED_OUT,
    StopReason.LEASE_LOST: FailureKind.RETRYABLE,
    StopReason.SHUTDOWN: FailureKind.RETRYABLE,
}
_STOPPED_BECAUSE: Final = {
    StopReason.CANCELLED: "stopped since the task was cancelled",
    StopReason.TIMED_OUT: "stopped since the attempt was out of time",
    StopReason.LEASE_LOST: "stopped since the lease was not renewed",
    StopReason.SHUTDOWN: "stopped since the worker shut down",
}


def of_value(value: object) -> Outcome:
    """Turn what a handler returned into an outcome: bytes and text as they are, all else as JSON.

    A result that is too large or has no JSON form is a failure that no other attempt would mend.
    """
    if value is None:
        return NO_RESULT
    if isinstance(value, bytes):
        encoded, content_type = value, "application/octet-stream"
    elif isinstance(value, str):
        encoded, content_type = value.encode("utf-8", "backslashreplace"), "text/plain; charset=utf-8"
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            encoded, content_type = text.encode("utf-8", "backslashreplace"), "application/json"
        except (TypeError, ValueError, RecursionError) as error:
            return Failed(FailureKind.NON_RETRYABLE, "ResultNotEncodable", cut(f"the result: {error}", _MESSAGE))
    if len(encoded) > bounds.MAX_RESULT_BYTES:
        message = f"the result has {len(encoded)} bytes, at most {bounds.MAX_RESULT_BYTES} are kept"
        return Failed(FailureKind.NON_RETRYABLE, "ResultTooLarge", message)
    return Success(encoded, content_type)


def of_error(error: BaseException, stop_reason: StopReason | None) -> Failed:
    """Turn what a handler raised into an outcome; one that was asked to stop before has stopped for that reason."""
    name, message = _described(error)
    if isinstance(error, NonRetryable):
        return Failed(FailureKind.NON_RETRYABLE, name, message)
    if stop_reason is not None:
        if isinstance(error, asyncio.CancelledError):
            return of_stop(stop_reason)
        return Failed(_WHEN_STOPPED[stop_reason], name, message)
    if isinstance(error, RetryAfter):
        return Failed(FailureKind.RETRYABLE, name, message, error.delay // timedelta(microseconds=1))
    return Failed(FailureKind.RETRYABLE, name, message)


def of_stop(reason: StopReason) -> Failed:
    """Return the outcome of a handler that stopped just because it was asked to."""
    return Failed(_WHEN_STOPPED[reason], "Stopped", _STOPPED_BECAUSE[reason])


def _described(error: BaseException) -> tuple[str, str]:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        text = str(error)
    except Exception as broken:  # An exception of the handler's own making may not even print.
        text = f"(its text raised {type(broken).__qualname__})"
    return cut(name, bounds.MAX_FAILURE_TYPE_BYTES), cut(text, _MESSAGE)


_MESSAGE: Final = bounds.MAX_FAILURE_MESSAGE_BYTES
