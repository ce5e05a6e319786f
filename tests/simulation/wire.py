"""What carries messages: delays, pipes that deliver in order but late, and mailboxes at their ends."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from simulation.loop import Process, SimulationLoop, wake

from duecourse.model import bounds
from duecourse.model.instants import Micros

WINDOW: Final = 16
"""How many messages a pipe takes before its sender has to wait for the reader."""
_RETRANSMIT: Final = 200 * bounds.MILLISECOND
Path = tuple[str, str]
"""From one host to another."""


class Weather:
    """How long messages take, and who cannot reach whom."""

    def __init__(self, loop: SimulationLoop, seed: int) -> None:
        self.slow_share = 0.02
        self.longest: Micros = 50 * bounds.MILLISECOND
        self._loop = loop
        self._random = random.Random(f"{seed} weather")
        self._blocked: Counter[Path] = Counter()
        """How many have blocked a path; one that nobody blocks is not in it."""

    def delay(self) -> Micros:
        """Draw how long a message takes."""
        draw = self._random.random()
        if draw < self.slow_share:
            return int(self._random.random() ** 2 * self.longest) + bounds.MILLISECOND
        return 100 + int(draw * 900)

    def block(self, source: str, target: str) -> None:
        """Let nothing through from one host to another; what is sent waits."""
        self._blocked[source, target] += 1

    def unblock(self, source: str, target: str) -> None:
        """Take one block away; once there is none, what is sent gets through again."""
        path = (source, target)
        if self._blocked[path] > 1:
            self._blocked[path] -= 1
        else:
            self._blocked.pop(path, None)

    def part(self, paths: Sequence[Path]) -> bool:
        """Block several paths; False, and nothing is changed: all were blocked."""
        if all(self.is_blocked(*path) for path in paths):
            return False
        for path in paths:
            self.block(*path)
        return True

    def rejoin(self, paths: Sequence[Path]) -> None:
        """Take away what `part` did."""
        for path in paths:
            self.unblock(*path)

    def clear(self) -> None:
        """Be as fair as weather gets."""
        self._blocked.clear()
        self.calm()

    def calm(self) -> None:
        """Be quick again."""
        self.slow_share = 0.02
        self.longest = 50 * bounds.MILLISECOND

    def is_blocked(self, source: str, target: str) -> bool:
        """Tell whether nothing gets through."""
        return (source, target) in self._blocked


def host_at(address: str) -> str:
    """Return the machine that an address belongs to: the address up to its port."""
    return address.partition(":")[0]


class Mailbox:
    """What has arrived for one reader, and the end of it."""

    def __init__(self, loop: SimulationLoop) -> None:
        self._loop = loop
        self._items: deque[Any] = deque()
        self._end: Callable[[], Any] | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        """Deliver."""
        self._items.append(item)
        self._wake()

    def close(self, end: Callable[[], Any]) -> None:
        """Deliver nothing more: once all is read, readers get what `end` returns or raises."""
        if self._end is None:
            self._end = end
            self._wake()

    async def get(self) -> Any:
        """Read the next item."""
        while not self._items:
            if self._end is not None:
                return self._end()
            self._waiter = waiter = self._loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        return self._items.popleft()

    def interrupt(self) -> None:
        """Cancel who reads."""
        if self._waiter is not None:
            self._waiter.cancel()

    def _wake(self) -> None:
        if self._waiter is not None:
            wake(self._waiter)


class Pipe:
    """One direction of a call: in order, late, until it is lost."""

    def __init__(
        self, loop: SimulationLoop, weather: Weather, source: Process, target: Process, deliver: Callable[[Any], None]
    ) -> None:
        self.is_lost = False
        self._loop = loop
        self._weather = weather
        self._source = source
        self._path = (source.host, target.host)
        self._deliver = deliver
        self._queue: deque[tuple[Micros, Any]] = deque()
        """What is on its way, with the times at which it should be there."""
        self._last: Micros = 0
        self._unread = 0
        self._has_room: asyncio.Future[None] | None = None

    def send(self, item: Any) -> None:
        """Put something on its way; the dead send nothing."""
        if self._source.is_dead or self.is_lost:
            return
        self._unread += 1
        self._last = max(self._last, self._loop.now + self._weather.delay())
        self._queue.append((self._last, item))
        if len(self._queue) == 1:
            self._loop.after(self._last - self._loop.now, self._arrive)

    async def room(self) -> None:
        """Wait until the reader has read enough of what was sent."""
        while self._unread >= WINDOW:
            self._has_room = self._loop.create_future()
            await self._has_room

    def read(self) -> None:
        """Note that the reader took a message."""
        self._unread -= 1
        if self._has_room is not None:
            wake(self._has_room)

    def lose(self) -> None:
        """Deliver nothing of what is on its way, nor of what will be sent."""
        self.is_lost = True
        self._queue.clear()

    def _arrive(self) -> None:
        if self._weather.is_blocked(*self._path):
            if self._queue:
                self._loop.after(_RETRANSMIT, self._arrive)
            return
        while self._queue and self._queue[0][0] <= self._loop.now:
            self._deliver(self._queue.popleft()[1])
        if self._queue:
            self._loop.after(self._queue[0][0] - self._loop.now, self._arrive)
