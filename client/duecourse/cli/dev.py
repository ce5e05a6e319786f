"""`duecourse dev`: a whole Duecourse in one command, for developing against.

It owns a data folder, runs Postgres and one node on it, passes the node's log through, and stops everything when it is
told to or when one of the two ends by itself. What was submitted is kept for the next run.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from duecourse.cli import exits, output
from duecourse.model import bounds


def dev(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the data between runs. Default: one of your own, which is printed."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Where clients and workers connect.")] = bounds.API_PORT,
    admin_port: Annotated[
        int, typer.Option(min=1, max=65_535, help="Where /metrics, /healthz and /readyz are.")
    ] = bounds.ADMIN_PORT,
) -> None:
    """Run Duecourse on this machine for developing: Postgres included, nothing else to install.

    Ctrl-C stops everything that was started; the data is kept.
    Ends with 1 if something did not start or ended by itself.
    """
    from duecourse.cli.launcher import running

    raise typer.Exit(running.run(_dev(data or default_folder(), port, admin_port), when_interrupted=0))


def default_folder() -> Path:
    """Return where data is kept if nobody says."""
    if os.geteuid() == 0:
        # Postgres then runs as another user, who could not reach into root's home.
        return Path("/var/lib/duecourse/dev")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "duecourse" / "dev"


async def _dev(folder: Path, port: int, admin_port: int) -> int:
    from duecourse.cli.launcher import children, cluster, running
    from duecourse.timing.clock import SystemClock

    for name, wanted in (("port", port), ("admin-port", admin_port)):
        if not cluster.is_free(wanted):
            return exits.fail(f"port {wanted} is in use: is another `duecourse dev` running? Choose another --{name}")
    clock = SystemClock()
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
                nursery, folder, api_port=port, admin_port=admin_port, settings=settings, tell=output.tell
            ) as solo:
                _welcome(solo.address, solo.admin_port)
                while (ended := solo.what_ended()) is None:
                    await clock.sleep(100 * bounds.MILLISECOND)
                return exits.fail(f"{ended}; stopping the rest")
    except (cluster.LaunchError, OSError) as error:
        return running.fail(error)


def _welcome(address: str, admin_port: int) -> None:
    from duecourse.cli.launcher.cluster import HOST

    lines = [
        "",
        f"Duecourse is ready on {address} (metrics: http://{HOST}:{admin_port}/metrics). Now try, elsewhere:",
        "",
        '  duecourse task submit --type greet --delay 10s --payload \'{"name": "you"}\'',
        "  duecourse task list",
        "  duecourse cluster status",
        "",
        "Ctrl-C stops everything.",
        "",
    ]
    if not address.endswith(f":{bounds.API_PORT}"):
        lines.insert(3, f"  export DUECOURSE_ADDRESS={address}")
    for line in lines:
        output.tell(line)
