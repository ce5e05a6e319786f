"""One start of a worker: wires the protocol machine, the runner and a pump for each node, from start to the last word.

Pumps begin with the addresses that the worker was given. More are started as nodes tell of others, once it is known
where those that are just being opened lead; each ends by itself when it is no longer wanted.

Stopping: what has not started is returned at once and Goodbye is said; what runs gets the grace time, then it is asked
to stop and gets `LAST_WORDS` more. Streams with their heartbeats go on until every outcome has its verdict, or the time
is over.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Never

from duecourse.model import bounds
from duecourse.timing.clock import Clock
from duecourse.worker.capacity import Capacity, Introduction
from duecourse.worker.holdings import Action
from duecourse.worker.protocol import Protocol
from duecourse.worker.registry import Registry
from duecourse.worker.runner import Ending, Runner
from duecourse.worker.stream import Pump

TICK: Final = 200 * bounds.MILLISECOND
LAST_WORDS: Final = 2 * bounds.SECOND
_STEP: Final = 5 * bounds.MILLISECOND

_log = logging.getLogger("duecourse.worker")


class Incarnation:
    """A worker at work."""

    def __init__(
        self, addresses: Sequence[str], introduction: Introduction, capacity: Capacity, registry: Registry, clock: Clock
    ) -> None:
        self.protocol = Protocol(introduction, capacity)
        self.pumps: dict[str, Pump] = {}
        """By address."""
        self._seeds = addresses
        self.ticked_at = clock.elapsed()
        """When the ticker last ran: it stands for the loop that takes and runs assignments."""
        self._clock = clock
        self._runner = Runner(registry, clock, max(1, capacity.threads), self._deliver)
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()

    def stop(self) -> None:
        """Begin to stop."""
        self._stopping.set()

    async def run(self, grace_seconds: float) -> None:
        """Work until `stop` is called, then end in good order."""
        async with asyncio.TaskGroup() as group:
            duty = group.create_task(self._keep(), name="streams")
            try:
                await self._stopping.wait()
                await self._drain(grace_seconds)
            finally:
                self._runner.close()
                duty.cancel()

    async def _drain(self, grace_seconds: float) -> None:
        _log.info("worker draining", extra={"running": len(self.protocol.holdings.running)})
        self.protocol.drain()
        self._perform([])
        if not await self._becomes_idle(grace_seconds):
            self._perform(self.protocol.stop_running())
            await self._becomes_idle(LAST_WORDS / bounds.SECOND)
        await self._finish_speaking()
        _log.info(
            "worker stopped",
            extra={
                "running": len(self.protocol.holdings.running),
                "unrecorded": len(self.protocol.outcomes.unrecorded),
            },
        )

    async def _finish_speaking(self) -> None:
        """Let the nodes hear the last word, Goodbye mostly: whoever has nothing to wait for would be gone before."""
        until = self._clock.elapsed() + LAST_WORDS
        while any(pump.has_unsaid for pump in self.pumps.values()) and self._clock.elapsed() < until:
            await self._clock.sleep(_STEP)

    async def _becomes_idle(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _keep(self) -> Never:
        """Keep a stream to every node, and let the machine know that time passes."""
        async with asyncio.TaskGroup() as group:
            self._start_pumps(group, self._seeds)
            while True:
                await self._clock.sleep(TICK)
                now = self.ticked_at = self._clock.elapsed()
                self._perform(self.protocol.tick(now))
                for pump in self.pumps.values():
                    pump.check(now)
                if not any(pump.is_opening(now) for pump in self.pumps.values()):
                    self._start_pumps(group, self.protocol.reach.wanted(self._seeds))

    def _start_pumps(self, group: asyncio.TaskGroup, addresses: Sequence[str]) -> None:
        for address in addresses:
            if address not in self.pumps:
                pump = Pump(address, self.protocol, self._clock, self._perform, self._is_wanted)
                self.pumps[address] = pump
                group.create_task(self._pump(pump), name=f"stream to {address}")

    async def _pump(self, pump: Pump) -> None:
        try:
            await pump.run()
        finally:
            del self.pumps[pump.address]

    def _is_wanted(self, address: str) -> bool:
        return address in self.protocol.reach.wanted(self._seeds)

    def _deliver(self, endings: Sequence[Ending]) -> None:
        self._perform(self.protocol.ended(endings, self._clock.elapsed()))

    def _perform(self, actions: list[Action]) -> None:
        """Do what the machine asked for, and let the writers send what it left for them."""
        self._runner.perform(actions)
        for pump in self.pumps.values():
            pump.wake()
        if self.protocol.is_draining and self.protocol.is_idle:
            self._idle.set()
