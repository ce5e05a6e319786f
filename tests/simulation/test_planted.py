"""Faults can be planted where it says, and what comes of them is told apart."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from simulation.mutations import MUTATIONS, Mutation
from simulation.plan import Kind
from simulation.planted import ROOT, Outcome, try_out
from simulation.seeds import FOUND

_HARMLESS: Final = Mutation("nothing", "pyproject.toml", "[project]", "[project]")
_FOUND_BY_ONE: Final = Mutation(
    "found by seed 1",
    "tests/simulation/world.py",
    "            world.loop.run(world.live())\n",
    "            world.loop.run(world.live())\n"
    "            if plan.seed == 1:\n"
    "                world.checker.fail('S1', 'it was planted')\n",
)
_UNUSABLE: Final = Mutation(
    "no line of the language", "client/duecourse/model/bounds.py", "MINUTE: Final = ", "MINUTE Final "
)
_BLIND: Final = (Kind.SOLO, 0)
_FINDER: Final = (Kind.SOLO, 1)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_can_be_planted_in_one_place_and_changes_it(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.before) == 1
    assert mutation.before != mutation.after


def test_mutations_differ_in_their_names_and_seeds_that_found_something_name_one() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
    assert {found.mutation for found in FOUND} <= set(names)


def test_what_breaks_a_promise_is_found_and_what_breaks_none_survives(tmp_path: Path) -> None:
    outcome, told = try_out(_FOUND_BY_ONE, tmp_path / "copy", [], [_BLIND, _FINDER])
    assert outcome is Outcome.FOUND, told
    outcome, told = try_out(_HARMLESS, tmp_path / "copy", [], [_FINDER])
    assert outcome is Outcome.SURVIVED, told


def test_a_fault_that_its_recorded_seeds_find_no_more_survives_whatever_others_find(tmp_path: Path) -> None:
    outcome, told = try_out(_FOUND_BY_ONE, tmp_path / "copy", [_BLIND, _FINDER], [])
    assert outcome is Outcome.FOUND, told
    outcome, told = try_out(_FOUND_BY_ONE, tmp_path / "copy", [_BLIND], [_FINDER])
    assert outcome is Outcome.SURVIVED, told
    assert "solo 1" in told


@pytest.mark.parametrize("why", ["", "it is known"])
@pytest.mark.parametrize("mutation", [_UNUSABLE, replace(_HARMLESS, before="nowhere in this file")])
def test_what_cannot_be_planted_or_run_is_broken_whatever_was_expected(
    mutation: Mutation, why: str, tmp_path: Path
) -> None:
    outcome, told = try_out(replace(mutation, why_not_found=why), tmp_path / "copy", [], [_BLIND])
    assert outcome is Outcome.BROKEN, told
