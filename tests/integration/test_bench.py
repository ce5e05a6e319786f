"""`duecourse bench`, from the outside: small runs of every bench, the JSON line, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from duecourse.cli.bench import figures

BENCH = [sys.executable, "-m", "duecourse.cli.main", "bench"]

pytestmark = pytest.mark.timeout(180)


def bench(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "200"}
    return subprocess.run([*BENCH, *arguments], capture_output=True, text=True, env=environment)


def measured(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run a bench, and return its metrics, after what holds for all of them has been checked."""
    ended = bench(tmp_path, *arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    assert last["bench"] == arguments[0]
    assert {"cpu", "cores", "python", "packages"} <= set(last["machine"])
    metrics: dict[str, Any] = last["metrics"]
    assert set(metrics) <= set(figures.UNITS)
    for name in metrics:
        assert name in ended.stdout
    assert list(tmp_path.iterdir()) == []
    return metrics


def test_submissions_are_measured_in_batches_and_one_by_one(tmp_path: Path) -> None:
    metrics = measured(tmp_path, "submit", "--duration", "500ms", "--store", "memory")
    assert metrics["submit_batch_per_s"] > 100
    assert metrics["submit_single_per_s"] > 10


def test_a_backlog_is_drained_and_a_given_rate_is_held(tmp_path: Path) -> None:
    metrics = measured(tmp_path, "throughput", "--count", "1000", "--rate", "100", "--duration", "6s")
    assert metrics["drain_per_s"] > 50
    assert 50 < metrics["live_per_s"] <= 101
    assert metrics["cpu_us_per_task"] > 0
    assert (metrics["early"], metrics["lost"]) == (0, 0)


def test_a_cluster_of_several_nodes_is_measured(tmp_path: Path) -> None:
    metrics = measured(tmp_path, "throughput", "--nodes", "2", "--count", "1000", "--only", "drain")
    assert metrics["drain_per_s"] > 50
    assert metrics["cpu_us_per_task"] > 0
    assert (metrics["early"], metrics["lost"]) == (0, 0)


def test_lateness_has_medians_over_repeats(tmp_path: Path) -> None:
    arguments = ["--rate", "50", "--duration", "1s", "--warm-up", "200ms", "--lead", "500ms"]
    arguments += ["--repeat", "2", "--store", "memory"]
    metrics = measured(tmp_path, "lateness", *arguments)
    assert 0 <= metrics["lateness_p50_ms"] <= metrics["lateness_p99_ms"] <= metrics["lateness_max_ms"]
    assert (metrics["early"], metrics["lost"]) == (0, 0)


def test_what_waits_is_weighed_and_is_there_after_a_restart(tmp_path: Path) -> None:
    metrics = measured(tmp_path, "pending", "--count", "2000")
    assert metrics["lost"] == 0
    assert metrics["rss_mb"] > 10
    assert metrics["ready_s"] > 0


def test_what_is_due_at_once_is_weighed_and_another_queue_is_watched(tmp_path: Path) -> None:
    metrics = measured(tmp_path, "pending", "--due", "--count", "2000", "--duration", "1s")
    assert metrics["rss_mb"] > 10
    assert metrics["lateness_p99_ms"] >= 0
    assert (metrics["early"], metrics["lost"]) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("submit", "--only", "slowly"), "batch or single"),
        (("submit", "--nodes", "3", "--coordination", "solo"), "has one node"),
        (("submit", "--nodes", "3", "--store", "memory"), "postgres is wanted"),
        (("throughput", "--coordination", "zookeeper"), "solo or etcd"),
        (("pending", "--nodes", "3"), "one node"),
        (("lateness", "--store", "etcd"), "postgres or memory"),
        (("lateness", "--duration", "soon"), "not a duration"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    refused = bench(tmp_path, *arguments)
    assert refused.returncode == 2
    assert told in refused.stderr


def test_a_cluster_that_is_not_there_ends_the_bench_with_one_line(tmp_path: Path) -> None:
    failed = bench(tmp_path, "lateness", "--address", "127.0.0.1:1")
    assert failed.returncode == 3
    assert "cannot reach a node at 127.0.0.1:1" in failed.stderr
    assert "Traceback" not in failed.stderr
