"""Whole clusters from seeds: those that found something once, and as many others as there is time for."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Final

import pytest
from simulation import part, plan, world
from simulation.plan import FaultKind, Kind, Plan
from simulation.run import Tally
from simulation.seeds import FOUND, Found

from duecourse.model import bounds

_TESTS: Final = Path(__file__).parent.parent
_PARTS: Final = {Kind.CLUSTER: 16, Kind.SOLO: 4}
_SEEDS_OF_A_PART: Final = 125
_PART_SECONDS: Final = 1.5 * part.LONGEST / bounds.SECOND
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


@pytest.mark.timeout(_PART_SECONDS)
@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind, parts in _PARTS.items() for at in range(parts)])
def test_no_seed_breaks_a_promise(kind: Kind, at: int, record_property: Callable[[str, object], None]) -> None:
    ran = _run("-m", "simulation.part", kind, f"{at * _SEEDS_OF_A_PART}:{(at + 1) * _SEEDS_OF_A_PART}")
    tally = Tally(**json.loads(ran.stdout))
    assert not tally.failures
    assert tally.counted
    # What all parts together have seen is held against what they should have, in `tests/conftest.py`.
    record_property(f"simulated {kind}", json.dumps({"seeds": tally.seeds, "counted": tally.counted, **tally.coverage}))


def test_a_node_goes_on_with_its_own_term_in_a_store_that_fell_back() -> None:
    result = world.run(plan.draw(42_274))
    assert not result.violations
    assert result.coverage["term resumed"]


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
    names = [name for one in various for name in (one.setup.kind, str(one.seed))]
    replays = {_run("-c", _REPLAY_CODE, *names, PYTHONHASHSEED=hash_seed).stdout for hash_seed in ("0", "4711")}
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


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in another process, which finds what tests share."""
    paths = os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )


def _first(wanted: str, is_possible: Callable[[Plan], bool]) -> Plan:
    """Return the first plan in which something happens, of those in which it may."""
    plans = (one for one in map(plan.draw, count()) if is_possible(one))
    return next(one for one in plans if world.run(one).coverage[wanted])


def _strikes(one: Plan, kind: FaultKind) -> bool:
    return any(fault.kind is kind for fault in one.faults)
