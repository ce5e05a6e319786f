"""Whole clusters from seeds: those that found something once, and as many others as there is time for."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from simulation import plan, world
from simulation.run import run_seeds
from simulation.seeds import FOUND, Found

_TESTS: Final = Path(__file__).parent.parent
_PARTS: Final = {plan.Kind.CLUSTER: 16, plan.Kind.SOLO: 4}
_SEEDS_OF_A_PART: Final = 125
_CPU_SECONDS_OF_A_PART: Final = 60
"""Half as much again as a part takes on a machine that is no slower than those of docs/reliability.md: a slower one
runs fewer seeds, so that it does not hold up all other tests."""
_DIGESTS: Final = """
from simulation import plan, world
print([world.run(plan.draw(seed, kind)).digest for seed in range(2) for kind in plan.Kind])
"""


@pytest.mark.parametrize("found", FOUND, ids=lambda found: f"{found.kind} seed {found.seed}")
def test_a_seed_that_found_a_fault_finds_it_no_more(found: Found) -> None:
    result = world.run(plan.draw(found.seed, found.kind))
    assert not result.violations, found.fault


@pytest.mark.timeout(5 * _CPU_SECONDS_OF_A_PART)
@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind, parts in _PARTS.items() for part in range(parts)])
def test_no_seed_breaks_a_promise(kind: plan.Kind, part: int, record_property: Callable[[str, object], None]) -> None:
    until = time.process_time() + _CPU_SECONDS_OF_A_PART
    counted = 0
    for seed in range(part * _SEEDS_OF_A_PART, (part + 1) * _SEEDS_OF_A_PART):
        tally = run_seeds(kind, [seed])
        assert not tally.failures
        counted += tally.counted
        if time.process_time() > until:
            break
    record_property("counted seeds", counted)
    assert counted


def test_a_run_is_the_same_in_another_process_whatever_hashes_are_there() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")])}
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGESTS],
            env={**environment, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "4711")
    }
    assert len(digests) == 1


def test_a_run_is_the_same_whether_it_is_traced_or_not() -> None:
    quiet, verbose = world.run(plan.draw(3)), world.run(plan.draw(3), is_verbose=True)
    assert quiet.digest == verbose.digest
    assert verbose.trace
