"""Holds objects against the garbage collector: what is in a cycle stays until it runs, and pauses the process then."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def none_left(*kinds: type) -> Iterator[None]:
    """Demand that no object of some kinds that comes into being within the scope is left at its end."""
    gc.collect()
    known = _alive(kinds)
    gc.disable()
    try:
        yield
        left = [one for one in _alive(kinds) if not any(one is before for before in known)]
    finally:
        gc.enable()
    assert not left


def _alive(kinds: tuple[type, ...]) -> list[object]:
    return [one for one in gc.get_objects() if isinstance(one, kinds)]
