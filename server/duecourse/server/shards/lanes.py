"""Commit lanes: group commit. While one transaction is under way, the writes of the next one gather.

A shard always uses the same lane, so it has one commit in flight. One lane is the default: a batch touches all shards,
so that with more of them it waits for every lane, and the same rows cost more transactions. What the store answers
decides:

- committed: the shard is told;
- stale, unknown: the shard's term is over (`TermEnds`), and if the answer was lost its writes are uncertain;
- refused for a reason of the store: the writes wait and are tried again, in smaller transactions. Those that a client
  waits for are given up once the store has refused for `PATIENCE`: surely not applied, so the client may be told to
  come again. From then on nothing of clients is let in, so a lane that has nothing else to try asks the store by a
  commit without writes;
- refused for a reason of the data: the writes are tried in halves until the culprit stands alone, and it is set aside.
"""

import asyncio
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Never, Protocol

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.events import Cancel, Committed, WriteRefused
from duecourse.server.core.shard import Shard
from duecourse.server.core.task import ShardId
from duecourse.server.core.writes import Insert, Update, Write
from duecourse.server.failpoints import AFTER_COMMIT, BEFORE_COMMIT, Failpoints
from duecourse.server.shards.corrupt import tell
from duecourse.server.shards.loop import Loop
from duecourse.server.storage import (
    CommitAnswer,
    CorruptRecord,
    Refused,
    ShardBatch,
    Stale,
    TaskStore,
    Unknown,
)
from duecourse.server.storage import Committed as StoreCommitted
from duecourse.server.telemetry import logs
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing import backoff

_log = logs.get("shards.lanes")

PATIENCE: Micros = bounds.SECOND
_FIRST_RETRY: Micros = 20 * bounds.MILLISECOND
_LONGEST_RETRY: Micros = 500 * bounds.MILLISECOND
_LEAST_ROOM = 64


class TermEnds(Protocol):
    """Who is told that the store ended a term."""

    def superseded(self, shard: Shard, answer: Stale, unapplied: Sequence[Write]) -> None:
        """Note that another term has begun; `unapplied` were not applied."""
        ...

    def uncertain(self, shard: Shard, detail: str, uncertain: Sequence[Write]) -> None:
        """Note that the answer to `uncertain` was lost."""
        ...


@dataclass(slots=True, eq=False)
class _Piece:
    """A shard's part of a transaction: its writes, inserts first."""

    shard: Shard
    batch: ShardBatch

    @property
    def writes(self) -> list[Write]:
        return [*self.batch.inserts, *self.batch.updates]

    def __len__(self) -> int:
        return len(self.batch.inserts) + len(self.batch.updates)


