"""Measures for how long shards do not fire when their leader goes, and what a cluster costs that has nothing to do.

    python -m faults.failover --repeat 5

Three nodes with the default session on a Postgres and an etcd of their own; one worker. Tasks were submitted before,
for every shard one each quarter of a second. In the middle of them something is done to one node; the figure is the
lateness of the latest start of what was due from then on, by the machine's clock, of the shards that the node led, and
of all others. A quiet round shows what the others' figure is without any fault.
"""

import argparse
import asyncio
import os
import random
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from faults.cluster import NodeProcess
from faults.cluster_of_nodes import EVERYTHING, ClusterOfNodes
from faults.recording_client import Ask
from services.etcd import EtcdCluster
from services.freezing import frozen
from services.ports import free_port
from simulation import arguments

from duecourse.cli.launcher.children import Nursery
from duecourse.cli.launcher.running import INTERRUPTED
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.storage.embedded import EmbeddedPostgres
from duecourse.server.storage.migrate import migrate

SHARDS: Final = bounds.DEFAULT_SHARDS
SPACING: Final = bounds.SECOND // 4
BEFORE: Final = bounds.SECOND
AFTER: Final = bounds.DEFAULT_SESSION + 3 * bounds.SECOND
HELD: Final = AFTER + 2 * bounds.SECOND
"""How long what is done lasts: its end is not to be seen in what is measured."""
QUIET: Final = "quiet"
OTHERS_BOUND: Final = 100 * bounds.MILLISECOND
_SILENT_BOUND: Final = bounds.DEFAULT_SESSION + 2 * bounds.SECOND
BOUNDS: Final = {
    "kill -9": _SILENT_BOUND,
    "SIGSTOP": _SILENT_BOUND,
    "silent cut": _SILENT_BOUND,
    "hand-over": 300 * bounds.MILLISECOND,
}
"""For the shards of the node that it is done to."""
IDLE: Final = 20 * bounds.SECOND
REQUESTS_BOUND: Final = 20.0
CPU_BOUND: Final = 0.02

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_SETTINGS: Final = {
    "placement_settles": f"{bounds.PLACEMENT_SETTLES}us",
    "session": f"{bounds.DEFAULT_SESSION}us",
    "lease": f"{bounds.DEFAULT_LEASE}us",
    "heartbeat": f"{bounds.DEFAULT_HEARTBEAT}us",
}


@dataclass(slots=True)
class Series:
    """The figures of all rounds of one kind."""

    concerned: list[Micros] = field(default_factory=list)
    others: list[Micros] = field(default_factory=list)


async def _nothing(_: ClusterOfNodes, __: NodeProcess) -> None:
    pass


async def _kill(cluster: ClusterOfNodes, node: NodeProcess) -> None:
    node.kill()
    await cluster.clock.sleep(HELD)
    await node.start()


async def _freeze(cluster: ClusterOfNodes, node: NodeProcess) -> None:
    with frozen(node.child.pid):
        await cluster.clock.sleep(HELD)


async def _cut(cluster: ClusterOfNodes, node: NodeProcess) -> None:
    links = cluster.links[node.name].values()
    for link in links:
        link.cut()
    await cluster.clock.sleep(HELD)
    assert all(link.faults["cut"] for link in links), "nothing was cut"
    for link in links:
        link.heal()


async def _drain(cluster: ClusterOfNodes, node: NodeProcess) -> None:
    node.signal(signal.SIGTERM)
    assert await node.ended() == 0
    await cluster.clock.sleep(HELD)
    await node.start()


STRIKES: Final[dict[str, Callable[[ClusterOfNodes, NodeProcess], Awaitable[None]]]] = {
    QUIET: _nothing,
    "kill -9": _kill,
    "SIGSTOP": _freeze,
    "silent cut": _cut,
    "hand-over": _drain,
}


