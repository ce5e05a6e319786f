"""What becomes of stored records that do not decode: set aside and reported, so that their shard goes on."""

from collections.abc import Sequence

from duecourse.server.shards.loop import Loop
from duecourse.server.storage import CorruptRecord, StoreUnavailable, TaskStore
from duecourse.server.telemetry import logs
from duecourse.server.telemetry.metrics import Metrics

_log = logs.get("shards.corrupt")


async def set_aside(store: TaskStore, loop: Loop, metrics: Metrics, records: Sequence[CorruptRecord]) -> None:
    """End the tasks of these records FAILED; what cannot be set aside now, an audit meets again."""
    for record in records:
        shard = loop.shards.get(record.shard)
        if shard is None:
            continue
        try:
            answer = await store.set_aside(shard.fence, record, loop.utc())
        except StoreUnavailable as error:
            _log.warning("record_not_set_aside", task_id=record.key.task_id, detail=str(error))
            continue
        if answer is True:
            tell(metrics, record)
        elif answer is False:
            # As a rule because it has ended, and was told before.
            _log.warning("record_not_set_aside", task_id=record.key.task_id, detail=f"not as read: {record.detail}")


def tell(metrics: Metrics, record: CorruptRecord) -> None:
    """Report that a task came to its end because its record does not decode."""
    metrics.corrupt_records += 1
    _log.error("record_corrupt", shard=record.shard, task_id=record.key.task_id, detail=record.detail)
