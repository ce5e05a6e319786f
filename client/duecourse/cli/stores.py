"""`duecourse store`: prepares the database that a cluster keeps its tasks in."""

import asyncio
import re
from pathlib import Path
from typing import Annotated, Final

import typer

from duecourse.cli import exits, extras, output
from duecourse.model import bounds

app = typer.Typer(name="store", help="Prepare the store of a cluster.", epilog=exits.EPILOG, no_args_is_help=True)

_UNREADABLE: Final = (
    "the connection string cannot be read: write postgresql://user:password@host:5432/database, with what is special in"
    " the password percent-encoded"
)
_PASSWORD: Final = re.compile(r"(?<=:)[^:@/\s]*(?=@)|(?<=password=)\S+", re.IGNORECASE)


@app.callback()
def store() -> None:
    """Prepare the store of a cluster."""


@app.command(epilog=exits.EPILOG)
def migrate(
    shards: Annotated[
        int,
        typer.Option(
            "--shards", min=1, max=bounds.SLOTS, help="How many shards a new store gets; an old one keeps its number."
        ),
    ] = bounds.DEFAULT_SHARDS,
    dsn: Annotated[
        str | None,
        typer.Option(
            "--dsn",
            envvar="DUECOURSE_POSTGRES_DSN",
            metavar="DSN",
            help="Where Postgres is, such as postgresql://user@host:5432/database. Passwords are better kept in the"
            " variable: everybody on the machine can read a command line.",
        ),
    ] = None,
    dsn_file: Annotated[
        Path | None,
        typer.Option(
            "--dsn-file",
            envvar="DUECOURSE_POSTGRES_DSN_FILE",
            help="File that holds the connection string.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Bring a Postgres database to this version's schema. Does nothing if it has it already."""
    if (dsn is None) == (dsn_file is None):
        raise typer.BadParameter(
            "where is Postgres? Set DUECOURSE_POSTGRES_DSN, or give one of --dsn and --dsn-file", param_hint="--dsn"
        )
    text = dsn or (dsn_file.read_text(encoding="utf-8").strip() if dsn_file else "")
    with extras.needed("server", "prepares stores"):
        from duecourse.server.storage import StoreRefused, StoreUnavailable
        from duecourse.server.storage import migrate as migrations
    try:
        report = asyncio.run(migrations.migrate(text, shards))
    except StoreUnavailable as error:
        raise typer.Exit(exits.fail(_without_secret(str(error), text), exits.ExitCode.UNAVAILABLE)) from None
    except StoreRefused as error:
        raise typer.Exit(exits.fail(_without_secret(str(error), text))) from None
    except ValueError:
        # Not shown: what the driver says of a string that it cannot read may hold a part of the password.
        raise typer.Exit(exits.fail(_UNREADABLE, exits.ExitCode.USAGE)) from None
    for name in report.applied:
        output.say(f"applied {name}")
    output.say(f"schema version {report.version}, {report.shards} shards")
    if report.shards != shards:
        output.tell(f"the store already had {report.shards} shards and keeps them")


def _without_secret(message: str, dsn: str) -> str:
    """Leave the connection string, and what looks like a password, out of a message."""
    return _PASSWORD.sub("***", message.replace(dsn, _PASSWORD.sub("***", dsn)))
