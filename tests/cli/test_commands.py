"""What all commands share, and the commands that run and prepare things."""

import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from cli.conftest import CommandLine

from duecourse.cli import commands, extras, log_lines, output
from duecourse.server import config_listing


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "duecourse.cli.main", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=60,
    )


@pytest.mark.parametrize(
    "command",
    [
        "",
        "task",
        "task submit",
        "task get",
        "task list",
        "task cancel",
        "cluster",
        "cluster status",
        "node",
        "node drain",
        "store",
        "store migrate",
        "store fsck",
        "store rebind",
        "server",
        "worker",
        "dev",
        "demo",
        "bench",
    ],
)
def test_every_command_explains_itself_and_its_exit_codes(duecourse: CommandLine, command: str) -> None:
    result = duecourse(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    assert "Exit codes: 0" in " ".join(result.stdout.split())


def test_help_needs_neither_grpc_nor_a_database_driver() -> None:
    script = (
        "import sys; sys.argv = ['duecourse', '--help']\n"
        "from duecourse.cli import main\n"
        "try: main.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('grpc', 'asyncpg', 'pydantic', 'asyncio.base_events') if m in sys.modules][:3])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    loaded = shown.splitlines()[-1]
    assert not any(heavy in loaded for heavy in ("grpc", "asyncpg", "pydantic"))


def test_help_is_as_wide_as_the_terminal() -> None:
    shown = _run("demo", "--help", COLUMNS="120").stdout
    assert "Starts Postgres, a node and a worker as child processes in a temporary folder, and leaves nothing" in shown


def test_the_items_of_a_list_keep_their_lines() -> None:
    assert commands.flowing("a\nb:\n- c,\n- d\n  e\n\nf\ng") == "a b:\n- c,\n- d   e\n\nf g"


def test_an_interrupt_while_the_command_line_is_imported_ends_it_quietly() -> None:
    script = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from duecourse.cli import main\n"
        "main.main()"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_help_comes_at_once() -> None:
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert _run("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # Time at work, so that other tests on the machine do not count.
    assert min(took) < 0.4


def test_the_version_is_shown(duecourse: CommandLine) -> None:
    assert duecourse("--version").stdout.strip().count(".") == 2


def test_the_options_of_the_server_are_its_settings() -> None:
    shown = _run("server", "--help", COLUMNS="300").stdout
    for setting in config_listing.describe():
        if setting.flag is None or setting.is_hidden:
            continue
        assert setting.flag in shown
        assert not setting.default or f"Default: {setting.default}." in shown


def test_options_of_the_server_are_written_out_on_a_narrow_terminal() -> None:
    shown = _run("server", "--help", COLUMNS="80").stdout
    assert "…" not in shown


def test_a_setting_out_of_bounds_is_told_before_anything_starts(tmp_path: Path) -> None:
    ended = _run("server", "--store", "memory", "--lease", "3s")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: lease: 3s is less than")
    assert "Traceback" not in ended.stderr


def test_an_unknown_option_of_the_server_is_refused() -> None:
    ended = _run("server", "--spped", "3s")
    assert ended.returncode == 2
    assert "--spped" in ended.stderr


def test_the_password_of_a_store_is_not_shown(duecourse: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "dsn").write_text("postgresql://u:canary@127.0.0.1:1/x?password=canary\n")
    for arguments in (["--dsn", "postgresql://u:canary@127.0.0.1:1/x"], ["--dsn-file", str(tmp_path / "dsn")]):
        result = duecourse("store", "migrate", *arguments)
        assert result.exit_code == 3
        assert "canary" not in result.output
        assert result.stderr.startswith("error: ")


def test_a_store_has_to_be_named_and_only_once(tmp_path: Path) -> None:
    (tmp_path / "dsn").write_text("postgresql://u@127.0.0.1:1/x\n")
    neither = _run("store", "fsck")
    both = _run("store", "fsck", "--dsn-file", str(tmp_path / "dsn"), DUECOURSE_POSTGRES_DSN="postgresql://u@h/y")
    assert (neither.returncode, both.returncode) == (2, 2)
    assert "where is Postgres?" in neither.stderr
    assert "named twice" in both.stderr


@pytest.mark.parametrize("dsn", ["postgresql://u:canary/x@h/db", "canary", "postgresql://u:p@h:canary/db"])
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (("store", "migrate"), 2, "percent-encoded"),
        (("store", "fsck"), 2, "percent-encoded"),
        (("store", "rebind", "--to-solo"), 3, "cannot be read"),
        (("cluster", "accept-clock"), 3, "cannot be read"),
    ],
)
def test_a_connection_string_that_cannot_be_read_is_not_shown(
    dsn: str, command: tuple[str, ...], code: int, said: str
) -> None:
    ended = _run(*command, DUECOURSE_POSTGRES_DSN=dsn)
    assert ended.returncode == code
    assert "canary" not in ended.stdout + ended.stderr
    assert said in ended.stderr


def test_an_address_has_to_have_a_port(duecourse: CommandLine) -> None:
    result = duecourse("task", "list", "--address", "127.0.0.1")
    assert result.exit_code == 2
    assert "is 127.0.0.1:7400 meant?" in result.stderr


def test_a_store_has_to_be_named(duecourse: CommandLine) -> None:
    result = duecourse("store", "migrate")
    assert result.exit_code == 2
    assert "DUECOURSE_POSTGRES_DSN" in result.stderr


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("app", "is not of the form module:attribute"),
        (":worker", "is not of the form module:attribute"),
        ("services.py:worker", "is services:worker meant?"),
        ("there_is_none:worker", "there is no module there_is_none"),
        ("json:worker", "json has no worker"),
        ("json:dumps", "json:dumps is a function, not a duecourse.worker.Worker"),
    ],
)
def test_a_worker_that_cannot_be_found_is_told(duecourse: CommandLine, target: str, said: str) -> None:
    result = duecourse("worker", target)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", "").split())


def test_a_worker_without_handlers_has_nothing_to_do(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("from duecourse.worker import Worker\nworker = Worker('127.0.0.1:1')\n")
    ended = subprocess.run(
        [sys.executable, "-m", "duecourse.cli.main", "worker", "app:worker", "--slots", "3", "--queue", "mail"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "without handlers has nothing to do" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_missing_extra_is_told_with_how_to_get_it_from_an_index_and_in_a_clone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as ended, extras.needed("server", "runs a node"):
        raise ModuleNotFoundError(name="asyncpg")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == (
        "error: this runs a node, for which asyncpg is missing: pip install 'duecourse[server]', or in a clone pip"
        " install '.[server]'\n"
    )


def test_a_log_line_holds_the_fields_of_its_event() -> None:
    record = logging.LogRecord("duecourse.worker", logging.INFO, "", 0, "attempt failed", (), None)
    record.task_id, record.failure = "t1", "no\nway"
    shown = log_lines.Formatter().format(record)
    assert shown.endswith(r"INFO    duecourse.worker: attempt failed task_id=t1 failure=no\nway")


def test_what_others_wrote_cannot_move_the_cursor() -> None:
    assert output.printable("plain äöü 漢字") == "plain äöü 漢字"
    assert output.printable("a\x1b[2J\r\n\t\x07b\u202e") == r"a\x1b[2J\r\n\t\x07b\u202e"
