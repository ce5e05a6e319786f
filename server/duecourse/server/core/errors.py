"""Why a request is not carried out. Each maps to one row of the error table (`rpc/status.py`).

::

    DomainError
    ├── InvalidField            a field is malformed or out of bounds
    │   └── RunAtOutOfRange     further ahead than the longest delay
    ├── TaskNotFound
    ├── TaskExists              the id is taken by another request
    ├── RevisionMismatch        the task is not at the expected revision
    ├── RequestIdReused         the request id belongs to another request
    ├── NotShardLeader          ask the leader
    ├── NoLeader                nobody leads the shard yet
    ├── StoreFailed             the store does not answer or refuses writes; nothing was applied
    ├── OutcomeUncertain        the store's answer was lost
    ├── Overloaded              too much waits already
    ├── Draining                the node shuts down
    ├── RecordCorrupt           the stored record does not decode
    ├── NodeNotFound            no live node has this name
    ├── NodeNotReached          another node that should do it is not reached from here
    └── InvariantViolated       our own mistake
"""

from dataclasses import dataclass

from duecourse.server.core.task import Epoch, ShardId


class DomainError(Exception):
    """A request is not carried out."""


@dataclass
class InvalidField(DomainError):
    """A field is malformed or out of bounds."""

    field: str
    problem: str


@dataclass
class RunAtOutOfRange(InvalidField):
    """A task is wanted further ahead than the longest delay."""


@dataclass
class TaskNotFound(DomainError):
    """There is no such task in the namespace."""

    task_id: str


@dataclass
class TaskExists(DomainError):
    """The id is taken by a task that was submitted with another request."""

    task_id: str


@dataclass
class RevisionMismatch(DomainError):
    """The task is not at the revision that the caller expects."""

    expected: int
    current: int


@dataclass
class RequestIdReused(DomainError):
    """The request id was used for another request on this task."""

    request_id: str


@dataclass
class NotShardLeader(DomainError):
    """Another node leads the shard."""

    shard: ShardId
    epoch: Epoch
    leader: str


@dataclass
class NoLeader(DomainError):
    """Nobody leads the shard yet, or its leader has just lost its term; surely nothing was applied."""

    shard: ShardId


@dataclass
class StoreFailed(DomainError):
    """The store does not answer or refuses writes; surely nothing was applied."""

    detail: str


@dataclass
class OutcomeUncertain(DomainError):
    """The store's answer was lost: the request may or may not have been applied."""


@dataclass
class Overloaded(DomainError):
    """Too much of something waits already; try again after a while."""

    what: str


@dataclass
class Draining(DomainError):
    """The node shuts down."""


@dataclass
class RecordCorrupt(DomainError):
    """The stored record does not decode."""

    task_id: str


@dataclass
class NodeNotFound(DomainError):
    """No live node has this name."""

    node_id: str


@dataclass
class NodeNotReached(DomainError):
    """The node that the request is for is not reached from this one; surely nothing was done."""

    node_id: str


@dataclass
class InvariantViolated(DomainError):
    """Our own mistake; `error_id` finds the log entry."""

    error_id: str
