"""`Leases`: the leases of a shard's held tasks, from their grant, or the load that found them, to their end.

A lease that an earlier term granted has no holder until its worker is heard in this one: what the worker lists is
adopted, what it can surely not have any more ends unstarted. A sweep looks after the rest: it stores signs of life,
asks what is out of time to stop, and ends what has expired. What the store is to know is written first, and true only
once committed; who holds a lease, and until when, is known at once, in memory alone.
"""

from duecourse.model import bounds
from duecourse.model.instants import Micros, Now
from duecourse.server.core import lifecycle
from duecourse.server.core.effects import Effects, StopReason
from duecourse.server.core.events import End, Event, Found, Hold, Report, Unsent
from duecourse.server.core.fence import Fence
from duecourse.server.core.lease import Lease
from duecourse.server.core.lines import Lines
from duecourse.server.core.task import HELD, Attempt, AttemptOutcome, Task, TaskKey, TaskState


class Leases:
    """See the module's docstring."""

    def __init__(self, fence: Fence, duration: Micros, heartbeat: Micros, lines: Lines) -> None:
        self.by_token: dict[bytes, Lease] = {}
        self.by_task: dict[TaskKey, Lease] = {}
        self._fence = fence
        self._duration = duration
        """What a lease lasts that an earlier term granted."""
        self._heartbeat = heartbeat
        self._lines = lines

    def __len__(self) -> int:
        return len(self.by_token)

    # Their beginning and end.

    def add(self, lease: Lease) -> None:
        """Add the lease of an attempt that is out."""
        self.by_token[lease.token] = lease
        self.by_task[lease.task.key] = lease

    def restore(self, task: Task, raises: tuple[Micros, ...], now: Now) -> None:
        """Add a lease that an earlier term granted: it gets the time that is left of its grace, and time to listen.

        The grace ends one lease time after the first takeover since the last stored sign of life.
        """
        attempt = task.progress.attempt
        assert attempt is not None, "a held task has an attempt"
        duration = self._duration
        takeover = next((raised for raised in raises if raised > attempt.sign_of_life), now.latest)
        grace = max(0, min(duration, takeover + duration - now.latest))
        listen = bounds.SILENT_INTERVALS * self._heartbeat + bounds.LISTEN_MARGIN
        self.add(
            Lease(
                task,
                attempt.lease_token,
                None,
                duration,
                now.elapsed + max(grace, listen),
                now.elapsed + time_left(task, attempt, now),
                now.elapsed,
            )
        )

    def drop(self, lease: Lease) -> None:
        """Forget a lease that is over."""
        del self.by_token[lease.token]
        del self.by_task[lease.task.key]

    def agree(self, key: TaskKey, task: Found, now: Now, out: Effects) -> Lease | None:
        """Make the lease of a task agree with what was just read of it; return the one that was outdated."""
        held = task if isinstance(task, Task) and task.progress.state in HELD else None
        attempt = held.progress.attempt if held is not None else None
        lease = self.by_task.get(key)
        if held is not None and attempt is not None and lease is not None and attempt.lease_token == lease.token:
            lease.task = held
            return None
        if lease is not None:
            self.drop(lease)
            if lease.holder is not None and lease.holder.is_open:
                out.lost.append((lease.holder, lease.token))
        if held is not None:
            self.restore(held, (), now)
        return lease

    def end_unstarted(self, lease: Lease, cause: Event, now: Now, out: Effects) -> None:
        """End an attempt that is proven unstarted; lost, if it was recorded as running all the same."""
        task = lease.task
        if task.key in self._lines.busy:
            self._lines.add(task.key, cause)
            return
        if self.by_token.get(lease.token) is not lease:
            return
        digest = cause.digest if isinstance(cause, End) else None
        if task.progress.state is TaskState.RUNNING:
            progress = lifecycle.failed(task, now.latest, AttemptOutcome.LEASE_LOST, is_lost=True, digest=digest)
        else:
            progress = lifecycle.returned(task.progress, now.latest, digest)
        self._lines.update(task, progress, cause, out)

    # What a worker says.

    def report(self, event: Report) -> None:
        """Keep what a handler says of its progress; the sweep stores it."""
        lease = self.by_token.get(event.lease_token)
        if lease is not None and lease.task.key == event.key:
            lease.said = event.progress

    def hold(self, event: Hold, now: Now, out: Effects) -> None:
        """Adopt what a worker lists, and end what it can surely not have."""
        busy = self._lines.busy
        for token, (key, has_started) in event.leases.items():
            lease = self.by_token.get(token)
            if lease is not None:
                key = lease.task.key
            if key is not None and key in busy:
                self._lines.add(key, _part(event, token, key, has_started))
            elif lease is not None:
                self._adopt(lease, event, has_started, now, out)
            elif key is not None:
                self._look_for(token, key, _part(event, token, key, has_started), out)
        if not event.is_complete:
            return
        for lease in list(self.by_token.values()):
            if lease.token not in event.leases and _is_absent(lease, event):
                self.end_unstarted(lease, Unsent(lease), now, out)

    def _look_for(self, token: bytes, key: TaskKey, event: Hold, out: Effects) -> None:
        """Say that a lease is lost only after a read: a replaced leader does not know its successor's grants."""
        if key in self._lines.fresh:
            out.lost.append((event.holder, token))
        else:
            self._lines.read(key, [event], out)

    def _adopt(self, lease: Lease, event: Hold, has_started: bool, now: Now, out: Effects) -> None:
        if lease.holder is not event.holder:
            lease.holder = event.holder
            lease.assignment_number = 0
            out.adopted.append((event.holder, lease.token))
            if lease.task.progress.cancel_requested:
                out.stops.append((event.holder, lease.token, StopReason.CANCELLED))
            elif lease.stop_asked_at is not None:
                out.stops.append((event.holder, lease.token, StopReason.TIMED_OUT))
        lease.unexpired_until = max(lease.unexpired_until, now.elapsed + lease.duration)
        task = lease.task
        attempt = task.progress.attempt
        assert attempt is not None, "a lease has an attempt"
        is_news = has_started and task.progress.state is TaskState.LEASED
        if attempt.epoch < self._fence.epoch or is_news:
            start_time = now.latest if is_news else None
            lease.stored_at = now.elapsed
            renewed = lifecycle.renewed(task.progress, now.latest, self._fence, start_time, lease.said)
            self._lines.update(task, renewed, _part(event, lease.token, task.key, has_started), out)

    # Time.

    def excuse(self, gap: Micros, now: Now) -> None:
        """Let time not count in which nothing could be heard; nothing lasts longer by that than if it was heard now."""
        for lease in self.by_token.values():
            expires_at = lease.expires_at()
            lease.unexpired_until = max(expires_at, min(expires_at + gap, now.elapsed + lease.duration))

    def sweep(self, now: Now, out: Effects) -> None:
        """Look after all leases: out of time, expired, or a sign of life to be stored."""
        busy = self._lines.busy
        for lease in list(self.by_token.values()):
            if lease.task.key not in busy:
                self._look_after(lease, now, out)

    def _look_after(self, lease: Lease, now: Now, out: Effects) -> None:
        task = lease.task
        holder = lease.holder
        if now.elapsed >= lease.expires_at():
            self._lose(task, AttemptOutcome.LEASE_LOST, now, out)
        elif holder is None:
            return  # Its worker was not heard yet, and may know how the attempt ended: time-outs wait for that.
        elif lease.stop_asked_at is not None:
            if now.elapsed >= lease.stop_asked_at + bounds.STOP_GRACE:
                self._lose(task, AttemptOutcome.TIMED_OUT, now, out)
        elif now.elapsed >= lease.timeout_at:
            lease.stop_asked_at = now.elapsed
            if holder.is_open:
                out.stops.append((holder, lease.token, StopReason.TIMED_OUT))
        elif holder.renewed_at >= lease.stored_at + lease.duration or self._has_news(lease, now):
            lease.stored_at = now.elapsed
            renewed = lifecycle.renewed(task.progress, now.latest, self._fence, None, lease.said)
            self._lines.update(task, renewed, None, out)

    def _has_news(self, lease: Lease, now: Now) -> bool:
        """Tell whether its handler's word is to be stored: it differs, and the last write was a heartbeat ago."""
        attempt = lease.task.progress.attempt
        assert attempt is not None, "a lease has an attempt"
        is_new = lease.said is not None and lease.said != attempt.progress
        return is_new and now.elapsed >= lease.stored_at + self._heartbeat

    def _lose(self, task: Task, outcome: AttemptOutcome, now: Now, out: Effects) -> None:
        self._lines.update(task, lifecycle.failed(task, now.latest, outcome, is_lost=True), None, out)


def time_left(task: Task, attempt: Attempt, now: Now) -> Micros:
    """Return what is left of an attempt's time, between nothing and all of it whatever the clocks say."""
    timeout = task.policy.attempt_timeout
    left = attempt.lease_time + timeout - now.latest
    if task.policy.completion_deadline is not None:
        left = min(left, task.policy.completion_deadline - now.latest)
    return 0 if left < 0 else min(left, timeout)


def _part(event: Hold, token: bytes, key: TaskKey, has_started: bool) -> Hold:
    """Return one lease of a list, to be handled later: what else was listed then says nothing of now."""
    return Hold(event.holder, {token: (key, has_started)}, event.last_assignments, is_complete=False)


def _is_absent(lease: Lease, event: Hold) -> bool:
    """Tell whether a lease that the worker does not list can surely not reach it any more."""
    attempt = lease.task.progress.attempt
    if attempt is None or attempt.incarnation != event.holder.incarnation:
        return False
    if lease.holder is event.holder:
        return lease.assignment_number <= event.last_assignments
    # Never sent, or on an older stream of this worker, given up before it opened this one; or in an earlier
    # term, and who answers for the present one refuses it from then on.
    return lease.holder is None or not lease.holder.is_open
