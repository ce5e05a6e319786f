"""When load arrives: fixed before it is sent, so that a slow answer delays nothing and hides nothing. Pure."""

import random
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from duecourse.model import bounds
from duecourse.model.instants import Micros


class Call(NamedTuple):
    """One call: when it is made, and which arrivals it carries, by their indexes."""

    at: Micros
    begin: int
    end: int


def poisson(rate: float, duration: Micros, seed: int) -> "array[int]":
    """Return the offsets of arrivals that come independently of each other, `rate` a second on average."""
    source = random.Random(seed)
    mean = bounds.SECOND / rate
    offsets = array("q")
    at = source.expovariate(1) * mean
    while at < duration:
        offsets.append(int(at))
        at += source.expovariate(1) * mean
    return offsets


def gathered(offsets: Sequence[Micros], most: int, within: Micros) -> Iterator[Call]:
    """Gather sorted arrivals into calls of at most `most`, each made when its first arrives."""
    begin = 0
    while begin < len(offsets):
        end = begin + 1
        while end < len(offsets) and end - begin < most and offsets[end] - offsets[begin] < within:
            end += 1
        yield Call(offsets[begin], begin, end)
        begin = end


def even(rate: float, duration: Micros, size: int) -> Iterator[Call]:
    """Yield calls of `size` arrivals each, evenly spaced so that `rate` tasks a second arrive."""
    spacing = size * bounds.SECOND / rate
    for number in range(max(1, round(duration / spacing))):
        yield Call(round(number * spacing), number * size, (number + 1) * size)
