"""`duecourse store`: prepares the database that a cluster keeps its tasks in, checks it, and binds it to a cluster."""

import asyncio
from typing import Annotated

import typer

from duecourse.cli import dsn, exits, extras, fsck, output, rebind
from duecourse.cli.dsn import Dsn, DsnFile
from duecourse.model import bounds

app = typer.Typer(
    name="store", help="Prepare and check the store of a cluster.", epilog=exits.EPILOG, no_args_is_help=True
)
app.command(epilog=fsck.EPILOG)(fsck.fsck)
app.command(epilog=rebind.EPILOG)(rebind.rebind)


@app.callback()
def store() -> None:
    """Prepare and check the store of a cluster."""


@app.command(epilog=exits.EPILOG)
def migrate(
    shards: Annotated[
        int,
        typer.Option(
            "--shards",
            min=1,
            max=bounds.SLOTS,
            metavar="NUMBER",
            help=f"How many shards a new store gets, up to {bounds.SLOTS:,}; an old one keeps its number.",
        ),
    ] = bounds.DEFAULT_SHARDS,
    postgres_dsn: Dsn = None,
    dsn_file: DsnFile = None,
) -> None:
    """Bring a Postgres database to this version's schema. Does nothing if it has it already."""
    text = dsn.read(postgres_dsn, dsn_file)
    with extras.needed("server", "prepares stores"):
        from duecourse.server.storage import migrate as migrations
    with dsn.failures_told(text):
        report = asyncio.run(migrations.migrate(text, shards))
    for name in report.applied:
        output.say(f"applied {name}")
    output.say(f"schema version {report.version}, {report.shards} shards")
    if report.shards != shards:
        output.tell(f"the store already had {report.shards} shards and keeps them")
