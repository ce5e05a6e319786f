"""The commands of `duecourse bench`: their options, and what is refused. They import the rest only when they run."""

from typing import TYPE_CHECKING, Annotated

import typer

from duecourse.cli import exits, values

if TYPE_CHECKING:
    from duecourse.cli.bench.laboratory import Setup

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure how fast and how punctual it is. Progress on stderr, the table on stdout.",
    epilog=exits.EPILOG,
)

Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Measure a running cluster, and leave the tasks in it, in queues named bench-*. Default: start one with"
        " embedded Postgres, on a temporary folder.",
    ),
]
Store = Annotated[str, typer.Option(metavar="STORE", help="Store of the cluster that is started: postgres, or memory.")]
Nodes = Annotated[int, typer.Option(min=1, max=9, help="Nodes of the cluster that is started.")]
Coordination = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Coordination of the cluster that is started: solo, or etcd, which is started, too. Default: solo for one"
        " node, etcd for more.",
    ),
]
Payload = Annotated[int, typer.Option(min=0, max=100_000, metavar="BYTES", help="Size of a task's payload.")]
Batch = Annotated[int, typer.Option(min=1, max=1_000, help="Tasks a call.")]
InFlight = Annotated[int, typer.Option(min=1, max=1_000, help="Calls in flight, where load is a closed loop.")]
Workers = Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")]
Slots = Annotated[int, typer.Option(min=1, max=65_536, help="Tasks that each worker takes at a time.")]
Repeat = Annotated[int, typer.Option(min=1, max=100, help="Measure so often, and report the medians.")]
Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]
Only = Annotated[str | None, typer.Option(metavar="HALF", help="Measure only this half, named above.")]


@app.command(epilog=exits.EPILOG)
def submit(
    only: Only = None,
    duration: Annotated[
        str, typer.Option(metavar="DURATION", help="How long each half is measured, after a warm-up.")
    ] = "10s",
    batch: Batch = 100,
    in_flight: InFlight = 8,
    payload: Payload = 200,
    repeat: Repeat = 1,
    address: Address = None,
    store: Store = "postgres",
    nodes: Nodes = 1,
    coordination: Coordination = None,
    json_output: Json = False,
) -> None:
    """Measure submissions: in batches (--only batch), and single ones with 64 in flight (--only single)."""
    from duecourse.cli.bench import series, submit

    kinds = _kinds(only, "batch", "single")
    setup = _setup(address, store, nodes, coordination, payload=payload, batch=batch, in_flight=in_flight)
    time = values.duration("--duration", duration)
    title = f"submit, {payload} B payload, {duration}"
    series.run("submit", title, setup, repeat, lambda lab: submit.measure(lab, duration=time, kinds=kinds), json_output)


@app.command(epilog=exits.EPILOG)
def throughput(
    only: Only = None,
    count: Annotated[int, typer.Option(min=1_000, help="Backlog of the drain.")] = 100_000,
    duration: Annotated[str, typer.Option(metavar="DURATION", help="How long the live rate is held.")] = "30s",
    rate: Annotated[
        float | None, typer.Option(min=1, help="Live rate to hold, tasks a second. Default: the highest is searched.")
    ] = None,
    batch: Batch = 100,
    in_flight: InFlight = 8,
    payload: Payload = 200,
    workers: Workers = 1,
    slots: Slots = 1_000,
    repeat: Repeat = 1,
    address: Address = None,
    store: Store = "postgres",
    nodes: Nodes = 1,
    coordination: Coordination = None,
    json_output: Json = False,
) -> None:
    """Measure tasks run a second: a backlog (--only drain), and as they are submitted (--only live)."""
    from duecourse.cli.bench import series, throughput

    kinds = _kinds(only, "drain", "live")
    setup = _setup(
        address, store, nodes, coordination,
        payload=payload, batch=batch, in_flight=in_flight, workers=workers, slots=slots,
    )  # fmt: skip
    time = values.duration("--duration", duration)
    series.run(
        "throughput",
        f"throughput ({', '.join(sorted(kinds))}), {payload} B payload, {workers} worker(s)",
        setup,
        repeat,
        lambda lab: throughput.measure(lab, kinds=kinds, backlog=count, duration=time, rate=rate),
        json_output,
    )


