"""Proves that planted faults are found: `python -m simulation.planted`, with `tests` on the path, or `poe planted`.

For each mutation the code is copied, changed, and run with one seed after another until one fails. How many it took is
told; a mutation that survives all seeds is named, and the exit code is 1. One of which it is known why it is not found
gets as many seeds as most of the others need, to see that this is still true.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from simulation.mutations import MUTATIONS, Mutation
from simulation.plan import Kind

_ROOT: Final = Path(__file__).parent.parent.parent
_SOURCES: Final = ("server", "worker", "client", "proto/gen")
_NOTHING: Final = Mutation("nothing, to compare with", "pyproject.toml", "[project]", "[project]")
_SEEDS_OF_SURVIVORS: Final = 200
_SEEDS_CODE: Final = """
import sys
from simulation import plan, world
for number in range(int(sys.argv[1])):
    kinds = [plan.Kind(name) for name in sys.argv[2:]]
    kind, seed = kinds[number % len(kinds)], number // len(kinds)
    result = world.run(plan.draw(seed, kind))
    if result.violations:
        print(f"{number + 1} ({kind} {seed})", result.violations[0])
        break
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant faults; returns the exit code."""
    parser = argparse.ArgumentParser(prog="simulation.planted", description="Plant faults and see them found.")
    parser.add_argument("--seeds", type=int, default=2_000, help="give up after so many seeds (default: 2000)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--kind", type=Kind, choices=list(Kind), help="of cluster (default: both by turns)")
    parser.add_argument("--only", default="", help="only mutations whose name contains this")
    given = parser.parse_args(arguments)
    # Without a fault nothing may be found: else it would prove nothing that something is.
    kinds = [given.kind] if given.kind else list(Kind)
    wanted = [_NOTHING, *(mutation for mutation in MUTATIONS if given.only in mutation.name)]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        tries = [
            pool.submit(_try, mutation, Path(folder) / str(number), _seeds(mutation, given.seeds), kinds)
            for number, mutation in enumerate(wanted)
        ]
        for mutation, tried in zip(wanted, tries, strict=True):
            is_found, told = tried.result()
            survives = _is_to_survive(mutation)
            survivors += is_found is survives
            print(f"{mutation.name:62} {told}", flush=True)
    print(f"{len(wanted) - survivors} of {len(wanted)} came out as they should")
    return 1 if survivors else 0


def _is_to_survive(mutation: Mutation) -> bool:
    return mutation is _NOTHING or bool(mutation.why_not_found)


def _seeds(mutation: Mutation, most: int) -> int:
    return min(most, _SEEDS_OF_SURVIVORS) if _is_to_survive(mutation) else most


def _try(mutation: Mutation, folder: Path, seeds: int, kinds: Sequence[Kind]) -> tuple[bool, str]:
    """Plant a fault in a copy, and run seeds until one finds it."""
    for source in _SOURCES:
        shutil.copytree(_ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(_ROOT / "tests" / "simulation", folder / "tests" / "simulation")
    shutil.copy(_ROOT / "pyproject.toml", folder)
    path = folder / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.before) != 1:
        return False, f"cannot be planted: its text occurs {text.count(mutation.before)} times in {mutation.file}"
    path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    paths = [str(folder / source) for source in (*_SOURCES, "tests")]
    ran = subprocess.run(
        [sys.executable, "-c", _SEEDS_CODE, str(seeds), *kinds],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    shutil.rmtree(folder)
    if ran.returncode:
        return False, f"broke the simulation: {ran.stderr[-200:]}"
    tried, _, violation = ran.stdout.strip().partition(") ")
    if not tried:
        return False, f"SURVIVES {seeds} seeds" + (f": {mutation.why_not_found}" if mutation.why_not_found else "")
    return True, f"found by seed {tried}): {violation[:90]}"


if __name__ == "__main__":
    sys.exit(main())
