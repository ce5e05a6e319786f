"""What a bench reports: the metrics and their units, medians of repeats, the table, and the JSON object."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.table import Table

from duecourse.cli import distribution
from duecourse.cli.distribution import Distribution
from duecourse.model import bounds

UNITS: Final[dict[str, str]] = {
    "submit_batch_per_s": "tasks/s",
    "submit_single_per_s": "tasks/s",
    "drain_per_s": "tasks/s",
    "live_per_s": "tasks/s",
    "cpu_us_per_task": "us",
    "lateness_p50_ms": "ms",
    "lateness_p99_ms": "ms",
    "lateness_max_ms": "ms",
    "early": "tasks",
    "lost": "tasks",
    "rss_mb": "MB",
    "ready_s": "s",
}
WORST_COUNTS: Final = frozenset(("early", "lost"))
"""Broken promises: a median would hide one, so the worst repeat is reported."""


@dataclass(slots=True)
class Figures:
    """What one repeat measured."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Only names of UNITS."""
    details: dict[str, object] = field(default_factory=dict)

    def add_lateness(self, lateness: Distribution) -> None:
        """Set the three lateness metrics, if anything was measured."""
        if len(lateness):
            self.metrics["lateness_p50_ms"] = lateness.quantile(0.5) / bounds.MILLISECOND
            self.metrics["lateness_p99_ms"] = lateness.quantile(0.99) / bounds.MILLISECOND
            self.metrics["lateness_max_ms"] = lateness.longest / bounds.MILLISECOND


def merge(repeats: Sequence[Figures]) -> dict[str, float]:
    """Return each metric's median over the repeats that have it; of counts of broken promises the worst."""
    merged = {}
    for name in UNITS:
        measured = [one.metrics[name] for one in repeats if name in one.metrics]
        if measured:
            value = max(measured) if name in WORST_COUNTS else distribution.median(measured)
            merged[name] = int(value) if name in WORST_COUNTS else _round(value)
    return merged


def show(console: Console, title: str, repeats: Sequence[Figures]) -> None:
    """Print the table: the median, and what each repeat measured if there are several."""
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    table = Table()
    table.add_column("metric")
    table.add_column("median" if len(repeats) > 1 else "measured", justify="right")
    table.add_column("unit")
    if len(repeats) > 1:
        table.add_column("repeats", justify="right")
    for name, value in merge(repeats).items():
        row = [name, f"{value:,}", UNITS[name]]
        if len(repeats) > 1:
            row.append(", ".join(f"{_round(one.metrics[name]):,}" for one in repeats if name in one.metrics))
        table.add_row(*row)
    console.print(table)
    for name, detail in repeats[-1].details.items():
        console.print(f"  {name}: {_for_people(detail)}", highlight=False, markup=False, soft_wrap=True)


def as_object(
    bench: str, machine: dict[str, object], parameters: dict[str, object], repeats: Sequence[Figures]
) -> dict[str, object]:
    """Return the object that ends the output with `--json`."""
    return {
        "bench": bench,
        "machine": machine,
        "metrics": merge(repeats),
        "parameters": parameters,
        "repeats": [{"metrics": one.metrics, "details": one.details} for one in repeats],
    }


def _round(value: float) -> float:
    """Keep what a measurement can tell: whole numbers from 100, else three digits."""
    return round(value) if abs(value) >= 100 else float(f"{value:.3g}")


def _for_people(detail: object) -> str:
    if isinstance(detail, dict):
        return ", ".join(f"{name} {_for_people(value)}" for name, value in detail.items())
    return f"{_round(detail):,}" if isinstance(detail, int | float) else str(detail)
