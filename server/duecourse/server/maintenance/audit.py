"""Holds the store's oldest due tasks against memory, once a minute: a miss is a fault of ours, mended and counted."""

from collections import defaultdict
from typing import Never

from duecourse.model import bounds
from duecourse.server.core.events import Audited
from duecourse.server.core.shard import Shard
from duecourse.server.core.task import ShardId, Task
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
    """Audit all led shards: what is due in the store must be in memory, or behind its lane's cursor."""
    shards: dict[ShardId, Shard] = dict(loop.shards)
    if not shards:
        return
    try:
        found = await store.load_oldest_due(sorted(shards), loop.clock.now().earliest, bounds.AUDIT_ROWS)
    except StoreUnavailable as error:
        _log.warning("audit_skipped", detail=str(error))
        return
    tasks: defaultdict[ShardId, list[Task]] = defaultdict(list)
    for task in found.tasks:
        tasks[task.shard].append(task)
    for number, due in tasks.items():
        loop.post_to(shards[number], Audited(due))
