"""`Worker`: what an application makes, registers its handlers with, and runs."""

import asyncio
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import metadata
from typing import TYPE_CHECKING, Final, TypeVar

from duecourse.model import bounds
from duecourse.model.addresses import several
from duecourse.model.names import ALPHABET, is_name
from duecourse.timing.clock import Clock, SystemClock
from duecourse.worker.capacity import Capacity, Introduction
from duecourse.worker.registry import AsyncHandler, PlainHandler, Registry

if TYPE_CHECKING:
    from duecourse.worker.incarnation import Incarnation

DEFAULT_SLOTS: Final = 100
# Longer than any pause of an event loop that works.
ALIVE_WITHIN: Final = 5 * bounds.SECOND
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_handled: Final[set[signal.Signals]] = set()
"""Which of them a worker of this process hears."""

_Call = TypeVar("_Call", bound=AsyncHandler | PlainHandler)


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """How the stream to one node does."""

    node_id: str
    """The node's name; empty until it is known who is at the address."""
    address: str
    is_connected: bool
    """The node has welcomed the stream that is open."""
    is_serving: bool
    """The node may send tasks on it: it does not drain."""
    since: datetime
    """When it last connected or ceased to be."""


@dataclass(frozen=True, slots=True)
class Health:
    """How a worker does."""

    is_alive: bool
    """The loop that takes and runs assignments is at work. A probe of liveness asks for this."""
    nodes: tuple[NodeHealth, ...]
    missing: tuple[str, ...]
    """The names of nodes of the cluster to which there is no stream: the tasks of their shards do not come here."""
    running: int
    """Handlers at work."""
    waiting: int
    """Attempts that wait for a slot."""
    unrecorded: int
    """Outcomes that no node has answered yet."""

    @property
    def is_ready(self) -> bool:
        """Whether it is alive and at least one node may send it tasks."""
        return self.is_alive and any(node.is_serving for node in self.nodes)


