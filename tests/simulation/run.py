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
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import active_children
from types import FrameType
from typing import Final, Never

from simulation import arguments, coverage, plan, shrink, trace, world
from simulation.history import Violation
from simulation.plan import Kind

from duecourse.model import bounds

SEED_CPU_SECONDS: Final = 60
"""Most seeds take less than one. What takes so long goes round in circles."""
_CHUNK: Final = 8
INTERRUPTED: Final = 130
"""The exit code after Ctrl-C."""


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


def run_seeds(kind: Kind, seeds: Sequence[int], cpu_seconds: float = SEED_CPU_SECONDS) -> Tally:
    """Run some seeds of a kind one after another. One that comes to no end ends the process."""
    tally = Tally()
    began = time.process_time()
    for seed in seeds:
        result = _run_limited(plan.draw(seed, kind), cpu_seconds)
        tally.seeds += 1
        tally.counted += result.counts
        tally.steps += result.steps
        tally.simulated += result.simulated
        tally.coverage += result.coverage
        if result.violations:
            tally.failures.append((seed, str(result.violations[0])))
    tally.cpu_seconds = time.process_time() - began
    return tally


def _run_limited(wanted: plan.Plan, cpu_seconds: float = SEED_CPU_SECONDS, *, is_verbose: bool = False) -> world.Result:
    """Run a plan. One that comes to no end ends this process, since nothing can be relied on in the middle of it."""

    def give_up(_: int, frame: FrameType | None) -> Never:
        replay = f"poe simulate --kind {wanted.setup.kind} --seeds {wanted.seed} --trace"
        print(f"{replay}: comes to no end within {cpu_seconds} s of CPU, and was here:", file=sys.stderr)
        traceback.print_stack(frame)
        sys.stderr.flush()
        os._exit(1)

    signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
    try:
        return world.run(wanted, is_verbose=is_verbose)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


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
    is_broken = is_interrupted = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for part in _run_everywhere(given.kind, seeds, given.jobs):
            tally.add(part)
            for seed, text in part.failures:
                print(f"seed {seed}: {text}", file=sys.stderr, flush=True)
            _show_progress(tally, len(seeds))
            if len(tally.failures) >= given.stop_after:
                break
    except KeyboardInterrupt:
        is_interrupted = True
        print("interrupted: what had begun is not told", file=sys.stderr)
    except BrokenProcessPool:
        is_broken = True
        print("broken off, since a process ended in the middle of a seed", file=sys.stderr)
    _report(given.kind, tally)
    if is_interrupted:
        return INTERRUPTED
    return 1 if is_broken or tally.failures or tally.lost(given.kind) else 0


def _run_everywhere(kind: Kind, seeds: Sequence[int], jobs: int) -> Iterator[Tally]:
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    # Also a single one: a run that is interrupted in the middle leaves coroutines that complain.
    with ProcessPoolExecutor(jobs, initializer=_leave_signals_to_the_parent) as pool:
        running = [pool.submit(run_seeds, kind, chunk) for chunk in chunks]
        try:
            for done in as_completed(running):
                yield done.result()
        finally:
            # Once is enough: another interrupt would only disturb the end.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                child.terminate()


def _leave_signals_to_the_parent() -> None:
    """Let it end its children itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _replay(wanted: plan.Plan, *, is_shrunk: bool, shows_all: bool) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if is_shrunk:
        wanted = shrink.shrink(wanted, _first_violation, lambda text: print(text, file=sys.stderr, flush=True))
    result = _run_limited(wanted, is_verbose=True)
    print("\n".join(trace.readable(result, _commit(), shows_all=shows_all)))
    return 1 if result.violations else 0


def _first_violation(wanted: plan.Plan) -> Violation | None:
    """Run a plan in a process of its own, which a smaller plan that comes to no end may end."""
    with ProcessPoolExecutor(1, initializer=_leave_signals_to_the_parent) as pool:
        try:
            return pool.submit(_violation_of, wanted).result()
        except BrokenProcessPool:
            return Violation("L1", "it comes to no end", 0, None)


def _violation_of(wanted: plan.Plan) -> Violation | None:
    return next(iter(_run_limited(wanted).violations), None)


def _show_progress(tally: Tally, wanted: int) -> None:
    if sys.stderr.isatty() or tally.seeds % (25 * _CHUNK) < _CHUNK:
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{tally.seeds} of {wanted} seeds, {len(tally.failures)} failed", end=end, file=sys.stderr, flush=True)


def _report(kind: Kind, tally: Tally) -> None:
    rate = tally.steps / max(tally.cpu_seconds, 1e-9)
    print(
        f"{tally.seeds} seeds, {tally.counted} of them counted; {tally.steps} events,"
        f" {tally.simulated / bounds.MINUTE:.0f} simulated minutes; {rate:.0f} events a second on one core"
    )
    if tally.seeds >= coverage.ENOUGH_SEEDS:
        print(f"not seen: {', '.join(coverage.missing(kind, tally.coverage)) or 'nothing'}")
    if lost := tally.lost(kind):
        print(f"SO MANY SEEDS SHOULD HAVE SEEN MORE: {', '.join(lost)}")
    for seed, text in sorted(tally.failures):
        print(f"seed {seed} at commit {_commit()}: {text}")
        print(f"    poe simulate --kind {kind} --seeds {seed} --trace --shrink")


def _commit() -> str:
    changed = " with uncommitted changes"
    describe = ["git", "describe", "--always", f"--dirty={changed}"]
    found = subprocess.run(describe, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
