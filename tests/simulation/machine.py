"""The edge between the code that runs and the machine: what it would ask the machine for comes from the seed here.

While `replaced` is entered, random bytes and unseeded generators are drawn from the process that asks, channels and
connections lead into the simulated network, and log events go where the run wants them. Nothing else of the code is
touched.
"""

import asyncio
import logging
import os
import random
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import grpc
import structlog
import uuid_utils
from simulation import channels, wires
from simulation.loop import Process, SimulationLoop
from simulation.network import Network

Log = Callable[[str, MutableMapping[str, Any]], None]


class Entropy:
    """Each process draws from a source of its own, so that what one does leaves the others' draws alone."""

    def __init__(self, loop: SimulationLoop, seed: int) -> None:
        self._loop = loop
        self._seed = seed
        self._sources: dict[Process, random.Random] = {}

    def source(self) -> random.Random:
        """Return the source of the process that runs now."""
        process = self._loop.current
        source = self._sources.get(process)
        if source is None:
            source = self._sources[process] = random.Random(f"{self._seed} {process.name}")
        return source

    def bytes(self, count: int) -> bytes:
        """Draw bytes."""
        return self.source().randbytes(count)

    def uuid(self) -> uuid.UUID:
        """Draw an id."""
        return uuid.UUID(bytes=self.source().randbytes(16))


@contextmanager
def replaced(network: Network, seed: int, log: Log, *, is_verbose: bool) -> Iterator[None]:
    """Stand in for the machine. `log` is told each log event with its level."""
    entropy = Entropy(network.loop, seed)

    class Seeded(random.Random):
        def __init__(self, x: Any = None) -> None:
            super().__init__(entropy.source().getrandbits(64) if x is None else x)

    with (
        patch.object(os, "urandom", entropy.bytes),
        patch.object(random, "_urandom", entropy.bytes),
        patch.object(random, "Random", Seeded),
        patch.object(uuid_utils, "uuid7", entropy.uuid),
        patch.object(grpc.aio, "insecure_channel", channels.opener(network)),
        patch.object(asyncio, "open_connection", wires.dialler(network)),
        _logs(log, is_verbose),
    ):
        yield


@contextmanager
def _logs(log: Log, is_verbose: bool) -> Iterator[None]:
    def take(_: Any, level: str, event: MutableMapping[str, Any]) -> Any:
        log(level, event)
        raise structlog.DropEvent

    handler = _Handler(log)
    library = logging.getLogger("duecourse.worker")
    level = library.level
    threshold = logging.INFO if is_verbose else logging.ERROR
    structlog.configure(processors=[take], wrapper_class=structlog.make_filtering_bound_logger(threshold))
    library.addHandler(handler)
    library.propagate = False
    library.setLevel(threshold)
    try:
        yield
    finally:
        structlog.reset_defaults()
        library.removeHandler(handler)
        library.propagate = True
        library.setLevel(level)


class _Handler(logging.Handler):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log
        self._standard = set(vars(logging.makeLogRecord({})))

    def emit(self, record: logging.LogRecord) -> None:
        fields = {key: value for key, value in vars(record).items() if key not in self._standard}
        self._log(record.levelname.lower(), {"event": record.getMessage(), **fields})
