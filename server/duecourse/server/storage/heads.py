"""The first tasks of every lane, gathered from reads that each see a part of what is due.

A read goes through the due index of some shards, bucket by bucket, and stops after a while; the next one goes on where
it stopped. A lane's rows come in order, within a read and from one read to the next. Once a lane has its head full, its
next row cuts it, and what comes later is left out.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import DueKey, Lane, ShardId
from duecourse.server.storage import CorruptRecord, LoadedBuckets, rows
from duecourse.server.storage.connections import Row

_LARGEST = 2**63 - 1


class Place(NamedTuple):
    """How far a shard was read: after this lane in this bucket."""

    bucket: int
    lane_hash: int


class _Head:
    __slots__ = ("is_cut", "lanes", "last", "size")

    def __init__(self) -> None:
        self.size = 0
        self.lanes: set[Lane] = set()
        """One, but for lanes whose hashes are equal: they share a head, and are all cut where it ends."""
        self.last = DueKey(0, 0)
        self.is_cut = False


class Heads:
    """See the module's docstring."""

    def __init__(self, shards: Iterable[ShardId], due_from: Micros, head: int) -> None:
        self.loaded = LoadedBuckets([], [], {})
        self._size = head
        self._unread = dict.fromkeys(shards, Place(due_from // bounds.BUCKET - 1, _LARGEST))
        self._heads: dict[tuple[ShardId, int], _Head] = {}
        self._reading: list[ShardId] = []

    def unread(self, limit: int) -> list[tuple[ShardId, Place]]:
        """Return some shards that have more, and how far they were read."""
        places = list(self._unread.items())[:limit]
        self._reading = [shard for shard, _ in places]
        return places

    def add(self, found: Sequence[Row]) -> None:
        """Take in what was read of the shards that `unread` named last."""
        for shard in self._reading:
            del self._unread[shard]
        for row in found:
            lane_hash, shard, at_bucket, at_lane = row[rows.TASK_COLUMNS :]
            if lane_hash is None:
                self._unread[shard] = Place(at_bucket, at_lane)
            else:
                self._add(row, shard, lane_hash)

    def _add(self, row: Row, shard: ShardId, lane_hash: int) -> None:
        head = self._heads.get((shard, lane_hash))
        if head is None:
            head = self._heads[shard, lane_hash] = _Head()
        if head.is_cut:
            return
        if head.size == self._size:
            head.is_cut = True
            for lane in head.lanes:
                self.loaded.cut[shard, lane] = head.last
            return
        head.size += 1
        head.lanes.add(rows.lane_of(row))
        head.last = rows.due_key_of(row)
        decoded = rows.task_of(row)
        if isinstance(decoded, CorruptRecord):
            self.loaded.corrupt.append(decoded)
        else:
            self.loaded.tasks.append(decoded)
