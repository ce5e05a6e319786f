"""What a failure is made of for its reader: a smaller plan that breaks in the same way, and lines that can be read."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from simulation import plan, shrink, trace, world
from simulation.history import Violation
from simulation.plan import FaultKind, Kind, Plan

TESTS: Final = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("credit differs: worker0 gave c 3, it has 4; worker1 gave b 2, it has 4", "credit differs: worker2 gave a 1"),
        ("task-33: it was granted twice", "task-7: it was granted twice"),
        ("69 tasks have not ended: task-1 pending, task-2 running", "1 tasks have not ended: task-3 retry_wait"),
        ("no node that can leads shard 0; a#1 did", "no node that can leads shard 7; None did"),
    ],
)
def test_a_failure_is_the_same_whatever_names_and_numbers_it_has(text: str, same: str) -> None:
    assert shrink.gist(_violation(text)) == shrink.gist(_violation(same))
    assert len(shrink.gist(_violation(text))) > 2


@pytest.mark.parametrize(
    ("text", "other"),
    [("task-3: it was granted twice", "task-3: it was lost"), ("credit differs: worker0 gave 1", "a shard broke: why")],
)
def test_other_failures_are_told_apart(text: str, other: str) -> None:
    assert shrink.gist(_violation(text)) != shrink.gist(_violation(other))


def test_of_what_failed_unexpectedly_the_details_count() -> None:
    one = "node-1 failed: AssertionError('a lease has an attempt') at shard.py:10"
    assert shrink.gist(_violation(one, "S20")) != shrink.gist(_violation("node-1 failed: KeyError(b'x')", "S20"))
    assert shrink.gist(_violation(one, "S20")) == shrink.gist(_violation(one.replace("-1", "-2"), "S20"))


def test_a_plan_is_shrunk_to_what_its_failure_needs() -> None:
    whole = plan.draw(1)
    fault = whole.faults[len(whole.faults) // 2]
    needed = {whole.tasks[3].task_id, whole.tasks[70].task_id}
    told: list[str] = []

    def breaks(tried: Plan) -> Violation | None:
        if fault in tried.faults and needed <= {task.task_id for task in tried.tasks}:
            return _violation(f"task-{len(tried.tasks)}: it was granted twice")
        return _violation("task-1: something else")

    shrunk = shrink.shrink(whole, breaks, told.append)
    assert (list(shrunk.faults), {task.task_id for task in shrunk.tasks}) == ([fault], needed)
    assert told[-1] == "1 faults and 2 tasks still break S1"
    assert len(set(told)) == len(told)


def test_a_plan_that_does_not_fail_is_left_alone() -> None:
    told: list[str] = []
    assert shrink.shrink(plan.draw(1), lambda _: None, told.append) is not None
    assert told == ["it does not fail, so there is nothing to leave out"]


def test_a_trace_says_what_it_is_of_in_units_that_can_be_read() -> None:
    drawn = plan.draw(2, Kind.SOLO)
    head, setup, *rest = trace.readable(world.run(drawn, is_verbose=True), "abc", shows_all=False)
    assert head.startswith(f"solo seed 2 at commit abc: {len(drawn.tasks)} tasks")
    assert "-" not in head, "a digest has no sign"
    assert f"lease {drawn.setup.lease / 1_000_000:g} s" in setup
    planned = [line for line in rest if line.startswith("planned: ")]
    assert len(planned) == len(drawn.faults)
    assert all(any(f"kind {kind}" in line for kind in FaultKind) for line in planned)
    assert rest[-1] == "nothing was broken"


def test_a_seed_that_comes_to_no_end_ends_its_process_and_says_where_it_was() -> None:
    code = "from simulation import run\nrun.run_seeds('solo', [1], 0.01)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "poe simulate --kind solo --seeds 1 --trace: comes to no end" in ran.stderr
    assert "world.py" in ran.stderr


def _violation(text: str, invariant: str = "S1") -> Violation:
    return Violation(invariant, text, 0, None)
