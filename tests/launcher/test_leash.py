"""The leash: what is left behind is ended, by its signal or by SIGKILL, and nobody else is."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from duecourse.cli.launcher import leash

NOW = 0.0
READY = "import signal, sys; {}; print('ready', flush=True); signal.pause()"


@pytest.fixture
def spawn() -> Iterator["Spawn"]:
    spawned = Spawn()
    yield spawned
    for process in spawned.processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class Spawn:
    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, set_up: str = "pass") -> subprocess.Popen[bytes]:
        """Start a process that waits for signals, and return once it does."""
        command = [sys.executable, "-S", "-c", READY.format(set_up)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process


def test_commands_tell_who_is_held() -> None:
    assert leash.gather(["hold 15 12\n", "hold 2 /a b/file\n", "hold 15 13\n", "drop 13\n", "drop 99\n"]) == {
        "12": signal.SIGTERM,
        "/a b/file": signal.SIGINT,
    }


def test_an_unknown_command_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a command"):
        leash.gather(["hodl 15 12\n"])


def test_who_is_held_gets_its_own_signal(spawn: Spawn) -> None:
    one, other = spawn("signal.signal(2, lambda *_: sys.exit(7))"), spawn()
    leash.end({str(one.pid): signal.SIGINT, str(other.pid): signal.SIGTERM}, NOW)
    assert (one.wait(10), other.wait(10)) == (7, -signal.SIGTERM)


def test_who_ignores_its_signal_is_killed_after_the_grace(spawn: Spawn) -> None:
    stubborn = spawn("signal.signal(15, signal.SIG_IGN)")
    leash.end({str(stubborn.pid): signal.SIGTERM}, NOW, grace_seconds=0.3)
    assert stubborn.wait(10) == -signal.SIGKILL


def test_a_file_names_a_process_even_if_it_appears_late(spawn: Spawn, tmp_path: Path) -> None:
    process = spawn()
    file = tmp_path / "pid"
    writer = subprocess.Popen(["sh", "-c", f"sleep 0.2; echo {process.pid} > {file}"])
    leash.end({str(file): signal.SIGTERM}, time.clock_gettime(time.CLOCK_REALTIME))
    assert process.wait(10) == -signal.SIGTERM
    writer.wait(10)


def test_a_file_of_the_past_ends_nobody(spawn: Spawn, tmp_path: Path) -> None:
    process = spawn()
    file = tmp_path / "pid"
    file.write_text(f"{process.pid}\n")
    os.utime(file, (1_000_000_000, 1_000_000_000))
    leash.end({str(file): signal.SIGTERM}, time.clock_gettime(time.CLOCK_REALTIME), grace_seconds=0.3)
    assert process.poll() is None
