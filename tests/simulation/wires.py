"""Plain connections of the simulated network, on which nothing is said: what `asyncio.open_connection` makes."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from simulation.loop import Process, wake
from simulation.network import RETRY, Network
from simulation.wire import host_at


class Wire:
    """A connection, its reader and its writer in one: it tells of its end, and of nothing else."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.ends = (client, server)
        self._network = network
        self._is_closed = asyncio.Event()
        network.wires[self] = None

    async def read(self, count: int) -> bytes:
        """Wait until the other end is gone, if one hears of it."""
        await self._is_closed.wait()
        return b""

    def close(self) -> None:
        """End it."""
        self._network.wires.pop(self, None)

    def cut(self, *, has_notice: bool) -> None:
        """Lose it."""
        self._network.wires.pop(self, None)
        if has_notice:
            self._network.loop.after(self._network.weather.delay(), self._is_closed.set)


def dialler(network: Network) -> Callable[..., Coroutine[Any, Any, tuple[Wire, Wire]]]:
    """Return what stands in for `asyncio.open_connection`."""
    loop, weather = network.loop, network.weather

    async def open_connection(host: str, port: int) -> tuple[Wire, Wire]:
        client, address = loop.current, f"{host}:{port}"
        here, there = client.host, host_at(address)
        delay = weather.delay()
        while True:
            arrived: asyncio.Future[None] = loop.create_future()
            loop.after(delay, wake, arrived)
            await arrived
            is_silent = weather.is_blocked(here, there) or weather.is_blocked(there, here) or network.is_off(there)
            if not is_silent:
                break
            delay = RETRY
        listener = network.listener(address)
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        wire = Wire(network, client, listener.process)
        return wire, wire

    return open_connection
