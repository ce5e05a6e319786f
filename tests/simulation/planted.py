"""Proves that planted faults are found: `python -m simulation.planted`, with `tests` on the path, or `poe planted`.

For each mutation the code is copied, changed, and run with one seed after another until one fails: first the seeds that
are recorded for it (`seeds.FOUND`), one of which has to find it, then others. How many it took is told. A mutation that
survives all seeds is wrong, and so is one that is found although it is known why it should not be; such ones get as
many seeds as most of the others need. What cannot be planted, breaks the simulation itself, or comes to no end in time
proves nothing, and is wrong whatever was expected of it. If anything is, the exit code is 1.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from enum import StrEnum
from pathlib import Path
from typing import Final

from simulation import arguments
from simulation.mutations import MUTATIONS, Mutation
from simulation.plan import Kind
from simulation.run import INTERRUPTED
from simulation.seeds import FOUND

ROOT: Final = Path(__file__).parent.parent.parent
_SOURCES: Final = ("server", "worker", "client", "proto/gen")
_NOTHING: Final = Mutation("the code unchanged, as a control", "pyproject.toml", "[project]", "[project]")
_SEEDS_OF_SURVIVORS: Final = 100
_MINUTES: Final = 60
"""What a mutation gets: one that has the simulation go round in circles would never come to an end."""
_SEEDS_CODE: Final = """
import sys
from simulation import plan, world
for line in sys.stdin:
    kind, seed = line.split()
    print(kind, seed, flush=True)
    result = world.run(plan.draw(int(seed), plan.Kind(kind)))
    if result.violations:
        print("broken:", *str(result.violations[0]).split())
        break
"""
"""Tells each seed before it runs it, so that of what came to no end it is known where."""

Seed = tuple[Kind, int]


class Outcome(StrEnum):
    """What came of a planted fault."""

    FOUND = "found"
    SURVIVED = "survived"
    BROKEN = "broken"
    """It could not be tried to the end."""


def main(given_arguments: Sequence[str] | None = None) -> int:
    """Plant faults; returns the exit code."""
    parser = argparse.ArgumentParser(prog="simulation.planted", description="Plant faults and see them found.")
    parser.add_argument(
        "--seeds",
        type=arguments.positive,
        default=2_000,
        help=f"give up after so many seeds (default: 2000); known survivors get {_SEEDS_OF_SURVIVORS} at most",
    )
    parser.add_argument(
        "--jobs", type=arguments.positive, default=os.cpu_count() or 1, help="processes (default: one a core)"
    )
    parser.add_argument("--kind", type=arguments.kind, help="cluster or solo (default: both by turns)")
    parser.add_argument(
        "--only", default="", help="only faults whose name contains this (and always the code unchanged, as a control)"
    )
    given = parser.parse_args(given_arguments)
    if not any(given.only in mutation.name for mutation in MUTATIONS):
        parser.error(f"no mutation's name contains {given.only!r}")
    # Without a fault nothing may be found: else it would prove nothing that something is.
    kinds = [given.kind] if given.kind else list(Kind)
    wanted = [_NOTHING, *(mutation for mutation in MUTATIONS if given.only in mutation.name)]
    outcomes: Counter[Outcome] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        tries = {
            pool.submit(
                try_out, mutation, Path(folder) / str(number), _recorded(mutation), _seeds(mutation, given.seeds, kinds)
            ): mutation
            for number, mutation in enumerate(wanted)
        }
        try:
            for number, tried in enumerate(as_completed(tries), start=1):
                mutation = tries[tried]
                outcome, told = tried.result()
                if mutation is not _NOTHING:
                    outcomes[outcome] += 1
                is_right = outcome is _expected(mutation)
                line = f"{mutation.name:69} {told}"
                if not is_right:
                    wrong.append(line)
                print(f"{number:3} of {len(wanted)} {'' if is_right else 'WRONG: '}{line}", flush=True)
        except KeyboardInterrupt:
            # What runs was interrupted as well.
            pool.shutdown(cancel_futures=True)
            return INTERRUPTED
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    print("\n".join([f"{len(wanted) - len(wrong)} of {len(wanted)} came out as they should", *wrong]))
    return 1 if wrong else 0


def _expected(mutation: Mutation) -> Outcome:
    return Outcome.SURVIVED if mutation is _NOTHING or mutation.why_not_found else Outcome.FOUND


def _recorded(mutation: Mutation) -> Sequence[Seed]:
    return [(found.kind, found.seed) for found in FOUND if found.mutation == mutation.name]


def _seeds(mutation: Mutation, most: int, kinds: Sequence[Kind]) -> Sequence[Seed]:
    count = min(most, _SEEDS_OF_SURVIVORS) if _expected(mutation) is Outcome.SURVIVED else most
    return [(kinds[number % len(kinds)], number // len(kinds)) for number in range(count)]


def try_out(mutation: Mutation, folder: Path, recorded: Sequence[Seed], others: Sequence[Seed]) -> tuple[Outcome, str]:
    """Plant a fault in a copy, and run its recorded seeds and others until one finds it.

    It survives if there are recorded seeds and none of them does; which other one does is told, to be recorded anew.
    """
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    if text.count(mutation.before) != 1:
        return Outcome.BROKEN, f"CANNOT BE PLANTED: its text occurs {text.count(mutation.before)} times"
    _copy(folder)
    (folder / mutation.file).write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    try:
        ran = _run(folder, [*recorded, *others])
    except subprocess.TimeoutExpired as expired:
        begun = (expired.stdout or b"").decode().splitlines()
        return Outcome.BROKEN, f"CAME TO NO END in {_MINUTES} minutes, at seed {len(begun)} ({''.join(begun[-1:])})"
    finally:
        shutil.rmtree(folder)
    if ran.returncode:
        return Outcome.BROKEN, f"BROKE THE SIMULATION: {ran.stderr[-200:]}"
    return _judge(mutation, len(recorded), ran.stdout.splitlines())


def _copy(folder: Path) -> None:
    for source in _SOURCES:
        shutil.copytree(ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "simulation", folder / "tests" / "simulation")
    shutil.copy(ROOT / "pyproject.toml", folder)


def _run(folder: Path, seeds: Sequence[Seed]) -> subprocess.CompletedProcess[str]:
    paths = [str(folder / source) for source in (*_SOURCES, "tests")]
    return subprocess.run(
        [sys.executable, "-c", _SEEDS_CODE],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        input="".join(f"{kind} {seed}\n" for kind, seed in seeds),
        capture_output=True,
        text=True,
        check=False,
        timeout=60 * _MINUTES,
    )


def _judge(mutation: Mutation, recorded: int, lines: Sequence[str]) -> tuple[Outcome, str]:
    """Tell what came of it from the seeds that were run, after the last of which the violation stands if any."""
    if not lines or not lines[-1].startswith("broken: "):
        why = f": {mutation.why_not_found}" if mutation.why_not_found else ""
        return Outcome.SURVIVED, f"SURVIVES {len(lines)} seeds{why}"
    *_, seed, violation = lines
    found = f"found by seed {len(lines) - 1} ({seed}): {violation.removeprefix('broken: ')[:90]}"
    if recorded and len(lines) - 1 > recorded:
        return Outcome.SURVIVED, f"SURVIVES ITS {recorded} RECORDED SEEDS, and is {found}"
    return Outcome.FOUND, found


if __name__ == "__main__":
    sys.exit(main())
