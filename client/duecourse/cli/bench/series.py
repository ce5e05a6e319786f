"""Runs a bench as often as asked, each time in a new laboratory, and reports."""

import dataclasses
from collections.abc import Awaitable, Callable

import typer
from rich.console import Console

from duecourse import client as sdk
from duecourse.cli import connection, exits, output
from duecourse.cli.bench import figures, laboratory, machine
from duecourse.cli.bench.figures import Figures
from duecourse.cli.bench.laboratory import Laboratory, Setup
from duecourse.cli.bench.meter import Meter
from duecourse.cli.launcher import running
from duecourse.cli.launcher.errors import LaunchError
from duecourse.timing.clock import SystemClock


def run(
    bench: str,
    title: str,
    setup: Setup,
    repeat: int,
    measure: Callable[[Laboratory], Awaitable[Figures]],
    as_json: bool,
) -> None:
    """Measure, print the table, and end the command: 1 if a promise was broken or something did not work."""
    connection.quieten()
    raise typer.Exit(running.run(_run(bench, title, setup, repeat, measure, as_json=as_json)))


async def _run(
    bench: str,
    title: str,
    setup: Setup,
    repeat: int,
    measure: Callable[[Laboratory], Awaitable[Figures]],
    *,
    as_json: bool,
) -> int:
    repeats: list[Figures] = []
    try:
        with Meter(SystemClock()) as meter:
            for number in range(1, repeat + 1):
                if repeat > 1:
                    meter.say(f"repeat {number} of {repeat}")
                async with laboratory.opened(setup, meter) as lab:
                    repeats.append(await measure(lab))
    except LaunchError as error:
        return running.fail(error)
    except sdk.DuecourseError as failure:
        return exits.fail(exits.explain(failure, setup.address or "the cluster"), exits.of(failure))
    figures.show(Console(), title, repeats)
    if as_json:
        output.say_json(figures.as_object(bench, machine.describe(), dataclasses.asdict(setup), repeats))
    merged = figures.merge(repeats)
    broken = [name for name in sorted(figures.WORST_COUNTS) if merged.get(name)]
    return exits.fail(f"a promise was broken: {', '.join(broken)}") if broken else exits.ExitCode.DONE
