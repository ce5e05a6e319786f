"""Records, the search for the highest sustained rate, medians, and what processes are found to use."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from duecourse.cli.bench import figures, search, usage
from duecourse.cli.bench.figures import Figures
from duecourse.cli.bench.records import Phase, Records
from duecourse.cli.distribution import Distribution
from duecourse.model import bounds


def test_records_are_seen_by_the_other_side_at_once(tmp_path: Path) -> None:
    path = tmp_path / "records"
    ours = Records.create(path, 3)
    theirs = Records.open(path)
    assert (ours.count, ours.phase) == (0, Phase.STARTING)
    theirs.phase = Phase.LOADED
    theirs.append(7, 1, 1_000)
    theirs.append(1 << 40, 2, 1 << 60)
    assert (ours.count, ours.last_start, ours.phase) == (2, 1 << 60, Phase.LOADED)
    assert list(ours.starts()) == [(7, 1, 1_000), (1 << 40, 2, 1 << 60)]
    assert list(ours.starts(1)) == [(1 << 40, 2, 1 << 60)]
    theirs.append(9, 1, 3)
    with pytest.raises(IndexError):
        theirs.append(10, 1, 4)
    assert ours.count == 3
    ours.close()
    theirs.close()


@pytest.mark.parametrize("limit", [35.0, 900.0, 4_000.0, 23_456.0])
async def test_the_search_comes_close_to_the_highest_sustained_rate_from_below(limit: float) -> None:
    tried = []

    async def probe(rate: float) -> search.Trial:
        tried.append(rate)
        tail = 0 if rate <= limit else bounds.SECOND
        return search.Trial(per_s=rate, refused=0, tail=tail, duration=bounds.SECOND)

    found = await search.highest_sustained(probe, 4_000)
    assert limit / search.PRECISION <= found <= limit
    assert len(tried) < 20


async def test_the_search_ends_when_nothing_is_sustained() -> None:
    async def probe(rate: float) -> search.Trial:
        return search.Trial(per_s=0, refused=1, tail=0, duration=bounds.SECOND)

    assert await search.highest_sustained(probe, 4_000) == 0


def test_a_load_is_not_sustained_if_its_backlog_outlives_it() -> None:
    def is_sustained(tail: int, refused: int = 0) -> bool:
        duration = 30 * bounds.SECOND
        return search.Trial(per_s=1, refused=refused, tail=tail, duration=duration).is_sustained

    assert is_sustained(600 * bounds.MILLISECOND)
    assert not is_sustained(601 * bounds.MILLISECOND)
    assert not is_sustained(0, refused=1)


def test_repeats_are_merged_to_medians_but_broken_promises_to_the_worst() -> None:
    repeats = [
        Figures({"live_per_s": 10_000.4, "lateness_p50_ms": 1.23456, "lost": 0, "early": 0}),
        Figures({"live_per_s": 12_000.0, "lateness_p50_ms": 2.0, "lost": 3, "early": 0}),
        Figures({"live_per_s": 11_000.0, "lost": 0, "early": 0}),
    ]
    assert figures.merge(repeats) == {"live_per_s": 11_000, "lateness_p50_ms": 1.62, "early": 0, "lost": 3}


def test_lateness_is_reported_in_milliseconds() -> None:
    one = Figures()
    one.add_lateness(Distribution(range(1_000, 101_000, 1_000)))
    assert one.metrics == {"lateness_p50_ms": 50, "lateness_p99_ms": 99, "lateness_max_ms": 100}
    nothing = Figures()
    nothing.add_lateness(Distribution([]))
    assert nothing.metrics == {}


def test_the_table_shows_medians_and_every_repeat() -> None:
    shown = io.StringIO()
    repeats = [Figures({"ready_s": 1.5}, {"CPU us a task": {"node": 20.25}}), Figures({"ready_s": 2.5})]
    figures.show(Console(file=shown, width=100), "pending", repeats)
    assert "1.5, 2.5" in shown.getvalue()
    as_object = figures.as_object("pending", {"cores": 2}, {}, repeats)
    assert as_object["metrics"] == {"ready_s": 2.0}
    assert (as_object["bench"], as_object["machine"]) == ("pending", {"cores": 2})


@pytest.mark.skipif(not usage.is_known(), reason="there is no /proc")
def test_our_own_processor_time_and_memory_are_found() -> None:
    begin = usage.cpu_micros(os.getpid())
    while usage.cpu_micros(os.getpid()) < begin + 50 * bounds.MILLISECOND:
        sum(range(10_000))
    assert usage.tree_cpu_micros(os.getpid()) >= begin
    assert 1_000_000 < usage.rss_bytes(os.getpid()) <= usage.peak_rss_bytes(os.getpid())
    assert usage.cpu_micros(2**22 + 1) == 0
