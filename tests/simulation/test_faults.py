"""What a run's faults strike, and when: else its seeds would show less than they seem to."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest
from simulation import plan, world
from simulation.loop import SimulationLoop
from simulation.plan import CLUSTER_MOMENTS, SOLO_MOMENTS, FaultKind, FaultPlan, Kind
from simulation.wire import Weather

from duecourse.model import bounds

_STRIKE: Final = re.compile(r"strikes: .*, at '(?P<moment>.*)' of (?P<host>.*)#")
_SEEDS: Final = 6
_MOST_SEEDS: Final = 60


def _fault(kind: FaultKind, moment: str | None, at: int = 3 * bounds.SECOND) -> FaultPlan:
    return FaultPlan(at=at, kind=kind, target=0, duration=bounds.SECOND, moment=moment, reaction=0)


def _struck(faults: Sequence[FaultPlan], seed: int, kind: Kind = Kind.CLUSTER) -> tuple[list[tuple[str, str]], str]:
    """Return the moments at which faults struck, with the hosts that went through them, and all of the trace."""
    result = world.run(replace(plan.draw(seed, kind), faults=faults), is_verbose=True)
    assert not result.violations
    trace = "\n".join(result.trace)
    return [(found["moment"], found["host"]) for found in _STRIKE.finditer(trace)], trace


@pytest.mark.parametrize(("kind", "moments"), [(Kind.SOLO, SOLO_MOMENTS), (Kind.CLUSTER, CLUSTER_MOMENTS)])
def test_every_moment_that_a_fault_may_wait_for_does_come(kind: Kind, moments: Sequence[str]) -> None:
    missing = set(moments)
    for seed in range(_MOST_SEEDS):
        # Some moments come only where something has gone wrong before.
        drawn = [replace(fault, moment=None) for fault in plan.draw(seed, kind).faults]
        jumps = [
            _fault(FaultKind.CLOCK_JUMP, moment, at * bounds.SECOND)
            for moment in sorted(missing)
            for at in range(3, 20)
        ]
        struck, _ = _struck([*drawn, *(replace(jump, target=3) for jump in jumps)], seed, kind)
        missing -= {moment for moment, _ in struck}
        if not missing:
            return
    pytest.fail(f"never came: {missing}")


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_a_fault_at_a_moment_strikes_the_node_that_goes_through_it(seed: int) -> None:
    struck, trace = _struck([_fault(FaultKind.NODE_LOST, "commit applied")], seed)
    [(_, host)] = struck
    assert re.findall(r"(\w+)#2 +starts", trace) == [host]


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_a_worker_dies_at_its_own_moments_only(seed: int) -> None:
    struck, trace = _struck([_fault(FaultKind.WORKER_CRASH, "outcome said")], seed)
    assert struck == [("outcome said", "worker0")]
    assert re.findall(r"(\w+)#2 +starts\n", trace + "\n") == ["worker0"]


def test_a_cluster_without_faults_counts_no_change_of_leader() -> None:
    result = world.run(replace(plan.draw(3), faults=()))
    assert not result.changes_of_leader
    assert not result.counts


def test_what_two_faults_have_blocked_gets_through_when_both_are_over() -> None:
    weather = Weather(SimulationLoop(1), 1)  # type: ignore[abstract]
    both = [("a", "b"), ("b", "a")]
    assert weather.part(both)
    assert weather.part([("a", "b"), ("a", "c")])
    assert not weather.part(both)
    weather.rejoin(both)
    assert weather.is_blocked("a", "b")
    assert not weather.is_blocked("b", "a")
    weather.rejoin([("a", "b"), ("a", "c")])
    assert not weather.is_blocked("a", "b")
