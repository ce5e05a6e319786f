"""Ports on which what tests start listens: a range for each of the processes that run tests beside each other.

They lie below those that outgoing connections are given. Two tests that drew from one range at the same time might be
given the same port, and one might take what the other serves for its own. Nor is a port given again before all others
were: whoever asked for it may not listen on it yet, or be about to start again on it.
"""

import itertools
import os
import random
import socket
from typing import Final

_FIRST: Final = 20_000
_EACH: Final = 1_500
_PROCESSES: Final = 8
_PROCESS: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES
_HOST: Final = "127.0.0.1"

_RANGE: Final = range(_FIRST + _PROCESS * _EACH, _FIRST + (_PROCESS + 1) * _EACH)
# Another run of tests on this machine begins elsewhere.
_numbers: Final = itertools.cycle(random.SystemRandom().sample(_RANGE, _EACH))


def free_port() -> int:
    """Return a port on which nobody listens, and that was not given to anybody else for long."""
    for port in itertools.islice(_numbers, _EACH):
        if _is_free(port):
            return port
    raise AssertionError(f"none of the ports from {_RANGE.start} to {_RANGE.stop - 1} is free")


def free_ports_apart(step: int, count: int) -> int:
    """Return the first of so many free ports, each `step` after the one before it."""
    while True:
        first = free_port()
        ports = range(first, first + step * count, step)
        if ports[-1] in _RANGE and all(_is_free(port) for port in ports[1:]):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True
