"""Ports of this machine: free ones, and who serves on them."""

import asyncio
import random
import socket
from typing import Final

from duecourse.cli.launcher.errors import LaunchError

HOST: Final = "127.0.0.1"


class Ports:
    """Ports that are given away one after another, from a random one on.

    They should lie below those that systems give to outgoing connections by default: one of those may be taken between
    our look and the listening, or while what listened there is about to start again.
    """

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers
        self._next = random.SystemRandom().randrange(len(numbers))

    def free_port(self) -> int:
        """Return one that nobody listens on now, and that was not returned before for long. Raises LaunchError."""
        numbers = self._numbers
        for _ in numbers:
            port = numbers[self._next]
            self._next = (self._next + 1) % len(numbers)
            if is_free(port):
                return port
        raise LaunchError(f"no port from {numbers.start} to {numbers.stop - 1} is free: stop what listens there")


free_port: Final = Ports(range(10_000, 20_000)).free_port


def is_free(port: int) -> bool:
    """Tell whether a node could listen on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


async def is_ready(admin_port: int) -> bool:
    """Ask a node whether it serves."""
    try:
        async with asyncio.timeout(1):
            reader, writer = await asyncio.open_connection(HOST, admin_port)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
