"""Older states of etcd and of the store to fall back to: a snapshot restored, a replica promoted that lagged behind."""

from collections import deque
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from simulation.keyspace import Keyspace
from simulation.plan import FaultKind

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import Progress, TaskKey
from duecourse.server.storage.memory import MemoryStore

if TYPE_CHECKING:
    from simulation.world import World

_EVERY: Final = bounds.SECOND
_KEPT: Final = 6
_SETTLED: Final = 3 * bounds.SECOND
"""By then the cluster has come into being."""
_NEEDED_FOR: Final = (FaultKind.ETCD_RESTORED, FaultKind.STORE_FELL_BACK)


@dataclass(frozen=True, slots=True)
class _Copy:
    at: Micros
    etcd: Keyspace
    shards: dict[Any, Any]
    records: dict[TaskKey, Any]
    queues: set[tuple[str, str]]
    progress: Mapping[TaskKey, Progress]
    """Of all tasks that the checker knows."""


class Copies:
    """Takes a copy every second, if the plan will need one."""

    def __init__(self, world: "World", backing: MemoryStore) -> None:
        self._world = world
        self._backing = backing
        self._is_needed = any(fault.kind in _NEEDED_FOR for fault in world.plan.faults)
        self._kept: deque[_Copy] = deque(maxlen=_KEPT)
        self._first: _Copy | None = None
        self._taken_at: Micros = -_EVERY

    def take(self) -> None:
        """Take one if it is time."""
        now = self._world.loop.now
        if not self._is_needed or now < self._taken_at + _EVERY or self._world.etcd is None:
            return
        self._taken_at = now
        self._kept.append(_Copy(now, self._world.etcd.save(), *self._store(), self._progress()))
        if self._first is None and now >= _SETTLED:
            self._first = self._kept[-1]

    def restore_etcd(self, age: int) -> bool:
        """Have etcd begin anew from a copy; False: there is none, or nothing was written since."""
        etcd = self._world.etcd
        if not self._kept or etcd is None:
            return False
        kept = self._copy(age)
        if kept.etcd.revision == etcd.keyspace.revision and self._first is not None:
            kept = self._first
        if kept.etcd.revision == etcd.keyspace.revision:
            return False
        self._drop_later(kept)
        etcd.kill()
        etcd.set_back(kept.etcd)
        etcd.start()
        return True

    def fall_back(self, age: int) -> bool:
        """Have the store lose what came after a copy; False: there is none, or nothing came."""
        if not self._kept:
            return False
        backing, kept = self._backing, self._copy(age)
        if self._is_as_now(kept):
            return False
        self._drop_later(kept)
        # Copied again: it may be fallen back to once more.
        backing._shards, backing._records, backing._queues = kept.shards, kept.records, kept.queues
        backing._shards, backing._records, backing._queues = self._store()
        rows = {shard: held.row for shard, held in backing._shards.items()}
        self._world.checker.fell_back(rows, kept.progress)
        return True

    def _copy(self, age: int) -> _Copy:
        """Return a copy some seconds old, or one of the beginning."""
        if age % 3 == 0 and self._first is not None:
            return self._first
        return self._kept[-1 - age % len(self._kept)]

    def _is_as_now(self, kept: _Copy) -> bool:
        """Tell whether the store holds nothing else than a copy."""
        shards = self._backing._shards
        return kept.progress == self._progress() and all(
            held.row == shards[shard].row for shard, held in kept.shards.items()
        )

    def _progress(self) -> Mapping[TaskKey, Progress]:
        records = self._world.checker.records
        return {key: record.progress for key, record in records.items() if not record.is_gone}

    def _drop_later(self, kept: _Copy) -> None:
        """Forget the copies that were taken after one: what they show is not what becomes of that one."""
        while self._kept and self._kept[-1].at > kept.at:
            self._kept.pop()
        if not self._kept:
            self._kept.append(kept)
        if self._first is not None and self._first.at > kept.at:
            self._first = kept

    def _store(self) -> tuple[dict[Any, Any], dict[TaskKey, Any], set[tuple[str, str]]]:
        backing = self._backing
        return (
            {shard: copy(held) for shard, held in backing._shards.items()},
            {
                key: replace(record, task=copy(record.task), attempts=list(record.attempts))
                for key, record in backing._records.items()
            },
            set(backing._queues),
        )
