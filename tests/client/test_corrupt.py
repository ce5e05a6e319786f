"""A task whose record does not decode, as a node presents it and a client reads it."""

from duecourse.client import FailureReason, TaskState, answers
from duecourse.server.core.task import ShardId, TaskKey
from duecourse.server.rpc import present
from duecourse.server.storage import CorruptRecord
from duecourse.v1 import task_pb2


def test_it_is_listed_among_the_others() -> None:
    message = task_pb2.Task()
    present.corrupt(CorruptRecord(ShardId(0), TaskKey("default", "broken"), 7, "ValueError"), message)
    listed = answers.task(message, full=False)
    assert (listed.namespace, listed.task_id, listed.revision) == ("default", "broken", 7)
    assert (listed.state, listed.failure_reason) == (TaskState.FAILED, FailureReason.RECORD_CORRUPT)
