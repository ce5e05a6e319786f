"""Why the server ends a worker's stream, beside what can end any call. A stream's status is only for the stream."""

from dataclasses import dataclass

from duecourse.server.core.errors import DomainError


@dataclass
class ProtocolViolation(DomainError):
    """The worker said what the protocol does not allow: a fault of its library."""

    problem: str


@dataclass
class StreamEnded(DomainError):
    """The stream was silent for too long, was not read, or was replaced by a newer one: reopen it."""

    why: str
    node_id: str = ""
    """The node's name, if the worker has another stream to it: it may not know that both lead to one node."""
