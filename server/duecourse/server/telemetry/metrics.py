"""Every metric of a node: its name, kind, labels and meaning, once.

Hot code adds to plain attributes of one `Metrics` object, all on the node's loop: no locks, no objects per event.
Prometheus families are made of them only when somebody reads `/metrics`. Gauges that cost something to know are
refreshed then, by `samplers`. Attributes count microseconds; a family whose name ends in `_seconds` shows seconds.
`docs/operations.md` explains each family, and a test compares.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import AttemptOutcome

_MS: Final = bounds.MILLISECOND
_LATENESS_BOUNDS: Final[tuple[Micros, ...]] = (
    500,
    *(
        n * _MS
        for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200, 250, 300, 400, 500)
    ),
    *(n * _MS for n in (750, 1_000, 1_500, 2_000, 3_000, 5_000, 7_500, 10_000, 15_000, 20_000, 30_000, 45_000, 60_000)),
)
_COMMIT_BOUNDS: Final[tuple[Micros, ...]] = (
    *(250, 500, 750),
    *(n * _MS for n in (1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 75, 100, 150, 250, 500, 1_000, 2_500, 5_000)),
)
_LAG_BOUNDS: Final[tuple[Micros, ...]] = tuple(
    n * _MS for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
)


class Histogram:
    """Counts of durations by size."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, upper_bounds: Sequence[Micros]) -> None:
        self.bounds = tuple(upper_bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total: Micros = 0

    def observe(self, micros: Micros) -> None:
        """Count one duration; a negative one counts as zero."""
        self.counts[bisect_left(self.bounds, micros)] += 1
        if micros > 0:
            self.total += micros

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield each bound, in seconds as Prometheus writes it, with how many durations do not exceed it."""
        reached = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            reached += count
            yield repr(bound / bounds.SECOND), reached
        yield "+Inf", reached + self.counts[-1]


class Metrics:
    """What a node counts. Readable and writable by everyone on the node's loop."""

    def __init__(self, *, node_id: str = "", version: str = "") -> None:
        self.node_id = node_id
        self.version = version
        self.samplers: list[Callable[[], None]] = []
        """Called before every read, to refresh gauges."""

        self.tasks_submitted = 0
        self.tasks_duplicate = 0
        self.tasks_refused = 0
        self.admission_refusals: Counter[str] = Counter()
        self.rpc_requests: Counter[tuple[str, str]] = Counter()
        """By (method, status code name), for example `("SubmitTask", "OK")`."""
        self.peer_calls: Counter[str] = Counter()

        self.grants = 0
        self.attempts_ended: Counter[str] = Counter({outcome.value: 0 for outcome in AttemptOutcome})
        self.lateness = Histogram(_LATENESS_BOUNDS)
        self.retry_lateness = Histogram(_LATENESS_BOUNDS)
        self.early_starts = 0

        self.commits = 0
        self.commit_rows = 0
        self.commit_seconds = Histogram(_COMMIT_BOUNDS)
        self.commit_answers: Counter[str] = Counter({"committed": 0, "stale": 0, "refused": 0, "unknown": 0})

        self.terms_begun = 0
        self.terms_ended: Counter[str] = Counter()
        self.loads: Counter[str] = Counter()
        self.audit_misses = 0
        self.corrupt_records = 0

        self.tasks_in_memory = 0
        self.leases = 0
        self.ready_tasks = 0
        self.oldest_ready_age: Micros = 0
        self.inbox_size = 0
        self.loop_lag = Histogram(_LAG_BOUNDS)

        self.clock_readings: Counter[str] = Counter({"followed": 0, "refused": 0, "failed": 0})
        self.clock_uncertainty: Micros = 0
        self.reference_offset: Micros = 0
        self.wall_clock_offset: Micros = 0

        self.worker_streams = 0
        self.credits = 0
        self.unknown_events = 0

        self._registry = CollectorRegistry()
        self._registry.register(_Collector(self))
        ProcessCollector(registry=self._registry)

    def observe_lateness(self, micros: Micros, is_retry: bool) -> None:
        """Count a handler's start so long after the latest of run_at, acceptance and last reschedule."""
        if micros < 0:
            self.early_starts += 1
        (self.retry_lateness if is_retry else self.lateness).observe(micros)

    def observe_commit(self, micros: Micros, rows: int) -> None:
        """Count a commit that was answered, however it was."""
        self.commits += 1
        self.commit_rows += rows
        self.commit_seconds.observe(micros)

    def render(self) -> bytes:
        """Write everything as Prometheus reads it."""
        for sample in self.samplers:
            sample()
        return generate_latest(self._registry)


class _Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_Value = int | Mapping[str, int] | Mapping[tuple[str, str], int] | Histogram


@dataclass(frozen=True, slots=True)
class Family:
    """A metric as Prometheus sees it."""

    name: str
    """Without the suffix `_total` of counters."""
    kind: _Kind
    help: str
    read: Callable[[Metrics], _Value]
    labels: tuple[str, ...] = ()


def _submissions(metrics: Metrics) -> Mapping[str, int]:
    return {
        "created": metrics.tasks_submitted,
        "duplicate": metrics.tasks_duplicate,
        "refused": metrics.tasks_refused,
    }


def _counter(name: str, meaning: str, read: Callable[[Metrics], _Value], *labels: str) -> Family:
    return Family(f"duecourse_{name}", _Kind.COUNTER, meaning, read, labels)


def _gauge(name: str, meaning: str, read: Callable[[Metrics], _Value]) -> Family:
    return Family(f"duecourse_{name}", _Kind.GAUGE, meaning, read)


def _histogram(name: str, meaning: str, read: Callable[[Metrics], _Value]) -> Family:
    return Family(f"duecourse_{name}", _Kind.HISTOGRAM, meaning, read)


FAMILIES: Final[tuple[Family, ...]] = (
    _counter("submissions", "Submitted tasks, by what became of them.", _submissions, "result"),
    _counter("admission_refusals", "Requests refused for overload, by limit.", lambda m: m.admission_refusals, "limit"),
    _counter("rpc_requests", "Calls and streams that ended, by status.", lambda m: m.rpc_requests, "method", "code"),
    _counter("peer_calls", "Calls to other nodes, by what became of them.", lambda m: m.peer_calls, "result"),
    _counter("grants", "Attempts granted to workers, durably.", lambda m: m.grants),
    _counter("attempts_ended", "Attempts ended, by outcome.", lambda m: m.attempts_ended, "outcome"),
    _histogram("lateness_seconds", "Handler start minus due time, first attempts of a round.", lambda m: m.lateness),
    _histogram("retry_lateness_seconds", "Handler start minus due time, retries.", lambda m: m.retry_lateness),
    _counter("early_starts", "Handlers started before their due time; must stay 0.", lambda m: m.early_starts),
    _counter("commits", "Store commits that were answered.", lambda m: m.commits),
    _counter("commit_rows", "Writes in those commits.", lambda m: m.commit_rows),
    _histogram("commit_seconds", "From sending a commit to its answer.", lambda m: m.commit_seconds),
    _counter("commit_answers", "Answers of commits, one for each shard in one.", lambda m: m.commit_answers, "answer"),
    _counter("terms_begun", "Terms begun.", lambda m: m.terms_begun),
    _counter("terms_ended", "Terms ended, by reason.", lambda m: m.terms_ended, "reason"),
    _counter("loads", "Reads that bring tasks into memory, by kind.", lambda m: m.loads, "kind"),
    _counter("audit_misses", "Due tasks that memory had missed.", lambda m: m.audit_misses),
    _counter("corrupt_records", "Stored records that do not decode.", lambda m: m.corrupt_records),
    _gauge("tasks_in_memory", "Tasks in memory: near and leased ones.", lambda m: m.tasks_in_memory),
    _gauge("leases", "Attempts that are leased or running.", lambda m: m.leases),
    _gauge("ready_tasks", "Due tasks in memory that wait for a worker.", lambda m: m.ready_tasks),
    _gauge("oldest_ready_age_seconds", "How long the oldest of them has been due.", lambda m: m.oldest_ready_age),
    _gauge("inbox_size", "Events that wait for the node's loop.", lambda m: m.inbox_size),
    _histogram("loop_lag_seconds", "How late the node's loop woke up.", lambda m: m.loop_lag),
    _counter("clock_readings", "Readings of the store's clock.", lambda m: m.clock_readings, "result"),
    _gauge("clock_uncertainty_seconds", "How far off the cluster clock may be.", lambda m: m.clock_uncertainty),
    _gauge("reference_offset_seconds", "How far the store's clock is off, if refused.", lambda m: m.reference_offset),
    _gauge("wall_clock_offset_seconds", "Own wall clock minus the cluster clock.", lambda m: m.wall_clock_offset),
    _gauge("worker_streams", "Worker streams that are open.", lambda m: m.worker_streams),
    _gauge("credits", "Tasks that connected workers would still take.", lambda m: m.credits),
    _counter("unknown_events", "Stream events of a newer peer, ignored.", lambda m: m.unknown_events),
)


class _Collector(Collector):
    """Turns the counts into families when the registry asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        metrics = self._metrics
        yield InfoMetricFamily("duecourse_node", "The node.", {"node_id": metrics.node_id, "version": metrics.version})
        for family in FAMILIES:
            yield _present(family, family.read(metrics))


def _present(family: Family, value: _Value) -> Metric:
    match family.kind, value:
        case _Kind.HISTOGRAM, Histogram():
            return HistogramMetricFamily(
                family.name, family.help, list(value.cumulative()), value.total / bounds.SECOND
            )
        case _Kind.GAUGE, int():
            shown = value / bounds.SECOND if family.name.endswith("_seconds") else value
            return GaugeMetricFamily(family.name, family.help, shown)
        case _Kind.COUNTER, int():
            return CounterMetricFamily(family.name, family.help, value)
        case _Kind.COUNTER, Mapping():
            counter = CounterMetricFamily(family.name, family.help, labels=family.labels)
            for label, count in value.items():
                counter.add_metric((label,) if isinstance(label, str) else label, count)
            return counter
        case _:
            raise TypeError(f"{family.name}: a {family.kind} cannot show {value!r}")
