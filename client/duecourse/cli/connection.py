"""The options with which every command finds its cluster, and the client that it gets."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Coroutine, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from duecourse.cli import exits, output, values
from duecourse.model import bounds
from duecourse.model.addresses import several

if TYPE_CHECKING:
    from duecourse.client import Client

_Answer = TypeVar("_Answer")

DEFAULT_ADDRESS: Final = f"127.0.0.1:{bounds.API_PORT}"
DEFAULT_TIMEOUT: Final = "10s"
_SILENCE: Final = timedelta(seconds=1)
"""After it a person is told what is waited for."""

Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="DUECOURSE_ADDRESS",
        metavar="HOST:PORT",
        help="Where a node is; several, separated by commas, are tried in turn.",
    ),
]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        "-n",
        envvar="DUECOURSE_NAMESPACE",
        metavar="NAME",
        callback=values.name,
        help="Whose tasks these are.",
    ),
]
Timeout = Annotated[
    str, typer.Option("--timeout", metavar="DURATION", help="How long to try before giving up, such as 500ms or 30s.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line, for programs.")]


class Session:
    """A client, and the event loop that it lives on."""

    def __init__(self, runner: asyncio.Runner, client: "Client", address: str, timeout: timedelta) -> None:
        self._runner = runner
        self._address = address
        self._timeout = timeout
        self.client = client

    def run(self, call: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Make a call. Between calls an interrupt works as everywhere, also while input is waited for."""
        return self._runner.run(call)

    def ask(self, call: Coroutine[Any, Any, _Answer], *, takes: timedelta = timedelta()) -> _Answer:
        """Make a call that is answered at once, or once what it `takes` is over; if it is not, tell who waits."""
        return self.run(self._ask(call, takes) if sys.stderr.isatty() else call)

    async def _ask(self, call: Coroutine[Any, Any, _Answer], takes: timedelta) -> _Answer:
        limit = f"{(self._timeout + takes).total_seconds():g} s"
        line = f"{self._address} does not answer yet; trying for up to {limit}"
        after = (_SILENCE + takes).total_seconds()
        notice = asyncio.get_running_loop().call_later(after, output.tell, line)
        try:
            return await call
        finally:
            notice.cancel()


@contextlib.contextmanager
def session(address: str, namespace: str, timeout: str) -> Iterator[Session]:
    """Open a client for one command; what goes wrong ends the command with a line and its exit code."""
    limit = timedelta(microseconds=values.duration("--timeout", timeout))
    quieten()
    from duecourse import client

    with asyncio.Runner() as runner:
        connected = client.Client(split(address), namespace=namespace, timeout=limit)
        try:
            yield Session(runner, connected, address, limit)
        except client.DuecourseError as failure:
            raise typer.Exit(exits.fail(exits.explain(failure, address), exits.of(failure))) from None
        finally:
            runner.run(connected.close())


def quieten() -> None:
    """Keep gRPC's own lines off standard error; what matters is in the errors. To be called before gRPC is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def split(address: str) -> tuple[str, ...]:
    """Split the addresses of `--address`."""
    try:
        found = several(address)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--address") from None
    if not found:
        raise typer.BadParameter("an address such as 127.0.0.1:7400 is wanted", param_hint="--address")
    return found
