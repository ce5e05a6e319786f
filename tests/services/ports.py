"""Ports on which what tests start listens: a range for each of the processes that run tests beside each other.

Two tests that drew from one range at the same time might be given the same port, and one might take what the other
serves for its own.
"""

import os
from typing import Final

from duecourse.cli.launcher.ports import Ports, is_free

_FIRST: Final = 20_000
_EACH: Final = 1_500
_PROCESSES: Final = 8
_PROCESS: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES

_RANGE: Final = range(_FIRST + _PROCESS * _EACH, _FIRST + (_PROCESS + 1) * _EACH)
free_port: Final = Ports(_RANGE).free_port


def free_ports_apart(step: int, count: int) -> int:
    """Return the first of so many free ports, each `step` after the one before it."""
    while True:
        first = free_port()
        ports = range(first, first + step * count, step)
        if ports[-1] in _RANGE and all(is_free(port) for port in ports[1:]):
            return first
