"""The options with which commands find a store, and what is said of it when it cannot be used."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from duecourse.cli import exits, extras

_UNREADABLE: Final = (
    "the connection string cannot be read: write postgresql://user:password@host:5432/database, with what is special in"
    " the password percent-encoded"
)
_PASSWORD: Final = re.compile(r"(?<=:)[^:@/\s]*(?=@)|(?<=password=)\S+", re.IGNORECASE)

Dsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        envvar="DUECOURSE_POSTGRES_DSN",
        metavar="DSN",
        help="Where Postgres is, such as postgresql://user@host:5432/database. Passwords are better kept in the"
        " variable: everybody on the machine can read a command line.",
    ),
]
DsnFile = Annotated[
    Path | None,
    typer.Option(
        "--dsn-file",
        envvar="DUECOURSE_POSTGRES_DSN_FILE",
        help="File that holds the connection string.",
        exists=True,
        dir_okay=False,
    ),
]


def read(dsn: str | None, dsn_file: Path | None) -> str:
    """Return the connection string, however it was given."""
    if dsn_file is None:
        if dsn is None:
            raise typer.BadParameter(
                "where is Postgres? Set DUECOURSE_POSTGRES_DSN, or give one of --dsn and --dsn-file", param_hint="--dsn"
            )
        return dsn
    if dsn is not None:
        # The variable may have been set long ago, for another store.
        raise typer.BadParameter(
            "Postgres is named twice, by --dsn or DUECOURSE_POSTGRES_DSN and by --dsn-file or"
            " DUECOURSE_POSTGRES_DSN_FILE: leave one of them out",
            param_hint="--dsn",
        )
    return dsn_file.read_text(encoding="utf-8").strip()


@contextmanager
def failures_told(dsn: str) -> Iterator[None]:
    """End the command with a line and its exit code if the store cannot be used; passwords are left out."""
    with extras.needed("server", "works on stores"):
        from duecourse.server.storage import StoreRefused, StoreUnavailable
    try:
        yield
    except StoreUnavailable as error:
        raise typer.Exit(exits.fail(_without_secret(str(error), dsn), exits.ExitCode.UNAVAILABLE)) from None
    except StoreRefused as error:
        raise typer.Exit(exits.fail(_without_secret(str(error), dsn))) from None
    except ValueError:
        # Not shown: what the driver says of a string that it cannot read may hold a part of the password.
        raise typer.Exit(exits.fail(_UNREADABLE, exits.ExitCode.USAGE)) from None


def _without_secret(message: str, dsn: str) -> str:
    """Leave the connection string, and what looks like a password, out of a message."""
    return _PASSWORD.sub("***", message.replace(dsn, _PASSWORD.sub("***", dsn)))
