"""What handlers raise to say how they failed, and what a worker raises.

::

    Exception
    ├── NonRetryable         from a handler: not worth another attempt
    │   └── PayloadNotJson   raised by TaskContext.json; a ValueError, too
    ├── RetryAfter           from a handler: try again, after this delay
    ├── Stopped              raised by TaskContext.raise_if_cancelled
    └── ProtocolViolated     a node said what it may not; the stream is reopened
"""

from datetime import timedelta

from duecourse.model import bounds


class NonRetryable(Exception):
    """Raised by a handler: the attempt failed, and another one would fail too."""


class PayloadNotJson(NonRetryable, ValueError):
    """Raised by `TaskContext.json`: the payload does not decode. Another attempt would get the same bytes."""


class RetryAfter(Exception):
    """Raised by a handler: the attempt failed; try again after `delay`, in place of the retry policy's back-off."""

    def __init__(self, delay: timedelta, message: str = "") -> None:
        super().__init__(message or f"asked to be tried again after {delay}")
        self.delay = delay
        if not timedelta(0) <= delay <= timedelta(microseconds=bounds.MAX_BACKOFF):
            raise ValueError(f"delay must be between 0 and {bounds.MAX_BACKOFF // bounds.HOUR} hours, not {delay}")


class Stopped(Exception):
    """Raised by `TaskContext.raise_if_cancelled` in a handler that was asked to stop."""


class ProtocolViolated(Exception):
    """A node sent what the protocol does not allow there."""
