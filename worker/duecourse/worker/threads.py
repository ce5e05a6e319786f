"""A bounded pool of threads for handlers that are plain functions.

Its threads are daemons, unlike those of `concurrent.futures`: a handler that hangs cannot keep the process from ending.
"""

import queue
import threading
from collections.abc import Callable


class Threads:
    """Up to `limit` threads, started when they are needed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = 0
        self._pending = 0
        # Guards the count of calls that are pending: the loop adds, threads subtract.
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call`, which raises nothing, in a thread."""
        with self._lock:
            self._pending += 1
            if self._pending > self._count and self._count < self._limit:
                self._count += 1
                threading.Thread(target=self._work, name=f"duecourse-handler-{self._count}", daemon=True).start()
        self._calls.put(call)

    def close(self) -> None:
        """Let threads end once they are done with their calls."""
        for _ in range(self._count):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            finally:
                with self._lock:
                    self._pending -= 1
