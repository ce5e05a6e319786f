"""`duecourse store rebind`: gives a store to another cluster, or to a solo node, with all nodes stopped."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from duecourse.cli import dsn, exits, extras, output
from duecourse.cli.dsn import Dsn, DsnFile
from duecourse.timing.clock import SystemClock

if TYPE_CHECKING:
    from duecourse.server.config import Settings

EPILOG: Final = (
    "Exit codes: 0 done; 1 refused: nodes are alive, or the store is none that this version uses; 2 the command line or"
    " a setting is wrong; 3 the store or etcd does not answer: do it again, nodes are refused until it is done."
)


def rebind(
    to_solo: Annotated[
        bool,
        typer.Option(
            "--to-solo",
            help="Give the store to a solo node. Without --etcd-endpoints only the store is asked for live nodes.",
        ),
    ] = False,
    endpoints: Annotated[
        str | None,
        typer.Option("--etcd-endpoints", metavar="LIST", help="Members of etcd, host:port, separated by commas."),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option("--etcd-prefix", metavar="NAME", help="What the cluster's keys begin with. Default: duecourse."),
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option("--etcd-ca-file", help="Certificates that vouch for etcd's; then TLS is used.")
    ] = None,
    cert_file: Annotated[Path | None, typer.Option("--etcd-cert-file", help="Certificate for etcd.")] = None,
    key_file: Annotated[Path | None, typer.Option("--etcd-key-file", help="The key to it.")] = None,
    user: Annotated[str | None, typer.Option("--etcd-user", metavar="NAME", help="User name in etcd.")] = None,
    password_file: Annotated[Path | None, typer.Option("--etcd-password-file", help="That user's password.")] = None,
    postgres_dsn: Dsn = None,
    dsn_file: DsnFile = None,
) -> None:
    """Give a store to a new cluster in etcd, or to a solo node. All nodes must be stopped.

    For when nodes refuse to start because store and etcd do not agree (etcd was
    emptied, or restored from an older copy), to move to another etcd, and to
    make one solo node several, or several one. Tasks stay as they are; what
    workers run goes on, and is adopted by the next leaders.

    Takes the settings of a node: its variables, the file of DUECOURSE_CONFIG,
    or these options.
    """
    given = {
        "store": "postgres",
        "coordination": "solo" if to_solo else "etcd",
        "etcd_endpoints": endpoints,
        "etcd_prefix": prefix,
        "etcd_ca_file": ca_file,
        "etcd_cert_file": cert_file,
        "etcd_key_file": key_file,
        "etcd_user": user,
        "etcd_password_file": password_file,
        "postgres_dsn": postgres_dsn,
        "postgres_dsn_file": dsn_file,
    }
    with extras.needed("server", "works on stores"):
        from duecourse.server import config
        from duecourse.server.telemetry import logs
    # What goes well is told below.
    logs.configure(config.LogFormat.AUTO, config.LogLevel.WARNING)
    try:
        settings = config.load({name: value for name, value in given.items() if value is not None})
        text = settings.read_postgres_dsn()
    except config.InvalidSettings as error:
        for line in str(error).splitlines():
            exits.fail(line)
        raise typer.Exit(exits.ExitCode.USAGE) from None
    with dsn.failures_told(text):
        raise typer.Exit(asyncio.run(_rebind(settings, text, to_solo=to_solo)))


async def _rebind(settings: "Settings", text: str, *, to_solo: bool) -> int:
    """Do it; returns the exit code. Raises StoreUnavailable, StoreRefused."""
    with extras.needed("server", "works on stores"):
        from duecourse.server import opening
        from duecourse.server.etcd.errors import EtcdError
        from duecourse.server.etcd.keys import Keys
        from duecourse.server.leadership import rebinding
        from duecourse.server.storage import sessions
        from duecourse.server.storage.postgres import PostgresStore

    machines = await sessions.of_nodes(text)
    if machines:
        return exits.fail(f"nodes have sessions with the store, from {', '.join(machines)}: stop all nodes first")
    keys = Keys(settings.etcd_prefix)
    async with AsyncExitStack() as stack:
        store = PostgresStore(text)
        stack.push_async_callback(store.close)
        await store.open()
        client = None
        if settings.etcd_endpoints:
            client = await stack.enter_async_context(opening.etcd_client(settings, SystemClock()))
        try:
            if to_solo:
                rows = await rebinding.to_solo(client, keys, store)
                output.say(f"{len(rows)} shards belong to a solo node: start one with coordination solo")
            else:
                assert client is not None, "coordination by etcd was checked to have endpoints"
                cluster = await rebinding.to_cluster(client, keys, store)
                output.say(
                    f"{cluster.shards} shards belong to cluster {cluster.id}: start nodes with coordination etcd"
                )
        except rebinding.NodesAlive as alive:
            return exits.fail(str(alive))
        except EtcdError as error:
            return exits.fail(f"etcd does not answer as it should: {error}", exits.ExitCode.UNAVAILABLE)
    return exits.ExitCode.DONE
