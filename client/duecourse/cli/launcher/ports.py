"""Ports of this machine: free ones, and who serves on them."""

import asyncio
import socket
from typing import Final

HOST: Final = "127.0.0.1"


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


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
