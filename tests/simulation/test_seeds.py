"""Whole clusters from seeds: those that found something once, and as many others as there is time for."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from hashlib import blake2b
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import pytest
from simulation import plan, world
from simulation.plan import FaultKind, Kind, Plan
from simulation.run import run_seeds
from simulation.seeds import FOUND, Found

from duecourse.model import bounds

_TESTS: Final = Path(__file__).parent.parent
_PARTS: Final = {Kind.CLUSTER: 16, Kind.SOLO: 4}
_SEEDS_OF_A_PART: Final = 125
_CPU_SECONDS_OF_A_PART: Final = 60
"""Half as much again as a part takes on a machine that is no slower than those of docs/reliability.md: a slower one
runs fewer seeds, so that it does not hold up all other tests."""
_SECONDS_OF_A_PART: Final = 15 * 60
_NICENESS: Final = 19
_REPLAY_CODE: Final = """
import sys
from simulation import test_seeds
for kind, seed in zip(sys.argv[1::2], sys.argv[2::2]):
    print(test_seeds.replayed(kind, int(seed)))
"""


@pytest.mark.parametrize("found", FOUND, ids=lambda found: f"{found.kind} seed {found.seed}")
def test_a_seed_that_found_a_fault_finds_it_no_more(found: Found) -> None:
    result = world.run(plan.draw(found.seed, found.kind))
    assert not result.violations, found.fault


@pytest.fixture(scope="module")
def background() -> Iterator[Executor]:
    """Run what is only work behind other tests: many of those are about time, and shall have the cores first."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=os.nice, initargs=(_NICENESS,)) as pool:
        yield pool


@pytest.mark.timeout(_SECONDS_OF_A_PART)
@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind, parts in _PARTS.items() for part in range(parts)])
def test_no_seed_breaks_a_promise(
    kind: Kind, part: int, background: Executor, record_property: Callable[[str, object], None]
) -> None:
    seeds = range(part * _SEEDS_OF_A_PART, (part + 1) * _SEEDS_OF_A_PART)
    tally = background.submit(run_seeds, kind, seeds, _CPU_SECONDS_OF_A_PART).result()
    assert not tally.failures
    assert tally.counted
    # What all parts together have seen is held against what they should have, in `tests/conftest.py`.
    record_property(f"simulated {kind}", json.dumps({"seeds": tally.seeds, "counted": tally.counted, **tally.coverage}))


@pytest.fixture(scope="module")
def various() -> Sequence[Plan]:
    """Plans that between them go through whatever may depend on an order: copies restored, tasks deleted."""
    return [
        plan.draw(0, Kind.SOLO),
        _first(f"fault {FaultKind.ETCD_RESTORED}", lambda one: _strikes(one, FaultKind.ETCD_RESTORED)),
        _first(f"fault {FaultKind.STORE_FELL_BACK}", lambda one: _strikes(one, FaultKind.STORE_FELL_BACK)),
        _first("purged", lambda one: one.setup.retention < bounds.MINUTE),
    ]


def test_a_run_is_the_same_in_another_process_whatever_hashes_are_there(various: Sequence[Plan]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")])}
    names = [name for one in various for name in (one.setup.kind, str(one.seed))]
    replays = {
        subprocess.run(
            [sys.executable, "-c", _REPLAY_CODE, *names],
            env={**environment, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "4711")
    }
    assert len(replays) == 1
    assert len(replays.pop().splitlines()) == len(various)


def test_a_run_is_the_same_whether_it_is_traced_or_not(various: Sequence[Plan]) -> None:
    for one in various:
        quiet, verbose = world.run(one), world.run(one, is_verbose=True)
        assert (quiet.digest, quiet.records) == (verbose.digest, verbose.records)
        assert (quiet.coverage, quiet.simulated) == (verbose.coverage, verbose.simulated)
        assert verbose.trace


def replayed(kind: str, seed: int) -> str:
    """Sum up all that can be seen of a run: what ran when, what was said and done, and how every task ended."""
    result = world.run(plan.draw(seed, Kind(kind)), is_verbose=True)
    seen = blake2b("\n".join((*result.trace, *map(repr, result.records))).encode()).hexdigest()
    return f"{kind} {seed}: {result.steps} {result.digest:x} {seen}"


def _first(wanted: str, is_possible: Callable[[Plan], bool]) -> Plan:
    """Return the first plan in which something happens, of those in which it may."""
    plans = (one for one in map(plan.draw, count()) if is_possible(one))
    return next(one for one in plans if world.run(one).coverage[wanted])


def _strikes(one: Plan, kind: FaultKind) -> bool:
    return any(fault.kind is kind for fault in one.faults)
