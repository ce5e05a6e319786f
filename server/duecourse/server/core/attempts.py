"""The versions of an attempt: opened by a grant, going on, closed by its end. Each is a new record.

They are built in one piece, as `dataclasses.replace` costs several times as much.
"""

from duecourse.model.instants import Micros
from duecourse.server.core.fence import Fence
from duecourse.server.core.lease import Holder
from duecourse.server.core.task import Attempt, AttemptOutcome, Epoch, Failure, Progress


def opened(last: Progress, holder: Holder, token: bytes, node: str, fence: Fence, utc: Micros) -> Attempt:
    """Open the next attempt; its fencing token is larger than any before, whatever the clock says."""
    fencing_token = max(last.attempt.fencing_token + 1, utc) if last.attempt else utc
    return Attempt(
        last.attempt_count + 1,
        last.round,
        token,
        holder.worker,
        holder.incarnation,
        node,
        fence.epoch,
        fencing_token,
        utc,
        utc,
    )


def open_one(last: Progress) -> Attempt:
    """Return the attempt of a task that is held."""
    attempt = last.attempt
    assert attempt is not None, "there is no attempt"
    assert attempt.outcome is None, "the attempt has ended"
    return attempt


def going_on(was: Attempt, sign_of_life: Micros, epoch: Epoch, start_time: Micros | None, progress: str) -> Attempt:
    """Note a sign of life, the epoch under which it runs, its start, and what its handler said."""
    return Attempt(
        was.number,
        was.round,
        was.lease_token,
        was.worker,
        was.incarnation,
        was.node,
        epoch,
        was.fencing_token,
        was.lease_time,
        sign_of_life,
        start_time,
        progress=progress,
    )


def closed(
    last: Progress,
    utc: Micros,
    outcome: AttemptOutcome,
    start_time: Micros | None,
    failure: Failure | None,
    digest: bytes | None,
) -> Attempt:
    """End the open attempt of a task."""
    was = open_one(last)
    return Attempt(
        was.number,
        was.round,
        was.lease_token,
        was.worker,
        was.incarnation,
        was.node,
        was.epoch,
        was.fencing_token,
        was.lease_time,
        was.sign_of_life,
        was.start_time if start_time is None else start_time,
        utc,
        outcome,
        failure,
        digest,
        was.progress,
    )