class CommitLane:
    """See the module's docstring."""

    def __init__(self, store: TaskStore, loop: Loop, ends: TermEnds, metrics: Metrics, failpoints: Failpoints) -> None:
        self._store = store
        self._loop = loop
        self._ends = ends
        self._metrics = metrics
        self._failpoints = failpoints
        self._pending: dict[Shard, list[Write]] = {}
        self._halves: deque[list[_Piece]] = deque()
        """Where a culprit is looked for."""
        self._wake = asyncio.Event()
        self._refused_since: Micros | None = None
        self._refused_shard: Shard | None = None
        self._room = bounds.MAX_COMMIT_WRITES
        """How many writes a transaction may have: fewer after a refusal, since a slow store refuses by time-out."""
        self.is_idle = True

    @property
    def is_refused(self) -> bool:
        """Tell whether the store has refused for so long that nobody should wait for it."""
        since = self._refused_since
        return since is not None and self._loop.elapsed() - since > PATIENCE

    def submit(self, shard: Shard, writes: list[Write]) -> None:
        """Commit writes of a shard, in order, after what it submitted before."""
        pending = self._pending.get(shard)
        if pending is None:
            self._pending[shard] = writes
        else:
            pending.extend(writes)
        self.is_idle = False
        self._wake.set()

    def withdraw(self, shard: Shard) -> list[Write]:
        """Take back what was not sent yet of a shard whose term is over."""
        unsent = self._pending.pop(shard, [])
        for pieces in self._halves:
            for piece in [piece for piece in pieces if piece.shard is shard]:
                pieces.remove(piece)
                unsent.extend(piece.writes)
        return unsent

    async def run(self) -> Never:
        """Commit for ever."""
        source = random.Random()
        waits: Iterator[Micros] | None = None
        while True:
            while not self._pending and not self._halves and self._refused_since is None:
                self.is_idle = True
                self._wake.clear()
                await self._wake.wait()
            pieces = self._next()
            if not pieces:
                continue
            if await self._commit(pieces):
                waits = None
            else:
                waits = waits or backoff.delays(_FIRST_RETRY, _LONGEST_RETRY, source)
                await self._loop.clock.sleep(next(waits))

    def _next(self) -> list[_Piece]:
        """Return what is to be committed next; of a store that refuses and nothing else waits for, only its answer."""
        if self._halves:
            return self._halves.popleft()
        if self._pending:
            return self._take()
        self.is_idle = True
        shard = self._refused_shard
        if shard is not None and self._loop.shards.get(shard.fence.shard) is shard:
            return [_Piece(shard, ShardBatch(shard.fence))]
        self._refused_since = None
        return []

    def _take(self) -> list[_Piece]:
        """Take as many pending writes as one transaction may have."""
        pieces = []
        room = self._room
        bytes_left = bounds.MAX_COMMIT_BYTES
        for shard in list(self._pending):
            if room <= 0 or bytes_left <= 0:
                break
            writes = self._pending.pop(shard)
            batch = ShardBatch(shard.fence)
            count = 0
            for write in writes:
                if count >= room or bytes_left <= 0:
                    self._pending[shard] = writes[count:]
                    break
                count += 1
                if isinstance(write, Insert):
                    batch.inserts.append(write)
                    bytes_left -= len(write.submission.payload)
                else:
                    batch.updates.append(write)
                    if write.result is not None:
                        bytes_left -= len(write.result[0])
            room -= count
            pieces.append(_Piece(shard, batch))
        return pieces

    async def _commit(self, pieces: list[_Piece]) -> bool:
        """Commit, and deal with the answers; False if the store refuses and a pause is due."""
        self._failpoints.passes(BEFORE_COMMIT)
        began = self._loop.elapsed()
        answers = await self._store.commit([piece.batch for piece in pieces])
        self._metrics.observe_commit(
            self._loop.elapsed() - began,
            sum(map(len, pieces)),
        )
        self._failpoints.passes(AFTER_COMMIT)
        again = [piece for piece in pieces if self._answered(piece, answers)]
        refusal = next((answer for answer in answers.values() if isinstance(answer, Refused)), None)
        if refusal is None or refusal.is_data:
            self._refused_since = None
        if refusal is None:
            self._room = min(bounds.MAX_COMMIT_WRITES, 2 * self._room)
            return True
        if refusal.is_data:
            self._split(again, refusal)
            return True
        self._refused_shard = again[0].shard if again else None
        if self._refused_since is None:
            self._refused_since = began
            _log.warning("store_refuses", detail=refusal.detail)
        self._room = max(_LEAST_ROOM, self._room // 2)
        refused = {piece.shard: piece.writes + self._pending.pop(piece.shard, []) for piece in again if len(piece)}
        self._pending = refused | self._pending
        if self.is_refused:
            self._give_up_clients(refusal)
        return False

    def _answered(self, piece: _Piece, answers: Mapping[ShardId, CommitAnswer]) -> bool:
        """Deal with a shard's answer; True if its writes are to be tried again."""
        shard = piece.shard
        answer = answers[shard.fence.shard]
        if self._loop.shards.get(shard.fence.shard) is not shard:
            # The term ended while the transaction was under way, for another reason.
            is_applied = isinstance(answer, StoreCommitted | Unknown)
            self._loop.end(shard, piece.writes if is_applied else (), () if is_applied else piece.writes)
            return False
        match answer:
            case StoreCommitted():
                self._metrics.commit_answers["committed"] += 1
                first_update = len(piece.batch.inserts)
                mismatched, deliveries = answer.mismatched, answer.deliveries
                for index in [index for index, delivery in deliveries.items() if delivery is False]:
                    task = piece.batch.updates[index].task
                    record = CorruptRecord(task.shard, task.key, task.progress.revision, "headers or content type")
                    tell(self._metrics, record)
                if first_update and (mismatched or deliveries):
                    mismatched = {first_update + index for index in mismatched}
                    deliveries = {first_update + index: delivery for index, delivery in deliveries.items()}
                self._loop.post_to(shard, Committed(piece.writes, answer.taken, mismatched, deliveries))
            case Stale():
                self._metrics.commit_answers["stale"] += 1
                self._ends.superseded(shard, answer, piece.writes)
            case Unknown():
                self._metrics.commit_answers["unknown"] += 1
                self._ends.uncertain(shard, answer.detail, piece.writes)
            case Refused():
                self._metrics.commit_answers["refused"] += 1
                return True
        return False

    def _split(self, pieces: list[_Piece], refusal: Refused) -> None:
        """Try again in halves; a write that stands alone is the culprit."""
        if not pieces:
            return
        if len(pieces) == 1 and len(pieces[0]) == 1:
            culprit = pieces[0].writes[0]
            _log.error("write_set_aside", task_id=culprit.task.task_id, detail=refusal.detail)
            self._loop.post_to(pieces[0].shard, WriteRefused(culprit, refusal.detail))
            return
        if len(pieces) > 1:
            half = len(pieces) // 2
            halves = [pieces[:half], pieces[half:]]
        else:
            shard = pieces[0].shard
            writes = pieces[0].writes
            half = len(writes) // 2
            halves = [[_piece(shard, writes[:half])], [_piece(shard, writes[half:])]]
        self._halves.extendleft(reversed(halves))

    def _give_up_clients(self, refusal: Refused) -> None:
        """Give up the writes that a client waits for; the rest is tried again."""
        pending, self._pending = self._pending, {}
        for shard, writes in pending.items():
            stays: list[Write] = []
            for write in writes:
                if isinstance(write, Insert) or isinstance(write.cause, Cancel):
                    self._loop.post_to(shard, WriteRefused(write, refusal.detail))
                else:
                    stays.append(write)
            if stays:
                self._pending[shard] = stays


class CommitLanes:
    """The lanes of a node: a shard is bound to one by its number."""

    def __init__(self, lanes: Sequence[CommitLane]) -> None:
        self.lanes = lanes

    @property
    def is_refused(self) -> bool:
        """Tell whether the store has refused for so long that nobody should wait for it."""
        return any(lane.is_refused for lane in self.lanes)

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing is in flight or waits."""
        return all(lane.is_idle for lane in self.lanes)

    def submit(self, shard: Shard, writes: list[Write]) -> None:
        """Commit writes, in order."""
        self._lane(shard).submit(shard, writes)

    def withdraw(self, shard: Shard) -> list[Write]:
        """Take back what was not sent yet of a shard whose term is over."""
        return self._lane(shard).withdraw(shard)

    def _lane(self, shard: Shard) -> CommitLane:
        return self.lanes[shard.fence.shard % len(self.lanes)]


def _piece(shard: Shard, writes: list[Write]) -> _Piece:
    inserts = [write for write in writes if isinstance(write, Insert)]
    updates = [write for write in writes if isinstance(write, Update)]
    return _Piece(shard, ShardBatch(shard.fence, inserts, updates))
