"""Children: output, input and ends; and that none outlives its owner, however the owner ends."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from duecourse.cli.launcher.children import Nursery
from duecourse.model import bounds
from duecourse.timing.clock import SystemClock

OWNER = """
import os, signal, sys
from duecourse.cli.launcher.children import Nursery
with Nursery() as nursery:
    child = nursery.spawn("child", [sys.executable, "-S", "-c", "import signal; signal.pause()"])
    print(child.pid, flush=True)
    signal.pause()
"""
SLEEPER = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
DEAF = "import signal; signal.signal(15, signal.SIG_IGN); print('on', flush=True); signal.pause()"


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def wait_until_gone(pid: int) -> None:
    clock = SystemClock()
    end = clock.elapsed() + 20 * bounds.SECOND
    while not is_gone(pid):
        assert clock.elapsed() < end, "it is still there"
        await clock.sleep(20 * bounds.MILLISECOND)


async def test_a_child_writes_to_its_file_and_says_how_it_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Nursery() as nursery:
        child = nursery.spawn("child", ["sh", "-c", "echo out; echo err >&2; exit 3"], output=log)
        assert await child.wait() == 3
        assert child.how_it_ended() == "ended with exit code 3"
    assert log.read_text() == "out\nerr\n"


async def test_a_child_that_takes_input_hears_us(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Nursery() as nursery:
        child = nursery.spawn("child", ["sh", "-c", "read line; echo got $line"], output=log, takes_input=True)
        child.stdin.write(b"word\n")
        child.stdin.flush()
        assert await child.wait() == 0
    assert log.read_text() == "got word\n"


async def test_stop_asks_first_and_kills_after_the_grace(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Nursery() as nursery:
        polite, stubborn = (
            nursery.spawn("polite", SLEEPER),
            nursery.spawn("stubborn", [sys.executable, "-S", "-c", DEAF], output=log),
        )
        clock = SystemClock()
        while log.read_text() != "on\n":
            await clock.sleep(10 * bounds.MILLISECOND)
        await polite.stop(10 * bounds.SECOND)
        await stubborn.stop(100 * bounds.MILLISECOND)
        assert (polite.how_it_ended(), stubborn.how_it_ended()) == ("was ended by SIGTERM", "was ended by SIGKILL")


async def test_leaving_the_nursery_ends_all_children_and_the_leash() -> None:
    with Nursery() as nursery:
        child = nursery.spawn("child", SLEEPER)
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_child_outlives_an_owner_that_was_killed(number: signal.Signals) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, start_new_session=True)
    assert owner.stdout is not None
    with owner.stdout:
        pid = int(owner.stdout.readline())
    os.kill(owner.pid, number)
    owner.wait()
    asyncio.run(wait_until_gone(pid))
