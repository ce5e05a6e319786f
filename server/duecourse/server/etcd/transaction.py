"""What a transaction compares and does, in words of ours, and what it gave.

The functions return etcd's messages themselves: a store that writes a hundred keys in one transaction builds each only
once. A key that does not exist has revision, version and lease 0.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from duecourse.etcd.v1 import kv_pb2

MAX_OPERATIONS: Final = 128
"""How many steps a transaction may have: etcd's `--max-txn-ops` as it comes."""
MAX_BYTES: Final = 1_500_000
"""How large a request may be: below etcd's `--max-request-bytes` as it comes, 1.5 MiB."""

_EQUAL: Final = 0
_CREATED: Final = 1
_MODIFIED: Final = 2
_VALUE: Final = 3
_LEASE: Final = 4

_MESSAGE_OVERHEAD: Final = 32

Compare = kv_pb2.Compare
Operation = kv_pb2.RequestOp


class KeyValue(NamedTuple):
    """A key as it stood."""

    key: bytes
    value: bytes
    created: int
    """The revision at which it was last created."""
    modified: int
    """The revision at which it was last written."""
    lease: int
    """The lease with which it goes; 0: none."""


class Outcome:
    """What an applied transaction gave."""

    __slots__ = ("_answer",)

    def __init__(self, answer: kv_pb2.TxnResponse) -> None:
        self._answer = answer

    @property
    def succeeded(self) -> bool:
        """Whether what was compared held."""
        return self._answer.succeeded

    @property
    def revision(self) -> int:
        """The revision of the store right after it; of what it wrote, too."""
        return self._answer.header.revision

    def found(self, step: int) -> list[KeyValue]:
        """Return what a step that read has read."""
        return [key_value(kv) for kv in self._answer.responses[step].response_range.kvs]

    def deleted(self, step: int) -> int:
        """Return how many keys a step deleted."""
        return self._answer.responses[step].response_delete_range.deleted


def absent(key: bytes) -> Compare:
    """Hold if a key does not exist."""
    return created(key, 0)


def created(key: bytes, revision: int) -> Compare:
    """Hold if a key was last created at a revision."""
    return Compare(result=_EQUAL, target=_CREATED, key=key, create_revision=revision)


def modified(key: bytes, revision: int) -> Compare:
    """Hold if a key was last written at a revision."""
    return Compare(result=_EQUAL, target=_MODIFIED, key=key, mod_revision=revision)


def holds(key: bytes, value: bytes) -> Compare:
    """Hold if a key holds a value."""
    return Compare(result=_EQUAL, target=_VALUE, key=key, value=value)


def leased(key: bytes, lease: int) -> Compare:
    """Hold if a key goes with a lease."""
    return Compare(result=_EQUAL, target=_LEASE, key=key, lease=lease)


def put(key: bytes, value: bytes, lease: int = 0) -> Operation:
    """Write a key."""
    return Operation(request_put=kv_pb2.PutRequest(key=key, value=value, lease=lease))


def get(key: bytes) -> Operation:
    """Read a key."""
    return Operation(request_range=kv_pb2.RangeRequest(key=key))


def delete(key: bytes) -> Operation:
    """Delete a key."""
    return Operation(request_delete_range=kv_pb2.DeleteRangeRequest(key=key))


def chunks(operations: Iterable[Operation]) -> Iterator[list[Operation]]:
    """Divide steps into lists that each fit into a transaction, in order."""
    chunk: list[Operation] = []
    size = 0
    for operation in operations:
        more = operation.ByteSize() + _MESSAGE_OVERHEAD
        if chunk and (len(chunk) == MAX_OPERATIONS or size + more > MAX_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(operation)
        size += more
    if chunk:
        yield chunk


def key_value(kv: kv_pb2.KeyValue) -> KeyValue:
    """Take a key from etcd's message."""
    return KeyValue(kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)
