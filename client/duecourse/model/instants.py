"""Instants and durations as Duecourse counts them: integer microseconds, UTC."""

from dataclasses import dataclass

Micros = int


@dataclass(frozen=True, slots=True)
class Now:
    """One reading of the clock.

    `earliest` and `latest` bound the cluster clock, microseconds since 1970 UTC: only `run_at`, due times, deadlines
    and retention are held against them, and a task is due when `earliest` has reached its due time. `elapsed` counts
    microseconds that passed on this machine, suspends included, from an arbitrary zero: leases, heartbeats and
    timeouts use only this one.
    """

    earliest: Micros
    latest: Micros
    elapsed: Micros
