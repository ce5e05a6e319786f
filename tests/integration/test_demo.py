"""`duecourse demo`, from the outside: the whole job through a SIGKILL of the scheduler, and nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DUECOURSE = [sys.executable, "-m", "duecourse.cli.main"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("nodes", "said"), [(1, "killed the scheduler"), (3, "the others lead all shards after")])
def test_the_demonstration_keeps_every_promise_and_leaves_nothing_behind(tmp_path: Path, nodes: int, said: str) -> None:
    command = [*DUECOURSE, "demo", "--nodes", str(nodes), "--tasks", "400", "--seconds", "4", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert ended.returncode == 0, ended.stderr
    verdict = json.loads(ended.stdout)
    assert verdict["is_kept"]
    assert (verdict["submitted"], verdict["run"]) == (400, 400)
    assert (verdict["lost"], verdict["early"], verdict["unknown"]) == ([], [], [])
    assert all(repeat["is_allowed"] for repeat in verdict["repeats"])
    assert verdict["outage_s"] > 0
    assert verdict["lateness_ms"]["max"] >= verdict["lateness_ms"]["p50"] >= 0
    assert said in ended.stderr
    # Else what is submitted meets changes of leaders without any fault.
    assert ("waiting until each leads its share" in ended.stderr.partition("submitted 400")[0]) is (nodes > 1)
    assert list(tmp_path.iterdir()) == []
    assert _processes_that_name(tmp_path) == []


def _processes_that_name(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found
