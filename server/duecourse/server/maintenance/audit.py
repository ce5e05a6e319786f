"""Holds the store's oldest due tasks, and all that are held, against memory, once a minute.

What memory misses is read again. A due task that it misses is a fault of ours, and counted; one that is held comes of a
store that has lost what it had committed, where a task that has ended may be running again. One that does not decode is
set aside then, if it could not be when it was read before.
"""

from collections import defaultdict
from typing import Never

from duecourse.model import bounds
from duecourse.server.core.events import Audited
from duecourse.server.core.fence import Fence
from duecourse.server.core.shard import Shard
from duecourse.server.core.task import ShardId
from duecourse.server.shards.loop import Loop
from duecourse.server.storage import StoreUnavailable, TaskStore
from duecourse.server.telemetry import logs

_log = logs.get("maintenance.audit")


async def run(store: TaskStore, loop: Loop) -> Never:
    """Audit all led shards for ever."""
    while True:
        await loop.clock.sleep(bounds.AUDIT_INTERVAL)
        await once(store, loop)


async def once(store: TaskStore, loop: Loop) -> None:
    """Audit all led shards: what is held in the store, or due and not behind its lane's cursor, must be in memory."""
    shards: dict[ShardId, Shard] = dict(loop.shards)
    if not shards:
        return
    try:
        due = await store.load_oldest_due(sorted(shards), loop.clock.now().earliest, bounds.AUDIT_ROWS)
        held = await store.load_held(sorted(shards))
        # A term that still stands now stood while its tasks were read: what memory misses is not a successor's.
        rows = await store.shards()
    except StoreUnavailable as error:
        _log.warning("audit_skipped", detail=str(error))
        return
    found: defaultdict[ShardId, Audited] = defaultdict(lambda: Audited([], []))
    for task in (*due.tasks, *held.tasks):
        found[task.shard].tasks.append(task)
    for record in (*due.corrupt, *held.corrupt):
        found[record.shard].corrupt.append(record.key)
    standing = {Fence(row.shard, row.epoch, row.holder) for row in rows}
    for number, audited in found.items():
        if shards[number].fence in standing:
            loop.post_to(shards[number], audited)
