"""Writes the demonstration's verdict, for people and as JSON."""

from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from duecourse.cli.demo.evidence import Repeat, Verdict
from duecourse.cli.distribution import Distribution, histogram
from duecourse.model import bounds
from duecourse.model.instants import Micros

_SHOWN: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """What was done to the scheduler. Instants are microseconds since 1970 UTC."""

    killed_at: Micros
    serving_at: Micros
    over_at: Micros
    """When the worker was connected again, or the nodes that were left led all shards."""
    is_partial: bool = False
    """Other nodes went on with the shards that they led."""

    @property
    def gone_seconds(self) -> float:
        """How long it did not serve."""
        return (self.serving_at - self.killed_at) / bounds.SECOND

    @property
    def outage_seconds(self) -> float:
        """How long no task could be started."""
        return (self.over_at - self.killed_at) / bounds.SECOND


def show(console: Console, verdict: Verdict, outage: Outage) -> None:
    """Print the table, the histogram and, should there be any, what was broken."""
    table = Table(show_header=False, title="What the worker's file says", title_justify="left", min_width=60)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("submitted", f"{verdict.submitted:,}")
    table.add_row("run", f"{verdict.run:,}")
    table.add_row("lost", *_bad(len(verdict.lost)))
    table.add_row("before their time", *_bad(len(verdict.early)))
    allowed = sum(repeat.is_allowed for repeat in verdict.repeats)
    table.add_row("run more than once", *_bad(len(verdict.repeats) - allowed, allowed))
    if verdict.unknown:
        table.add_row("run, but never submitted", *_bad(len(verdict.unknown)))
    if outage.is_partial:
        table.add_row("some shards without a leader for", f"{outage.outage_seconds:.2f} s")
    else:
        gone = f"{outage.gone_seconds:.2f} / {outage.outage_seconds:.2f} s"
        table.add_row("scheduler gone / no task started for", gone)
    table.add_section()
    table.add_row("lateness p50 / p95 / p99 / max", _quantiles(verdict.lateness))
    table.add_row("of those the outage did not touch", _quantiles(verdict.lateness_in_service))
    console.print(table)
    console.print("Lateness (handler start minus run_at):", highlight=False)
    for line in histogram(verdict.lateness):
        console.print(line, highlight=False)
    _explain(console, verdict)
    if verdict.is_kept:
        console.print("All promises kept.", style="bold green")
    else:
        console.print("A promise was broken: see above.", style="bold red")


def as_object(verdict: Verdict, outage: Outage) -> dict[str, object]:
    """Return the verdict as it is printed with `--json`."""
    return {
        "is_kept": verdict.is_kept,
        "submitted": verdict.submitted,
        "run": verdict.run,
        "lost": list(verdict.lost),
        "early": [start._asdict() for start in verdict.early],
        "unknown": [start._asdict() for start in verdict.unknown],
        "repeats": [_repeat_object(repeat) for repeat in verdict.repeats],
        "scheduler_gone_s": round(outage.gone_seconds, 3),
        "outage_s": round(outage.outage_seconds, 3),
        "lateness_ms": _milliseconds(verdict.lateness),
        "lateness_outside_outage_ms": _milliseconds(verdict.lateness_in_service),
    }


def _bad(count: int, allowed: int = 0) -> tuple[str]:
    note = f" (and {allowed:,} allowed by a lost attempt)" if allowed else ""
    return (f"[bold red]{count:,}[/]{note}" if count else f"[green]0[/]{note}",)


def _quantiles(distribution: Distribution) -> str:
    if not len(distribution):
        return "-"
    figures = [distribution.quantile(share) / bounds.MILLISECOND for share in (0.5, 0.95, 0.99, 1)]
    return " / ".join(f"{figure:,.1f}" for figure in figures) + " ms"


def _milliseconds(distribution: Distribution) -> dict[str, float]:
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    if not len(distribution):
        return {}
    return {name: distribution.quantile(share) / bounds.MILLISECOND for name, share in shares.items()}


def _repeat_object(repeat: Repeat) -> dict[str, object]:
    return {
        "task_id": repeat.task_id,
        "is_allowed": repeat.is_allowed,
        "starts": [
            {"attempt": start.attempt, "at": start.at, "outcome": outcome}
            for start, outcome in zip(repeat.starts, repeat.outcomes, strict=True)
        ],
    }


def _explain(console: Console, verdict: Verdict) -> None:
    lines = [f"lost: {task_id}" for task_id in verdict.lost]
    lines += [f"early: {start.task_id}, attempt {start.attempt}, at {start.at}" for start in verdict.early]
    lines += [f"never submitted: {start.task_id}" for start in verdict.unknown]
    for repeat in verdict.repeats:
        told = ", ".join(
            f"attempt {start.attempt} ({outcome})"
            for start, outcome in zip(repeat.starts, repeat.outcomes, strict=True)
        )
        lines.append(f"repeated, {'allowed' if repeat.is_allowed else 'NOT allowed'}: {repeat.task_id}: {told}")
    for line in lines[:_SHOWN]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if len(lines) > _SHOWN:
        console.print(f"... and {len(lines) - _SHOWN:,} more: --json shows all")
