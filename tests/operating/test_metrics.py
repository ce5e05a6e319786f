"""Metrics: what is counted comes out as Prometheus reads it."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from duecourse.model import bounds
from duecourse.server.core.task import AttemptOutcome
from duecourse.server.telemetry.metrics import FAMILIES, Histogram, Metrics


def samples_of(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_counts_come_out_under_their_names_and_labels() -> None:
    metrics = Metrics(node_id="a-node", version="1.2.3")
    metrics.tasks_submitted += 5
    metrics.tasks_duplicate += 2
    metrics.grants += 3
    metrics.attempts_ended[AttemptOutcome.TIMED_OUT] += 1
    metrics.rpc_requests["SubmitTask", "OK"] += 7
    metrics.oldest_ready_age = 1_500 * bounds.MILLISECOND
    samples = samples_of(metrics)
    assert samples["duecourse_node_info", (("node_id", "a-node"), ("version", "1.2.3"))] == 1
    assert samples["duecourse_submissions_total", (("result", "created"),)] == 5
    assert samples["duecourse_submissions_total", (("result", "duplicate"),)] == 2
    assert samples["duecourse_grants_total", ()] == 3
    assert samples["duecourse_attempts_ended_total", (("outcome", "timed_out"),)] == 1
    assert samples["duecourse_rpc_requests_total", (("code", "OK"), ("method", "SubmitTask"))] == 7
    assert samples["duecourse_oldest_ready_age_seconds", ()] == 1.5
    assert ("process_resident_memory_bytes", ()) in samples


def test_a_counter_that_must_stay_zero_is_there_before_it_happens() -> None:
    samples = samples_of(Metrics())
    assert samples["duecourse_early_starts_total", ()] == 0
    assert samples["duecourse_commit_answers_total", (("answer", "unknown"),)] == 0


def test_lateness_of_first_attempts_and_of_retries_are_apart() -> None:
    metrics = Metrics()
    metrics.observe_lateness(3 * bounds.MILLISECOND, is_retry=False)
    metrics.observe_lateness(2 * bounds.MINUTE, is_retry=True)
    samples = samples_of(metrics)
    assert samples["duecourse_lateness_seconds_bucket", (("le", "0.002"),)] == 0
    assert samples["duecourse_lateness_seconds_bucket", (("le", "0.003"),)] == 1
    assert samples["duecourse_lateness_seconds_sum", ()] == pytest.approx(0.003)
    assert samples["duecourse_retry_lateness_seconds_bucket", (("le", "60.0"),)] == 0
    assert samples["duecourse_retry_lateness_seconds_bucket", (("le", "+Inf"),)] == 1
    assert metrics.early_starts == 0


def test_a_start_before_its_time_is_counted_as_early() -> None:
    metrics = Metrics()
    metrics.observe_lateness(-1, is_retry=False)
    assert metrics.early_starts == 1
    assert samples_of(metrics)["duecourse_lateness_seconds_count", ()] == 1


def test_a_duration_on_a_bound_counts_below_it() -> None:
    histogram = Histogram((10, 20))
    for micros in (-5, 0, 10, 11, 20, 21):
        histogram.observe(micros)
    assert [count for _, count in histogram.cumulative()] == [3, 5, 6]
    assert histogram.total == 62


def test_gauges_are_refreshed_when_they_are_read() -> None:
    metrics = Metrics()

    def sample() -> None:
        metrics.inbox_size += 1

    metrics.samplers.append(sample)
    assert samples_of(metrics)["duecourse_inbox_size", ()] == 1
    assert samples_of(metrics)["duecourse_inbox_size", ()] == 2


def test_names_are_unique_and_lateness_reaches_from_a_millisecond_to_a_minute() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    lateness = Metrics().lateness.bounds
    assert list(lateness) == sorted(set(lateness))
    assert lateness[1] == bounds.MILLISECOND
    assert lateness[-1] == bounds.MINUTE
