"""A flag that is raised once, to be looked at or waited for from the event loop and from threads alike."""

import asyncio
import threading


class Flag:
    """Raised at most once, by the event loop's thread. Costs next to nothing as long as nobody waits."""

    __slots__ = ("_event", "_is_set", "_waiters")

    # Guards the making of events, which threads do while the loop raises the flag.
    _making = threading.Lock()

    def __init__(self) -> None:
        self._is_set = False
        self._event: threading.Event | None = None
        self._waiters: list[asyncio.Future[None]] | None = None

    def __bool__(self) -> bool:
        return self._is_set

    def is_set(self) -> bool:
        """Tell whether it was raised."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until it is raised, for at most `timeout` seconds; for handlers that run in threads."""
        with self._making:
            if self._event is None:
                self._event = threading.Event()
                if self._is_set:
                    self._event.set()
        return self._event.wait(timeout)

    async def raised(self) -> None:
        """Return once it is raised; for handlers that run on the event loop."""
        if self._is_set:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        await waiter

    def set(self) -> None:
        """Raise it."""
        with self._making:
            self._is_set = True
            if self._event is not None:
                self._event.set()
        for waiter in self._waiters or ():
            if not waiter.done():
                waiter.set_result(None)
