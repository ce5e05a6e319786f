"""Addresses of nodes, checked where they are given: gRPC takes nearly every text for one, and fails later."""

from collections.abc import Sequence
from typing import Final

from duecourse.model import bounds

_SCHEMES: Final = ("dns:", "ipv4:", "ipv6:", "unix:")
"""With these gRPC finds a node in a way of its own: passed on as they are."""


def host_and_port(address: str) -> tuple[str, int]:
    """Split `host:port` or `[ipv6]:port`. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{address!r} is not an address such as 127.0.0.1:{bounds.API_PORT}")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise ValueError(f"{address!r}: write an IPv6 address in brackets, [::1]:{bounds.API_PORT}, and no http://")
    return host, int(port)


def several(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses that were given one by one, or in a text with commas between them, each once.

    Raises ValueError for what is none.
    """
    texts = given.split(",") if isinstance(given, str) else given
    addresses = tuple(dict.fromkeys(filter(None, (text.strip() for text in texts))))
    for address in addresses:
        if address.startswith(_SCHEMES):
            continue
        if ":" not in address:
            # gRPC would take the port of HTTPS.
            raise ValueError(f"{address!r} has no port; is {address}:{bounds.API_PORT} meant?")
        host_and_port(address)
    return addresses
