"""Ports on which what tests start listens: a range for each of the processes that run tests beside each other.

They lie below those that outgoing connections are given. Two tests that drew from one range at the same time might be
given the same port, and one might take what the other serves for its own.
"""

import os
from typing import Final

_FIRST: Final = 20_000
_EACH: Final = 1_500
_PROCESSES: Final = 8
_PROCESS: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES

PORTS: Final = range(_FIRST + _PROCESS * _EACH, _FIRST + (_PROCESS + 1) * _EACH)
