"""What a simulated etcd keeps: keys with all their versions, leases, and the news of what changed.

It answers etcd's own messages, and each answer takes one step. Revisions, versions, refusals and their words, deletion
by lease, compaction: all as etcd has them (`test_etcd.py` runs one suite on both). How requests get here, and how they
get lost, is the affair of `etcd.py`.
"""

import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Final

import grpc

from duecourse.etcd.v1 import kv_pb2, watch_pb2
from duecourse.model import bounds
from duecourse.model.instants import Micros

MAX_OPERATIONS: Final = 128
MAX_BYTES: Final = 1_572_864
SHORTEST_LEASE: Final = 2
"""Seconds; etcd makes leases that are to live shorter live so long."""
_DELETED: Final = 1
_TARGETS: Final = ("version", "create_revision", "mod_revision", "value", "lease")
_NOTHING: Final = kv_pb2.KeyValue()


class Refused(Exception):
    """etcd says no, and has applied nothing."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


@dataclass(slots=True)
class Lease:
    """A lease: how long it lives, and which keys go with it."""

    ttl: int
    """Seconds."""
    until: Micros
    keys: dict[bytes, None] = field(default_factory=dict)


Events = Sequence[watch_pb2.Event]


class Keyspace:
    """See the module's docstring. `applied` is called with each revision and its events."""

    def __init__(self, source: random.Random) -> None:
        self.revision = 1
        self.compacted = 0
        self.leases: dict[int, Lease] = {}
        self.listeners: list[Callable[[int, Events], None]] = []
        self._source = source
        self._order: list[bytes] = []
        self._kvs: dict[bytes, kv_pb2.KeyValue] = {}
        self._versions: dict[bytes, list[kv_pb2.KeyValue]] = {}
        """Of each key, oldest first; a deletion has version 0."""
        self._history: list[tuple[int, Events]] = []

    # Reads.

    def get(self, key: bytes) -> kv_pb2.KeyValue | None:
        """Return a key as it stands."""
        return self._kvs.get(key)

    def keys(self, prefix: bytes = b"") -> Sequence[bytes]:
        """Return the keys that begin with a prefix, in order."""
        return [key for key in self._order if key.startswith(prefix)]

    def range(self, request: kv_pb2.RangeRequest) -> kv_pb2.RangeResponse:
        """Read keys. Raises Refused if the revision was compacted, or is still to come."""
        if request.revision > self.revision:
            raise Refused(grpc.StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision is a future revision")
        if 0 < request.revision < self.compacted:
            raise Refused(grpc.StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted")
        if request.revision in (0, self.revision):
            found = [self._kvs[key] for key in self._between(request.key, request.range_end)]
        else:
            found = list(self._as_of(request.key, request.range_end, request.revision))
        limit = request.limit or len(found)
        return kv_pb2.RangeResponse(kvs=found[:limit], more=len(found) > limit)

    def since(self, start: int) -> Iterator[tuple[int, Events]]:
        """Return what happened at a revision and after it."""
        first = bisect_left(self._history, start, key=lambda entry: entry[0])
        return iter(self._history[first:])

    # Writes.

    def txn(self, request: kv_pb2.TxnRequest) -> kv_pb2.TxnResponse:
        """Compare and do. Raises Refused."""
        if request.ByteSize() > MAX_BYTES:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large")
        if max(len(request.compare), len(request.success), len(request.failure)) > MAX_OPERATIONS:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: too many operations in txn request")
        succeeded = all(self._holds(compare) for compare in request.compare)
        steps = request.success if succeeded else request.failure
        self._check(steps)
        revision = self.revision + 1
        events: dict[bytes, watch_pb2.Event] = {}
        answers = [self._do(step, revision, events) for step in steps]
        self._apply(revision, list(events.values()))
        return kv_pb2.TxnResponse(succeeded=succeeded, responses=answers)

    def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """Write a key; returns its revision."""
        step = kv_pb2.RequestOp(request_put=kv_pb2.PutRequest(key=key, value=value, lease=lease))
        self.txn(kv_pb2.TxnRequest(success=[step]))
        return self.revision

    def delete(self, key: bytes) -> int:
        """Delete a key; returns how many were deleted."""
        step = kv_pb2.RequestOp(request_delete_range=kv_pb2.DeleteRangeRequest(key=key))
        return self.txn(kv_pb2.TxnRequest(success=[step])).responses[0].response_delete_range.deleted

    def compact(self, revision: int) -> None:
        """Forget what was before a revision."""
        if not self.compacted < revision <= self.revision:
            raise Refused(grpc.StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted")
        self.compacted = revision
        self._history = [entry for entry in self._history if entry[0] >= revision]
        for key, versions in list(self._versions.items()):
            kept = bisect_left(versions, revision + 1, key=lambda kv: kv.mod_revision) - 1
            del versions[: max(0, kept)]
            if len(versions) == 1 and not versions[0].version:
                del self._versions[key]

    # Leases.

    def grant(self, ttl: int, now: Micros) -> int:
        """Make a lease; returns its number."""
        ttl = max(ttl, SHORTEST_LEASE)
        number = self._source.getrandbits(62) | 1
        self.leases[number] = Lease(ttl, now + ttl * bounds.SECOND)
        return number

    def beat(self, number: int, now: Micros) -> int:
        """Note a sign of life; returns how long the lease lives from now on, 0 if there is none."""
        lease = self.leases.get(number)
        if lease is None:
            return 0
        lease.until = now + lease.ttl * bounds.SECOND
        return lease.ttl

    def revoke(self, number: int) -> None:
        """End a lease, and its keys at one revision. Raises Refused if there is none."""
        lease = self.leases.get(number)
        if lease is None:
            raise Refused(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
        revision = self.revision + 1
        events: dict[bytes, watch_pb2.Event] = {}
        for key in list(lease.keys):
            self._delete(key, revision, events)
        del self.leases[number]
        self._apply(revision, list(events.values()))

    def expire(self, now: Micros) -> int:
        """End the leases that gave no sign of life for too long; returns how many."""
        late = [number for number, lease in self.leases.items() if lease.until < now]
        for number in late:
            self.revoke(number)
        return len(late)

    def prolong(self, now: Micros) -> None:
        """Count all leases anew, as a new leader of etcd does."""
        for lease in self.leases.values():
            lease.until = now + lease.ttl * bounds.SECOND

    # Copies.

    def save(self) -> "Keyspace":
        """Copy all of it."""
        copied = Keyspace(self._source)
        copied._take(self)
        return copied

    def set_back(self, copy: "Keyspace") -> None:
        """Be as a copy was."""
        self._take(copy)

    def _take(self, other: "Keyspace") -> None:
        # Messages are never changed once they are in, so they may be shared.
        self.revision, self.compacted = other.revision, other.compacted
        self.leases = deepcopy(other.leases)
        self._order, self._kvs = list(other._order), dict(other._kvs)
        self._versions = {key: list(versions) for key, versions in other._versions.items()}
        self._history = list(other._history)

    # Inside.

    def _between(self, start: bytes, end: bytes) -> Sequence[bytes]:
        if not end:
            return [start] if start in self._kvs else []
        return self._order[bisect_left(self._order, start) : bisect_left(self._order, end)]

    def _as_of(self, start: bytes, end: bytes, revision: int) -> Iterator[kv_pb2.KeyValue]:
        for key in sorted(self._versions):
            if key == start or (end and start <= key < end):
                versions = self._versions[key]
                place = bisect_left(versions, revision + 1, key=lambda kv: kv.mod_revision)
                if place and versions[place - 1].version:
                    yield versions[place - 1]

    def _holds(self, compare: kv_pb2.Compare) -> bool:
        target = _TARGETS[compare.target]
        if target == "value" and compare.key not in self._kvs:
            return False
        found, wanted = getattr(self._kvs.get(compare.key, _NOTHING), target), getattr(compare, target)
        order: int = (found > wanted) - (found < wanted)
        return (order == 0, order > 0, order < 0, order != 0)[compare.result]

    def _check(self, steps: Sequence[kv_pb2.RequestOp]) -> None:
        """Refuse what etcd refuses before it does anything."""
        written: set[bytes] = set()
        for step in steps:
            if not step.HasField("request_put"):
                continue
            put = step.request_put
            if put.key in written:
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request")
            written.add(put.key)
            if put.lease and put.lease not in self.leases:
                raise Refused(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")

    def _do(self, step: kv_pb2.RequestOp, revision: int, events: dict[bytes, watch_pb2.Event]) -> kv_pb2.ResponseOp:
        match step.WhichOneof("request"):
            case "request_range":
                return kv_pb2.ResponseOp(response_range=self.range(step.request_range))
            case "request_put":
                self._put(step.request_put, revision, events)
                return kv_pb2.ResponseOp(response_put=kv_pb2.PutResponse())
            case _:
                wanted = step.request_delete_range
                keys = self._between(wanted.key, wanted.range_end)
                for key in list(keys):
                    self._delete(key, revision, events)
                answer = kv_pb2.DeleteRangeResponse(deleted=len(keys))
                return kv_pb2.ResponseOp(response_delete_range=answer)

    def _put(self, put: kv_pb2.PutRequest, revision: int, events: dict[bytes, watch_pb2.Event]) -> None:
        before = self._kvs.get(put.key)
        if before is None:
            insort(self._order, put.key)
        elif before.lease in self.leases:
            self.leases[before.lease].keys.pop(put.key, None)
        if put.lease:
            self.leases[put.lease].keys[put.key] = None
        kv = self._kvs[put.key] = kv_pb2.KeyValue(
            key=put.key,
            value=put.value,
            lease=put.lease,
            create_revision=revision if before is None else before.create_revision,
            mod_revision=revision,
            version=1 if before is None else before.version + 1,
        )
        self._versions.setdefault(put.key, []).append(kv)
        events[put.key] = watch_pb2.Event(kv=kv)

    def _delete(self, key: bytes, revision: int, events: dict[bytes, watch_pb2.Event]) -> None:
        before = self._kvs.pop(key)
        self._order.pop(bisect_left(self._order, key))
        if before.lease in self.leases:
            self.leases[before.lease].keys.pop(key, None)
        gone = kv_pb2.KeyValue(key=key, mod_revision=revision)
        self._versions[key].append(gone)
        events[key] = watch_pb2.Event(type=_DELETED, kv=gone)

    def _apply(self, revision: int, events: Events) -> None:
        if not events:
            return
        self.revision = revision
        self._history.append((revision, events))
        for listener in self.listeners:
            listener(revision, events)
