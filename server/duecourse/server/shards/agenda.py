"""`Agenda`: which shard the loop has to look at next, and when: a task is due, or a cancellation has to be answered.

The loop notes every shard that has handled something, since nothing else can bring its times forward. What was noted
may be out of date: then the loop looks at a shard for nothing, never too late.
"""

import heapq
import itertools

from duecourse.model import bounds
from duecourse.model.instants import Micros, Now
from duecourse.server.core.shard import Shard

_NEVER: Micros = 2**63
_STILL: Micros = bounds.MILLISECOND
"""A cluster clock that has not moved for so long stands still; so long is waited at least for it to go on."""


class Agenda:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._heap: list[tuple[Micros, int, Shard]] = []
        """(Due time, entry number, shard): when a task is due next, valid where `_armed` says the same."""
        self._entries = itertools.count()
        self._armed: dict[Shard, Micros] = {}
        self._waiting: set[Shard] = set()
        """Shards with a cancellation that has to be answered in time."""
        self._stands = Now(0, 0, 0)
        """The first reading of the clock that showed what it shows now."""

    def note(self, shard: Shard) -> None:
        """Look up when a shard is next to be looked at."""
        next_due = shard.near.next_due()
        if next_due is not None and next_due < self._armed.get(shard, _NEVER):
            self._armed[shard] = next_due
            heapq.heappush(self._heap, (next_due, next(self._entries), shard))
        if shard.cancellations.next_wait() is not None:
            self._waiting.add(shard)
        else:
            self._waiting.discard(shard)

    def forget(self, shard: Shard) -> None:
        """Drop a shard whose term is over."""
        self._armed.pop(shard, None)
        self._waiting.discard(shard)

    def take(self, now: Now) -> set[Shard]:
        """Return the shards that are to be looked at now; each is to be noted again then."""
        found = set()
        heap = self._heap
        while heap and heap[0][0] <= now.earliest:
            due_time, _, shard = heapq.heappop(heap)
            if self._armed.get(shard) == due_time:
                del self._armed[shard]
                found.add(shard)
        found.update(shard for shard in self._waiting if (shard.cancellations.next_wait() or 0) <= now.elapsed)
        return found

    def until_next(self, now: Now, at_most: Micros) -> Micros:
        """Return how long there is nothing to look at."""
        wait = at_most
        if now.earliest != self._stands.earliest:
            self._stands = now
        if self._heap:
            # A cluster clock that was set back stands still, maybe for long, and maybe just before something is due.
            is_still = now.elapsed - self._stands.elapsed > _STILL
            wait = min(wait, max(self._heap[0][0] - now.earliest, _STILL if is_still else 0))
        for shard in self._waiting:
            wait = min(wait, (shard.cancellations.next_wait() or 0) - now.elapsed)
        return max(0, wait)
