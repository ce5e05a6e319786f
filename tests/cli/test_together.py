"""The commands together, as a person uses them: a node, a worker, tasks; and a database brought to its schema."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "duecourse.cli.main"]
APPLICATION = """
from duecourse.worker import TaskContext, Worker
worker = Worker("127.0.0.1:1", queues=["nowhere"])
@worker.task("remind")
async def remind(context: TaskContext) -> str:
    print(f"reminded {context.json()['to']}", flush=True)
    return "done"
"""
LONG_APPLICATION = """
from pathlib import Path
import asyncio
from duecourse.worker import TaskContext, Worker
worker = Worker("127.0.0.1:1", queues=["default"])
@worker.task("copy")
async def copy(context: TaskContext) -> None:
    context.heartbeat("half of it")
    while not Path("go_on").exists():
        await asyncio.sleep(0.01)
"""


def _run(*arguments: str, given: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], input=given, capture_output=True, text=True, env=os.environ | environment, timeout=60
    )


@contextmanager
def _running(folder: Path, *arguments: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a command that goes on, and end it by SIGTERM: it has to end well."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | environment,
    )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def _wait_for(process: "subprocess.Popen[str]", text: str) -> str:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        if text in line:
            return line
        seen.append(line)
    pytest.fail(f"ended without {text!r}: {''.join(seen)}")


def test_a_task_goes_from_the_command_line_to_a_worker_and_back(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APPLICATION)
    listen = ["--api-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--drain", "1s"]
    with _running(
        tmp_path, "server", "--store", "memory", "--shards", "4", *listen, DUECOURSE_LOG_FORMAT="json"
    ) as node:
        address = json.loads(_wait_for(node, "node_ready"))["address"]
        with _running(
            tmp_path, "worker", "app:worker", "-q", "mail", "--slots", "2", DUECOURSE_ADDRESS=address
        ) as worker:
            submit = ["task", "submit", "-t", "remind", "-q", "mail", "--address", address]
            submitted = _run(*submit, "--delay", "100ms", "--payload", '{"to":"ann"}')
            assert submitted.returncode == 0, submitted.stderr
            _wait_for(worker, "reminded ann")
            several = _run(*submit, "-f", "-", given='{"payload":{"to":"bob"}}\n{"payload":{"to":"eve"}}\n')
            assert several.returncode == 0, several.stderr
            _wait_for(worker, "reminded")
            _wait_for(worker, "reminded")
        task = json.loads(
            _run("task", "get", submitted.stdout.strip(), "--full", "--json", "--address", address).stdout
        )
        assert (task["state"], task["attempt_count"], task["attempts"][0]["outcome"]) == ("succeeded", 1, "succeeded")
        listed = _run("task", "list", "-s", "succeeded", "--address", address)
        assert len(listed.stdout.splitlines()) == 3
        status = json.loads(_run("cluster", "status", "--json", "--address", address).stdout)
        assert status["shard_states"] == {"led": 4}


def test_what_a_long_handler_says_of_its_progress_is_seen_while_it_runs_and_afterwards(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(LONG_APPLICATION)
    listen = ["--api-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--drain", "1s"]
    settings = {"DUECOURSE_LOG_FORMAT": "json", "DUECOURSE_HEARTBEAT": "100ms"}
    with _running(tmp_path, "server", "--store", "memory", "--shards", "4", *listen, **settings) as node:
        address = json.loads(_wait_for(node, "node_ready"))["address"]
        with _running(tmp_path, "worker", "app:worker", DUECOURSE_ADDRESS=address):
            assert _run("task", "submit", "--id", "long", "-t", "copy", "--address", address).returncode == 0
            assert _until(address, lambda attempt: bool(attempt.get("progress")))["progress"] == "half of it"
            (tmp_path / "go_on").touch()
            ended = _until(address, lambda attempt: "outcome" in attempt)
            assert (ended["outcome"], ended["progress"]) == ("succeeded", "half of it")


def _until(address: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Read the task's first attempt until it is as it is wanted."""
    for _ in range(200):
        shown = _run("task", "get", "long", "--full", "--json", "--address", address)
        attempts = json.loads(shown.stdout)["attempts"]
        if attempts and condition(attempts[0]):
            return dict(attempts[0])
    pytest.fail(f"still {shown.stdout}")


async def test_a_database_that_has_the_schema_is_left_as_it_is(postgres_dsn: str) -> None:
    first = await asyncio.to_thread(_run, "store", "migrate", DUECOURSE_POSTGRES_DSN=postgres_dsn)
    again = await asyncio.to_thread(_run, "store", "migrate", "--shards", "999", DUECOURSE_POSTGRES_DSN=postgres_dsn)
    for ended in (first, again):
        assert ended.returncode == 0, ended.stderr
        assert "applied" not in ended.stdout
    assert first.stdout == again.stdout
    assert "the store already had" in again.stderr


def test_a_node_does_not_run_on_the_parser_in_python() -> None:
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python", "DUECOURSE_STORE": "memory"}
    command = [sys.executable, "-m", "duecourse.cli.main", "server", "--api-listen", "127.0.0.1:0"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "parser_refused" in ended.stderr