class Worker:
    """Takes tasks from a cluster and runs their handlers.

    Give it the addresses of some nodes, better of all: it learns of the others from any of them, and connects to each.
    `slots` handlers run at once; `prefetch` more attempts may wait here, which is faster for short handlers and holds
    tasks back from other workers for long ones. Handlers that are plain functions run in up to `threads` threads.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        namespace: str = "default",
        queues: Sequence[str] = ("default",),
        slots: int = DEFAULT_SLOTS,
        prefetch: int = 0,
        name: str | None = None,
        threads: int | None = None,
        grace: timedelta = timedelta(microseconds=bounds.DRAIN),
        clock: Clock | None = None,
    ) -> None:
        self.addresses = several(addresses)
        self.namespace = namespace
        self.queues = tuple(queues)
        self.slots = slots
        self.prefetch = prefetch
        self.name = _host_name() if name is None else name
        self.threads = slots if threads is None else threads
        self.grace = grace
        self._clock = clock or SystemClock()
        self._registry = Registry()
        self._incarnation: Incarnation | None = None
        self._check()

    def task(self, task_type: str) -> Callable[[_Call], _Call]:
        """Make the decorated function, async or plain, the handler of a task type."""

        def register(call: _Call) -> _Call:
            self.register(task_type, call)
            return call

        return register

    def register(self, task_type: str, call: AsyncHandler | PlainHandler) -> None:
        """Make a function, async or plain, the handler of a task type; before `run`."""
        self._registry.add(task_type, call)

    @property
    def task_types(self) -> tuple[str, ...]:
        """The task types that have a handler."""
        return tuple(self._registry)

    async def run(self, *, handle_signals: bool = True) -> None:
        """Work until `stop` is called or, in the main thread, SIGTERM or SIGINT comes; end in good order.

        What has not started is handed back at once, what runs gets `grace`. A second signal ends the process at once.
        """
        if not len(self._registry):
            raise ValueError("a worker without handlers has nothing to do: register some")
        if self._incarnation is not None:
            raise RuntimeError("this worker runs already")
        # Imported here so that handlers can be defined, and run by other means, without gRPC.
        from duecourse.worker.incarnation import Incarnation

        incarnation = Incarnation(self.addresses, self._introduction(), self._capacity(), self._registry, self._clock)
        self._incarnation = incarnation
        try:
            with _signals(incarnation.stop, handle_signals):
                await incarnation.run(self.grace.total_seconds())
        finally:
            self._incarnation = None

    def stop(self) -> None:
        """Let `run` end as on SIGTERM. To be called on its event loop; without `run` it does nothing."""
        if self._incarnation is not None:
            self._incarnation.stop()

    def health(self) -> Health:
        """Tell how the worker and its streams do."""
        incarnation = self._incarnation
        if incarnation is None:
            return Health(False, (), (), 0, 0, 0)
        protocol = incarnation.protocol
        return Health(
            self._clock.elapsed() - incarnation.ticked_at < ALIVE_WITHIN,
            tuple(
                NodeHealth(
                    protocol.reach.node_at(pump.address),
                    pump.address,
                    pump.is_connected,
                    pump.is_serving,
                    _EPOCH + timedelta(microseconds=pump.since),
                )
                for pump in incarnation.pumps.values()
            ),
            tuple(protocol.reach.missing()),
            len(protocol.holdings.running),
            protocol.holdings.waiting,
            len(protocol.outcomes.unrecorded),
        )

    def _check(self) -> None:
        if not self.addresses:
            raise ValueError("addresses must name at least one node")
        if not 1 <= len(self.queues) <= bounds.MAX_SUBSCRIBED_QUEUES:
            raise ValueError(f"queues must name 1 to {bounds.MAX_SUBSCRIBED_QUEUES}")
        for field, name in [("namespace", self.namespace), ("name", self.name), *(("queue", q) for q in self.queues)]:
            if not is_name(name):
                raise ValueError(f"{field} {name!r} is not 1 to {bounds.MAX_NAME_BYTES} characters of {ALPHABET}")
        self._capacity()
        if self.threads < 1:
            raise ValueError("threads must be at least 1")
        if self.grace < timedelta(0):
            raise ValueError("grace must not be negative")

    def _capacity(self) -> Capacity:
        return Capacity(
            slots=self.slots, prefetch=self.prefetch, threads=self.threads, threaded=self._registry.threaded()
        )

    def _introduction(self) -> Introduction:
        return Introduction(
            namespace=self.namespace,
            worker=self.name,
            incarnation=secrets.token_hex(16),
            queues=self.queues,
            task_types=self.task_types,
            library=f"duecourse-python/{metadata.version('duecourse')}",
        )


@contextmanager
def _signals(stop: Callable[[], None], handle_signals: bool) -> Iterator[None]:
    """Call `stop` on the first SIGTERM or SIGINT; let the second one end the process as it would have by default."""
    if not handle_signals or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    came: set[int] = set()

    def on_signal(number: int) -> None:
        if came:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        came.add(number)
        stop()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
        _handled.add(number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            _handled.discard(number)
            loop.remove_signal_handler(number)


# A child that a handler forks inherits the socket by which the event loop hears of signals: a SIGTERM to the child, as
# process pools send it, would stop the worker. The child gets the default handlers, and until then no signal.


def _hold_signals() -> None:
    if _handled:
        _held_signals.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handled)


def _release_signals() -> None:
    mask = _held_signals.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget_signals() -> None:
    if _handled:
        signal.set_wakeup_fd(-1)
    for number in _handled:
        signal.signal(number, signal.SIG_DFL)
    _handled.clear()
    _release_signals()


_held_signals = threading.local()
os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_forget_signals)


def _host_name() -> str:
    """Return the host's name in the alphabet of names."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[: bounds.MAX_NAME_BYTES] or "worker"
