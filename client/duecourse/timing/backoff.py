"""Delays between tries at something that may fail again."""

import random
from collections.abc import Iterator

from duecourse.model.instants import Micros


def delays(first: Micros, longest: Micros, source: random.Random) -> Iterator[Micros]:
    """Yield waits for ever: doubling from `first` to `longest`, each drawn from its upper half so that peers spread."""
    ceiling = first
    while True:
        yield ceiling // 2 + source.randrange(ceiling // 2 + 1)
        ceiling = min(longest, ceiling * 2)
