"""Runs seeds: `python -m simulation.run --seeds 0:2000`, with `tests` on the path, or `poe simulate --seeds 0:2000`.

All cores are used, and progress is shown. A seed that fails is named with the commit that it failed on, and a command
that replays it with its trace and, if asked to, shrinks its plan. At the end: how much was run, and what of all that
can happen did not, which fails the run if the seeds were many enough to see everything.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Final

from simulation import arguments, coverage, plan, shrink, trace, world
from simulation.plan import Kind

from duecourse.timing.clock import SystemClock

_CHUNK: Final = 8
INTERRUPTED: Final = 130
"""The exit code after Ctrl-C."""
_clock = SystemClock()


@dataclass(slots=True)
class Tally:
    """What came of a number of seeds."""

    seeds: int = 0
    counted: int = 0
    steps: int = 0
    simulated: int = 0
    cpu_seconds: float = 0.0
    coverage: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add what came of others."""
        self.seeds += other.seeds
        self.counted += other.counted
        self.steps += other.steps
        self.simulated += other.simulated
        self.cpu_seconds += other.cpu_seconds
        self.coverage += other.coverage
        self.failures += other.failures

    def lost(self, kind: Kind) -> list[str]:
        """Return what seeds of a kind should have seen and did not, if there were enough of them."""
        return coverage.lost(kind, self.seeds, self.counted, self.coverage)


def run_seeds(kind: Kind, seeds: Sequence[int]) -> Tally:
    """Run some seeds of a kind one after another."""
    tally = Tally()
    began = time.process_time()
    for seed in seeds:
        result = world.run(plan.draw(seed, kind))
        tally.seeds += 1
        tally.counted += result.counts
        tally.steps += result.steps
        tally.simulated += result.simulated
        tally.coverage += result.coverage
        if result.violations:
            tally.failures.append((seed, str(result.violations[0])))
    tally.cpu_seconds = time.process_time() - began
    return tally


def main(given_arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="simulation.run", description="Run the simulation.")
    parser.add_argument(
        "--seeds",
        type=arguments.seeds,
        default="0:2000",
        help="one seed, or a range FROM:UNTIL (default: 0:2000); 500 or more fail if all that can happen was not seen",
    )
    parser.add_argument("--kind", type=arguments.kind, default=Kind.CLUSTER, help="cluster or solo (default: cluster)")
    parser.add_argument(
        "--jobs", type=arguments.positive, default=os.cpu_count() or 1, help="processes (default: one a core)"
    )
    parser.add_argument("--trace", action="store_true", help="run one seed and show what happened")
    parser.add_argument("--all", action="store_true", help="with --trace: show everything")
    parser.add_argument("--shrink", action="store_true", help="with --trace: leave out what the failure does not need")
    parser.add_argument(
        "--stop-after", type=arguments.positive, default=10, help="give up after so many failures (default: 10)"
    )
    given = parser.parse_args(given_arguments)
    seeds = given.seeds
    if (given.all or given.shrink) and not given.trace:
        parser.error("--all and --shrink go with --trace")
    if given.trace and len(seeds) > 1:
        parser.error("--trace shows one seed")
    if given.trace:
        return _replay(plan.draw(seeds[0], given.kind), is_shrunk=given.shrink, shows_all=given.all)
    tally = Tally()
    try:
        for part in _run_everywhere(given.kind, seeds, given.jobs):
            tally.add(part)
            for seed, text in part.failures:
                print(f"seed {seed}: {text}", file=sys.stderr, flush=True)
            _show_progress(tally, len(seeds))
            if len(tally.failures) >= given.stop_after:
                break
    except KeyboardInterrupt:
        _report(given.kind, tally)
        return INTERRUPTED
    _report(given.kind, tally)
    return 1 if tally.failures or tally.lost(given.kind) else 0


def _run_everywhere(kind: Kind, seeds: Sequence[int], jobs: int) -> Iterator[Tally]:
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    # Also a single one: a run that is interrupted in the middle leaves coroutines that complain.
    with ProcessPoolExecutor(jobs, initializer=_ignore_interrupts) as pool:
        running = [pool.submit(run_seeds, kind, chunk) for chunk in chunks]
        try:
            for done in as_completed(running):
                yield done.result()
        finally:
            # Not waiting for the rest would leave an executor that breaks when the interpreter ends.
            pool.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    """Leave it to the parent, which waits for what has begun."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _replay(wanted: plan.Plan, *, is_shrunk: bool, shows_all: bool) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if is_shrunk:
        wanted = shrink.shrink(wanted, lambda text: print(text, file=sys.stderr))
    result = world.run(wanted, is_verbose=True)
    print("\n".join(trace.readable(result, shows_all=shows_all)))
    return 1 if result.violations else 0


def _show_progress(tally: Tally, wanted: int) -> None:
    if sys.stderr.isatty() or tally.seeds % (25 * _CHUNK) < _CHUNK:
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{tally.seeds} of {wanted} seeds, {len(tally.failures)} failed", end=end, file=sys.stderr, flush=True)


def _report(kind: Kind, tally: Tally) -> None:
    rate = tally.steps / max(tally.cpu_seconds, 1e-9)
    print(
        f"{tally.seeds} seeds, {tally.counted} of them counted; {tally.steps} events,"
        f" {tally.simulated / 3_600_000_000:.1f} simulated hours; {rate:.0f} events a second on one core"
    )
    print(f"not seen: {', '.join(coverage.missing(kind, tally.coverage)) or 'nothing'}")
    if lost := tally.lost(kind):
        print(f"SO MANY SEEDS SHOULD HAVE SEEN MORE: {', '.join(lost)}")
    for seed, text in sorted(tally.failures):
        print(f"seed {seed} at commit {_commit()}: {text}")
        print(f"    poe simulate --kind {kind} --seeds {seed} --trace --shrink")


def _commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