@app.command(epilog=exits.EPILOG)
def lateness(
    rate: Annotated[float, typer.Option(min=0.1, help="Tasks a second that become due.")] = 200,
    duration: Annotated[
        str, typer.Option(metavar="DURATION", help="How long it is measured, after the warm-up.")
    ] = "30s",
    warm_up: Annotated[
        str, typer.Option(metavar="DURATION", help="How long before that tasks come that are not measured.")
    ] = "3s",
    lead: Annotated[str, typer.Option(metavar="DURATION", help="How long before its time a task is submitted.")] = "2s",
    batch: Batch = 100,
    payload: Payload = 200,
    workers: Workers = 1,
    slots: Slots = 1_000,
    repeat: Repeat = 1,
    address: Address = None,
    store: Store = "postgres",
    nodes: Nodes = 1,
    coordination: Coordination = None,
    json_output: Json = False,
) -> None:
    """Measure how long after their time tasks start, with arrivals that were fixed in advance."""
    from duecourse.cli.bench import lateness, series

    setup = _setup(address, store, nodes, coordination, payload=payload, batch=batch, workers=workers, slots=slots)
    time, before = values.duration("--duration", duration), values.duration("--warm-up", warm_up)
    ahead = values.duration("--lead", lead)
    series.run(
        "lateness",
        f"lateness at {rate:,g}/s, {payload} B payload, {duration}",
        setup,
        repeat,
        lambda lab: lateness.measure(lab, rate=rate, duration=time, warm_up=before, lead=ahead),
        json_output,
    )


@app.command(epilog=exits.EPILOG)
def pending(
    count: Annotated[int, typer.Option(min=1_000, help="How many tasks wait.")] = 1_000_000,
    due: Annotated[bool, typer.Option("--due", help="All due at one instant, and drained for a while.")] = False,
    duration: Annotated[str, typer.Option(metavar="DURATION", help="With --due: how long they are drained.")] = "15s",
    batch: Batch = 500,
    in_flight: InFlight = 8,
    payload: Payload = 200,
    workers: Workers = 1,
    slots: Slots = 1_000,
    repeat: Repeat = 1,
    nodes: Nodes = 1,
    coordination: Coordination = None,
    json_output: Json = False,
) -> None:
    """Measure what waiting tasks cost: the node's memory, and how soon it serves after it was killed."""
    from duecourse.cli.bench import pending, series
    from duecourse.cli.bench.figures import Figures
    from duecourse.cli.bench.laboratory import Laboratory

    if nodes != 1:
        raise typer.BadParameter("it weighs one node", param_hint="--nodes")
    setup = _setup(
        None, "postgres", nodes, coordination,
        payload=payload, batch=batch, in_flight=in_flight, workers=workers, slots=slots,
    )  # fmt: skip
    time = values.duration("--duration", duration)

    async def measure(lab: Laboratory) -> Figures:
        if due:
            return await pending.measure_due(lab, count=count, duration=time)
        return await pending.measure_far(lab, count=count)

    where = "due at once" if due else "beyond the horizon"
    series.run("pending", f"{count:,} pending, {where}, {payload} B payload", setup, repeat, measure, json_output)


def _kinds(only: str | None, *kinds: str) -> frozenset[str]:
    if only is None:
        return frozenset(kinds)
    if only not in kinds:
        raise typer.BadParameter(f"{' or '.join(kinds)} is wanted", param_hint="--only")
    return frozenset((only,))


def _setup(
    address: str | None,
    store: str,
    nodes: int,
    coordination: str | None,
    *,
    payload: int,
    batch: int = 100,
    in_flight: int = 8,
    workers: int = 1,
    slots: int = 1_000,
) -> "Setup":
    """Check what is asked for together; a cluster that cannot be started is refused."""
    from duecourse.cli.bench.laboratory import Setup

    if store not in ("postgres", "memory"):
        raise typer.BadParameter("postgres or memory is wanted", param_hint="--store")
    if coordination not in (None, "solo", "etcd"):
        raise typer.BadParameter("solo or etcd is wanted", param_hint="--coordination")
    coordination = coordination or ("solo" if nodes == 1 else "etcd")
    if coordination == "solo" and nodes != 1:
        raise typer.BadParameter("a cluster with the coordination solo has one node", param_hint="--nodes")
    if coordination == "etcd" and store == "memory":
        raise typer.BadParameter("nodes that meet in etcd share a store: postgres is wanted", param_hint="--store")
    return Setup(
        address=address,
        store=store,
        payload_bytes=payload,
        batch=batch,
        in_flight=in_flight,
        workers=workers,
        slots=slots,
        nodes=nodes,
        coordination=coordination,
    )
