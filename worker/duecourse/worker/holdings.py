"""What a worker holds and has not ended: attempts that wait for a slot, and handlers that run.

Decides what starts, what is returned unstarted, and which handlers are asked to stop; `take` hands that over.
A handler whose lease was lost is no longer held, but keeps its slot (and is in `running`) until it has ended.
An attempt that was never renewed, and has too little of its lease left to learn of a renewal, waits for one: started it
might have to be stopped before that comes. One that is urgent starts: by waiting it would surely be missed.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.worker.attempt import RETURNED, Attempt, Outcome, Phase, StopReason
from duecourse.worker.capacity import Capacity
from duecourse.worker.outcomes import Outcomes
from duecourse.worker.terms import Terms

# Started is told a little early, so that a check at every tick does not make it late.
START_TOLD_AFTER: Final = bounds.STARTED_DELAY * 3 // 4
_order: Final[Any] = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Start:
    """Run these handlers."""

    attempts: Sequence[Attempt]


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask these handlers to stop. LEASE_LOST may come after another reason, and then only tells of it."""

    attempts: Sequence[Attempt]
    reason: StopReason


Action = Start | Stop


class Holdings:
    """The slots of a worker and what is in them."""

    def __init__(self, capacity: Capacity, terms: Terms, outcomes: Outcomes) -> None:
        self.held: dict[bytes, Attempt] = {}
        self.running: dict[bytes, Attempt] = {}
        self.waiting = 0
        self.late_count = 0
        self._capacity = capacity
        self._terms = terms
        self._outcomes = outcomes
        self._queue: deque[Attempt] = deque()
        self._threaded_queue: deque[Attempt] = deque()
        self._unrenewed: dict[bytes, Attempt] = {}
        """Those whose turn has come, and that wait for a renewal."""
        self._busy_threads = 0
        self._start: list[Attempt] = []
        self._stop: dict[StopReason, list[Attempt]] = {}

    def take(self) -> list[Action]:
        """Hand over what was decided since the last time."""
        actions: list[Action] = []
        if self._stop:
            actions.extend(Stop(attempts, reason) for reason, attempts in self._stop.items())
            self._stop = {}
        if self._start:
            actions.append(Start(self._start))
            self._start = []
        return actions

    def admit(self, attempt: Attempt) -> None:
        """Let an attempt wait for its start."""
        self.held[attempt.token] = attempt
        self.waiting += 1
        self._queue_of(attempt).append(attempt)

    def start_waiting(self, now: Micros) -> None:
        """Start what waits, as far as there are slots and threads, in order; return what has become late."""
        for renewed in [one for one in self._unrenewed.values() if self._is_renewed(one)]:
            del self._unrenewed[renewed.token]
            insort(self._queue_of(renewed), renewed, key=_order)
        running = self.running
        while self.waiting and len(running) < self._capacity.slots:
            attempt = self._next_waiting()
            if attempt is None:
                break
            if self._is_late(attempt, now):
                self.late_count += 1
                self._unstarted(attempt)
                continue
            if attempt.is_short(now) and not (attempt.is_urgent or self._is_renewed(attempt)):
                self._unrenewed[attempt.token] = attempt
                continue
            self._busy_threads += attempt.task_type in self._capacity.threaded
            self.waiting -= 1
            attempt.phase = Phase.RUNNING
            attempt.started_at = now
            running[attempt.token] = attempt
            self._start.append(attempt)

    def occupied(self) -> Counter[tuple[str, str]]:
        """Count what waits and runs by node and task type."""
        return Counter((one.address, one.task_type) for one in {**self.held, **self.running}.values())

    def ended(self, endings: Iterable[tuple[Attempt, Outcome]]) -> None:
        """Free the slots of handlers that have ended, and keep the outcomes of those whose lease was not lost."""
        for attempt, outcome in endings:
            del self.running[attempt.token]
            self._busy_threads -= attempt.task_type in self._capacity.threaded
            if self.held.pop(attempt.token, None) is not None:
                self._outcomes.keep(attempt, outcome)

    def watch(self, now: Micros) -> Iterator[Attempt]:
        """Look at everything that is held; yield attempts whose start is to be told by now."""
        for attempt in list(self.held.values()):
            if attempt.phase is Phase.WAITING:
                if self._is_late(attempt, now):
                    self.late_count += 1
                    self.give_back(attempt)
                continue
            if not attempt.is_start_told and now - attempt.started_at >= START_TOLD_AFTER:
                yield attempt
            if attempt.deadline is not None and now >= attempt.deadline:
                self.stop(attempt, StopReason.TIMED_OUT)
            if now >= self._terms.counts_from(attempt) + attempt.lease:
                self.tell_lease_lost(attempt)

    def stop(self, attempt: Attempt, reason: StopReason) -> None:
        """Ask a handler to stop, unless it was asked before."""
        if attempt.stop_reason is None:
            attempt.stop_reason = reason
            self._stop.setdefault(reason, []).append(attempt)

    def tell_lease_lost(self, attempt: Attempt) -> None:
        """Ask a handler to stop for its lease; it learns of that also if it was asked for another reason before."""
        if not attempt.is_lease_lost:
            attempt.is_lease_lost = True
            attempt.stop_reason = attempt.stop_reason or StopReason.LEASE_LOST
            self._stop.setdefault(StopReason.LEASE_LOST, []).append(attempt)

    def lose(self, attempt: Attempt) -> None:
        """Forget an attempt whose lease is no longer the worker's."""
        del self.held[attempt.token]
        if attempt.phase is Phase.WAITING:
            self._unqueue(attempt)
            self.waiting -= 1
        else:
            self.tell_lease_lost(attempt)
        attempt.phase = Phase.FORGOTTEN

    def give_back(self, attempt: Attempt) -> None:
        """Return an attempt that waits."""
        self._unqueue(attempt)
        self._unstarted(attempt)

    def give_back_waiting(self) -> None:
        """Return all that waits."""
        for attempt in list(self.held.values()):
            if attempt.phase is Phase.WAITING:
                self.give_back(attempt)

    def stop_running(self, reason: StopReason) -> None:
        """Ask all that runs to stop."""
        for attempt in self.running.values():
            self.stop(attempt, reason)

    def _next_waiting(self) -> Attempt | None:
        """Take the oldest that a slot, and a thread if it needs one, is free for."""
        queue, threaded = self._queue, self._threaded_queue
        if threaded and self._busy_threads < self._capacity.threads:
            return threaded.popleft() if not queue or threaded[0].order < queue[0].order else queue.popleft()
        return queue.popleft() if queue else None

    def _is_late(self, attempt: Attempt, now: Micros) -> bool:
        """Tell whether it is too late to start. Renewals are looked up only if the assignment alone does not do."""
        earliest = now + bounds.LATE_ASSIGNMENT_MARGIN - attempt.lease
        if attempt.counts_from < earliest and self._terms.counts_from(attempt) < earliest:
            return True
        is_too_late = attempt.start_by is not None and attempt.start_by < now
        return is_too_late or (attempt.deadline is not None and attempt.deadline <= now)

    def _unstarted(self, attempt: Attempt) -> None:
        del self.held[attempt.token]
        self.waiting -= 1
        self._outcomes.keep(attempt, RETURNED)

    def _is_renewed(self, attempt: Attempt) -> bool:
        return self._terms.counts_from(attempt) > attempt.came_with

    def _unqueue(self, attempt: Attempt) -> None:
        if self._unrenewed.pop(attempt.token, None) is None:
            self._queue_of(attempt).remove(attempt)

    def _queue_of(self, attempt: Attempt) -> deque[Attempt]:
        return self._threaded_queue if attempt.task_type in self._capacity.threaded else self._queue
