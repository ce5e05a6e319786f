"""Proves that planted faults are found: `python -m simulation.planted`, with `tests` on the path, or `poe planted`.

For each mutation the code is copied, changed, and run with one seed after another until one fails. How many it took is
told; a mutation that survives all seeds is named, and the exit code is 1.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from simulation.mutations import MUTATIONS, Mutation

_ROOT: Final = Path(__file__).parent.parent.parent
_SOURCES: Final = ("server", "worker", "client", "proto/gen")
_SEEDS_CODE: Final = """
import sys
from simulation import plan, world
for seed in range(int(sys.argv[1])):
    result = world.run(plan.draw(seed))
    if result.violations:
        print(seed + 1, result.violations[0])
        break
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant faults; returns the exit code."""
    parser = argparse.ArgumentParser(prog="simulation.planted", description="Plant faults and see them found.")
    parser.add_argument("--seeds", type=int, default=2_000, help="give up after so many seeds (default: 2000)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--only", default="", help="only mutations whose name contains this")
    given = parser.parse_args(arguments)
    wanted = [mutation for mutation in MUTATIONS if given.only in mutation.name]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, len(wanted), given.jobs):
            together = wanted[start : start + given.jobs]
            running = [
                _start(mutation, Path(folder) / str(start + at), given.seeds) for at, mutation in enumerate(together)
            ]
            for mutation, process in zip(together, running, strict=True):
                found, errors = process.communicate()
                survivors += not found
                seeds, _, violation = found.strip().partition(" ")
                told = (
                    f"found by seed {seeds}: {violation[:90]}"
                    if found
                    else f"SURVIVES {given.seeds} seeds {errors[-200:]}"
                )
                print(f"{mutation.name:60} {told}", flush=True)
    print(f"{len(wanted) - survivors} of {len(wanted)} planted faults were found")
    return 1 if survivors else 0


def _start(mutation: Mutation, folder: Path, seeds: int) -> "subprocess.Popen[str]":
    for source in _SOURCES:
        shutil.copytree(_ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(_ROOT / "tests" / "simulation", folder / "tests" / "simulation")
    path = folder / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.before) != 1:
        raise SystemExit(f"{mutation.name}: its text occurs {text.count(mutation.before)} times in {mutation.file}")
    path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    paths = [str(folder / source) for source in (*_SOURCES, "tests")]
    return subprocess.Popen(
        [sys.executable, "-c", _SEEDS_CODE, str(seeds)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    sys.exit(main())