async def _round(cluster: ClusterOfNodes, kind: str, name: str) -> tuple[Micros, Micros]:
    """Do one thing to one node in the middle of load; returns the largest lateness of its shards and of the others."""
    # The last one is behind proxies, which would cost time in any other round.
    node = cluster.nodes[-1] if kind == "silent cut" else cluster.nodes[cluster.source.randrange(2)]
    led = await cluster.leads(node)
    shard_of: dict[str, int] = {}
    asks: list[Ask] = []
    begin = cluster.clock.now().latest + 3 * bounds.SECOND
    for shard in range(cluster.shards):
        first = begin + SPACING * shard // cluster.shards
        for number in range((BEFORE + AFTER) // SPACING):
            task_id = cluster.id_in(shard, f"{name}-{number}")
            shard_of[task_id] = shard
            asks.append(Ask(task_id, first + number * SPACING))
    async with cluster.client() as client:
        await client.submit(*asks)
    await cluster.clock.sleep(begin + BEFORE - cluster.clock.now().latest)
    strike = cluster.clock.now().latest
    await STRIKES[kind](cluster, node)
    await cluster.until_started(*shard_of)
    await cluster.until_led(*cluster.nodes)
    late = {ask.task_id: cluster.starts(ask.task_id)[0].wall - (ask.run_at or 0) for ask in asks}
    counted = [ask.task_id for ask in asks if (ask.run_at or 0) >= strike - SPACING]
    concerned = max(late[task_id] for task_id in counted if shard_of[task_id] in led)
    return concerned, max(late[task_id] for task_id in counted if shard_of[task_id] not in led)


async def _idle(cluster: ClusterOfNodes, etcd: EtcdCluster) -> tuple[float, list[float]]:
    """Return how many messages a second etcd gets, and how much of a core each node takes, with nothing to do."""
    (member,) = etcd.members
    # What is due and what was measured before is over.
    await cluster.clock.sleep(5 * bounds.SECOND)
    began, messages = cluster.clock.elapsed(), await member.messages_received()
    used = [_cpu_seconds(node.child.pid) for node in cluster.nodes]
    await cluster.clock.sleep(IDLE)
    seconds = (cluster.clock.elapsed() - began) / bounds.SECOND
    shares = [
        (_cpu_seconds(node.child.pid) - before) / seconds for node, before in zip(cluster.nodes, used, strict=True)
    ]
    return (await member.messages_received() - messages) / seconds, shares


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@asynccontextmanager
async def _laboratory(folder: Path, seed: str) -> AsyncIterator[tuple[ClusterOfNodes, EtcdCluster]]:
    async with AsyncExitStack() as stack:
        nursery = stack.enter_context(Nursery())
        postgres = await stack.enter_async_context(EmbeddedPostgres(folder, port=free_port()))
        await migrate(postgres.dsn, SHARDS)
        etcd = await stack.enter_async_context(EtcdCluster(folder / "etcd"))
        cluster = ClusterOfNodes(
            folder / "cluster",
            postgres.dsn,
            nursery,
            random.Random(seed),
            stack,
            etcd=etcd.endpoints,
            nodes=3,
            links={"node-3": EVERYTHING},
            settings=_SETTINGS,
            shards=SHARDS,
        )
        await stack.enter_async_context(cluster)
        yield cluster, etcd


async def measure(repeat: int, kinds: list[str], seed: str, folder: Path) -> bool:
    """Measure and tell; False: a bound was missed."""
    series = {kind: Series() for kind in kinds}
    async with _laboratory(folder, seed) as (cluster, etcd):
        cluster.start_worker(slots=500)
        await cluster.recovers("the start")
        requests, shares = await _idle(cluster, etcd)
        for number in range(repeat):
            for kind in kinds:
                concerned, others = await _round(cluster, kind, f"{kind.replace(' ', '-')}-{number}")
                series[kind].concerned.append(concerned)
                series[kind].others.append(others)
                print(f"{kind}: {_ms(concerned)} ms, other shards {_ms(others)} ms", flush=True)
        await cluster.settle()
    return _report(series, requests, shares)


def _report(series: dict[str, Series], requests: float, shares: list[float]) -> bool:
    quiet = int(statistics.median(series[QUIET].concerned + series[QUIET].others))
    print(f"\n{'':12}{'median':>9}{'bound':>9}{'least':>9}{'most':>9}   other shards, median; quiet: {_ms(quiet)} ms")
    verdicts = []
    for kind, found in series.items():
        if kind == QUIET:
            continue
        median, others = int(statistics.median(found.concerned)), int(statistics.median(found.others))
        verdicts += [median <= BOUNDS[kind], others <= quiet + OTHERS_BOUND]
        figures = (median, BOUNDS[kind], min(found.concerned), max(found.concerned))
        print(f"{kind:12}" + "".join(f"{_ms(figure):>9}" for figure in figures) + f"   {_ms(others)}")
    verdicts += [requests <= REQUESTS_BOUND, max(shares) <= CPU_BOUND]
    print(f"idle: etcd {requests:.1f} messages/s, nodes {', '.join(f'{share:.1%}' for share in shares)} of a core")
    return all(verdicts)


def _ms(duration: Micros) -> str:
    return f"{duration / bounds.MILLISECOND:.0f}"


def main(given_arguments: Sequence[str] | None = None) -> int:
    """Measure from the command line; exit code 1: a bound was missed."""
    parser = argparse.ArgumentParser(prog="faults.failover", description="Measure the time without firing.")
    parser.add_argument(
        "--repeat",
        type=arguments.positive,
        default=5,
        help="rounds of each kind, of which the median counts (default: 5)",
    )
    parser.add_argument(
        "--only", choices=list(BOUNDS), action="append", help="measure this, and no other kind (default: all of them)"
    )
    parser.add_argument("--seed", default=secrets.token_hex(4), help="whom it is done to (default: drawn)")
    given = parser.parse_args(given_arguments)
    kinds = [QUIET, *(given.only or BOUNDS)]
    folder = Path(tempfile.mkdtemp(prefix="duecourse-failover-"))
    # As root, Postgres runs as a user of its own, who has to get there.
    folder.chmod(0o755)
    try:
        is_within = asyncio.run(measure(given.repeat, kinds, given.seed, folder))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
