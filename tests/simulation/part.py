"""Runs a part of many seeds behind whatever else runs: `python -m simulation.part KIND FROM:UNTIL`.

Other tests are about time, and shall have the cores first. What is only warned of is a failure here, as in other tests.
Prints the tally as JSON.
"""

import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, Final

from simulation import arguments
from simulation.run import Tally, run_seeds

from duecourse.model import bounds
from duecourse.timing.clock import SystemClock

CPU_SECONDS: Final = 60
"""Half as much again as a part takes on a machine that is no slower than those of docs/reliability.md. A slower one
runs fewer seeds, so that all tests together come to an end."""
LONGEST: Final = 10 * bounds.MINUTE
"""The same for a machine that has other things to do."""
_NICENESS: Final = 19


def main(given_arguments: Sequence[str]) -> None:
    """Run the seeds one after another until one fails, for as long as there is time."""
    kind, seeds = arguments.kind(given_arguments[0]), arguments.seeds(given_arguments[1])
    os.nice(_NICENESS)
    warnings.simplefilter("error")
    dropped: list[str] = []

    def drop(unraisable: Any) -> None:
        dropped.append(f"{unraisable.exc_value!r} in {unraisable.object!r}")

    # Also where coroutines go that were never awaited.
    sys.unraisablehook = drop
    clock = SystemClock()
    began = clock.elapsed()
    tally = Tally()
    for seed in seeds:
        tally.add(run_seeds(kind, [seed]))
        tally.failures += [(seed, f"nobody was told of {text}") for text in dropped]
        if tally.failures or tally.cpu_seconds > CPU_SECONDS or clock.elapsed() - began > LONGEST:
            break
    # Not `asdict`, which takes a Counter for something else.
    print(json.dumps({field.name: getattr(tally, field.name) for field in dataclasses.fields(tally)}))


if __name__ == "__main__":
    main(sys.argv[1:])
