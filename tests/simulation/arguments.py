"""What the commands of the simulation take, checked before anything is run."""

import argparse

from simulation.plan import Kind


def positive(text: str) -> int:
    """Read a number of at least one."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def seeds(text: str) -> range:
    """Read one seed, or a range FROM:UNTIL."""
    first, colon, until = text.partition(":")
    if not all(part.isascii() and part.isdigit() for part in ([first, until] if colon else [first])):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a seed nor a range FROM:UNTIL")
    found = range(int(first), int(until) if colon else int(first) + 1)
    if not found:
        raise argparse.ArgumentTypeError(f"there is no seed in {text!r}")
    return found


def kind(text: str) -> Kind:
    """Read a kind of cluster."""
    if text not in list(Kind):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(Kind)}")
    return Kind(text)
