"""Deletes tasks whose retention is over, a small batch of one shard at a time."""

from typing import Final, Never

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.shard import Shard
from duecourse.server.shards.loop import Loop
from duecourse.server.storage import StoreUnavailable, TaskStore
from duecourse.server.telemetry import logs

_log = logs.get("maintenance.retention")

_ROUND: Final[Micros] = bounds.MINUTE
_BATCH: Final = 1_000


async def run(store: TaskStore, loop: Loop, retention: Micros) -> Never:
    """Go round the led shards for ever, one round a minute unless there is more to do."""
    while True:
        for shard in list(loop.shards.values()):
            await loop.clock.sleep(_ROUND // max(1, len(loop.shards)))
            await _purge(store, loop, shard, retention)
        await loop.clock.sleep(bounds.SECOND)


async def once(store: TaskStore, loop: Loop, retention: Micros) -> None:
    """Go round the led shards once, without waiting: for whoever cannot wait for a minute, such as a simulation."""
    for shard in list(loop.shards.values()):
        await _purge(store, loop, shard, retention)


async def _purge(store: TaskStore, loop: Loop, shard: Shard, retention: Micros) -> None:
    if loop.shards.get(shard.fence.shard) is not shard:
        return
    try:
        while await store.purge(shard.fence, loop.clock.now().earliest - retention, _BATCH) == _BATCH:
            pass
    except StoreUnavailable as error:
        _log.warning("retention_delayed", shard=shard.fence.shard, detail=str(error))
