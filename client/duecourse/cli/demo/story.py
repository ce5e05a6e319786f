"""The demonstration from beginning to end: start, submit, kill, start again, wait, judge, leave nothing behind."""

import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from rich.console import Console

from duecourse import client as sdk
from duecourse.cli import exits, output
from duecourse.cli.demo import evidence, report
from duecourse.cli.demo.reminders import TASK_TYPE
from duecourse.cli.demo.stage import Stage
from duecourse.cli.launcher import running
from duecourse.cli.launcher.children import Child, Nursery
from duecourse.cli.launcher.cluster import LocalCluster
from duecourse.cli.launcher.errors import LaunchError
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import Clock, SystemClock

QUEUE: Final = "reminders"
_LEAD: Final = 2 * bounds.SECOND
_SUBMITTED_PER_SECOND: Final = 4_000
_LOOK_EVERY: Final = 100 * bounds.MILLISECOND
_PATIENCE: Final = bounds.DEFAULT_LEASE + 30 * bounds.SECOND
_OPEN: Final = frozenset((sdk.TaskState.PENDING, sdk.TaskState.LEASED, sdk.TaskState.RUNNING, sdk.TaskState.RETRY_WAIT))


async def tell(tasks: int, seconds: int, nodes: int, *, keep: bool, as_json: bool) -> int:
    """Run the demonstration; returns the exit code."""
    console = Console(stderr=as_json)
    stage = Stage(console, SystemClock())
    folder = Path(tempfile.mkdtemp(prefix="duecourse-demo-"))
    try:
        with Nursery() as nursery:
            play = Play(nursery, folder, stage, SystemClock(), tasks=tasks, seconds=seconds, nodes=nodes)
            verdict, outage = await play.run()
        report.show(console, verdict, outage)
        if as_json:
            output.say_json(report.as_object(verdict, outage))
        return 0 if verdict.is_kept else 1
    except LaunchError as error:
        return running.fail(error)
    except sdk.DuecourseError as failure:
        return exits.fail(exits.explain(failure, "the demonstration's node"), exits.of(failure))
    finally:
        if keep:
            console.print(f"kept: {folder}", highlight=False)
        else:
            shutil.rmtree(folder, ignore_errors=True)


class Play:
    """The demonstration while it runs."""

    def __init__(
        self, nursery: Nursery, folder: Path, stage: Stage, clock: Clock, *, tasks: int, seconds: int, nodes: int
    ) -> None:
        self._nursery = nursery
        self._folder = folder
        self._stage = stage
        self._clock = clock
        self._tasks = tasks
        self._seconds = seconds
        self._nodes = nodes
        self._file = folder / "starts.txt"
        self._file.touch()

    async def run(self) -> tuple[evidence.Verdict, report.Outage]:
        """Play it; returns what the worker's file proves, and what was done to the scheduler."""
        settings = {"drain": "1s", "log_format": "json"}
        async with LocalCluster(
            self._nursery,
            self._folder / "data",
            nodes=self._nodes,
            settings=settings,
            logs=self._folder,
            tell=self._stage.say,
        ) as local:
            worker = self._start_worker(local.address)
            size = "one node" if self._nodes == 1 else f"{self._nodes} nodes"
            self._stage.say(f"a cluster of {size} serves on {local.address}; a worker connects to it")
            async with sdk.Client(local.addresses) as client:
                await self._wait_for_worker(client)
                run_at = await self._submit(client)
                with self._stage.counting(self._tasks):
                    await self._wait_for_the_middle(local, worker, run_at)
                    outage = await (self._replace(local, client) if self._nodes == 1 else self._lose_one(local, client))
                    await self._wait_for_the_end(client, worker, run_at)
                self._stage.say("everything has ended; asking the worker to stop, then reading its file")
                await worker.stop(10 * bounds.SECOND)
                starts = evidence.read(self._file.read_text().splitlines())
                outcomes = await _outcomes(client, evidence.repeated(starts))
        return evidence.judge(run_at, starts, outcomes, (outage.killed_at, outage.over_at)), outage

    def _start_worker(self, address: str) -> Child:
        return self._nursery.spawn(
            "worker",
            [sys.executable, "-m", "duecourse.cli.demo.reminders", address, QUEUE, str(self._file)],
            output=self._folder / "worker.log",
        )

    async def _submit(self, client: sdk.Client) -> Mapping[str, Micros]:
        """Submit all reminders; returns when each is due."""
        lead = _LEAD + self._tasks * bounds.SECOND // _SUBMITTED_PER_SECOND
        first = self._clock.now().latest + lead
        run = secrets.token_hex(4)
        run_at = {
            f"reminder-{run}-{index:06}": first + index * self._seconds * bounds.SECOND // self._tasks
            for index in range(self._tasks)
        }
        began = self._clock.elapsed()
        results = await client.submit_many(
            sdk.NewTask(
                TASK_TYPE, {"say": f"this is {task_id}"}, task_id=task_id, queue=QUEUE, run_at=_as_datetime(micros)
            )
            for task_id, micros in run_at.items()
        )
        refusals = [result for result in results if isinstance(result, sdk.DuecourseError)]
        if refusals:
            raise LaunchError(f"{len(refusals):,} submissions were not acknowledged, the first because: {refusals[0]}")
        took = (self._clock.elapsed() - began) / bounds.SECOND
        self._stage.say(
            f"submitted {self._tasks:,} reminders in {took:.2f} s, all acknowledged; the first is due"
            f" in {(first - self._clock.now().latest) / bounds.SECOND:.1f} s, the last {self._seconds} s later"
        )
        return run_at

    async def _wait_for_the_middle(self, local: LocalCluster, worker: Child, run_at: Mapping[str, Micros]) -> None:
        middle = (min(run_at.values()) + max(run_at.values())) // 2
        while self._clock.now().latest < middle:
            if (ended := local.what_ended()) is not None:
                raise LaunchError(ended)
            self._show(worker, run_at)
            await self._clock.sleep(_LOOK_EVERY)

    async def _replace(self, local: LocalCluster, client: sdk.Client) -> report.Outage:
        """Kill the only node, and start it again."""
        killed_at = self._clock.now().latest
        local.kill_node()
        self._stage.say("killed the scheduler with SIGKILL", "yellow")
        await local.start_node()
        serving_at = self._clock.now().latest
        self._stage.say(f"it serves again after {(serving_at - killed_at) / bounds.SECOND:.2f} s", "yellow")
        await self._wait_for_worker(client)
        over_at = self._clock.now().latest
        self._stage.say(f"the worker has found it after {(over_at - killed_at) / bounds.SECOND:.2f} s", "yellow")
        return report.Outage(killed_at=killed_at, serving_at=serving_at, over_at=over_at)

    async def _lose_one(self, local: LocalCluster, client: sdk.Client) -> report.Outage:
        """Kill a node that leads shards, for good."""
        cluster = await client.cluster()
        led = {node.name: sum(shard.leader == node.name for shard in cluster.shards) for node in local.nodes}
        victim = max(led, key=led.__getitem__)
        killed_at = self._clock.now().latest
        local.kill_node(list(led).index(victim))
        self._stage.say(
            f"killed {victim}, which led {led[victim]} of {len(cluster.shards)} shards, by SIGKILL", "yellow"
        )
        give_up = self._clock.elapsed() + _PATIENCE
        while not _are_led(await client.cluster(), without=victim) and self._clock.elapsed() < give_up:
            await self._clock.sleep(_LOOK_EVERY // 5)
        over_at = self._clock.now().latest
        self._stage.say(f"the others lead all shards after {(over_at - killed_at) / bounds.SECOND:.2f} s", "yellow")
        return report.Outage(killed_at=killed_at, serving_at=over_at, over_at=over_at, is_partial=True)

    async def _wait_for_worker(self, client: sdk.Client) -> None:
        """Return once the worker has connected; what it does not do for long is for the judge."""
        give_up = self._clock.elapsed() + _PATIENCE
        while (await client.cluster()).worker_streams == 0 and self._clock.elapsed() < give_up:
            await self._clock.sleep(_LOOK_EVERY // 5)

    async def _wait_for_the_end(self, client: sdk.Client, worker: Child, run_at: Mapping[str, Micros]) -> None:
        """Return when all tasks have ended, or when they should have: what is missing then is the judge's affair."""
        give_up = max(run_at.values()) + _PATIENCE
        while self._show(worker, run_at) < self._tasks and self._clock.now().latest < give_up:
            await self._clock.sleep(_LOOK_EVERY)
        # Only ended tasks cannot be started again: until then a repeat may still come.
        while await _are_open(client) and self._clock.now().latest < give_up:
            await self._clock.sleep(_LOOK_EVERY)

    def _show(self, worker: Child, run_at: Mapping[str, Micros]) -> int:
        """Show where it stands; returns how many tasks the worker's file names."""
        if not worker.is_running:
            log = (self._folder / "worker.log").read_text(errors="replace")
            raise LaunchError(f"the worker {worker.how_it_ended()}; the end of its log:\n{log[-2_000:].strip()}")
        complete_lines = self._file.read_text().rpartition("\n")[0].splitlines()
        run = len({line.partition(" ")[0] for line in complete_lines})
        now = self._clock.now().latest
        self._stage.count(run, sum(micros <= now for micros in run_at.values()), self._tasks)
        return run


def _are_led(cluster: sdk.Cluster, *, without: str) -> bool:
    return all(shard.state is sdk.ShardState.LED and shard.leader != without for shard in cluster.shards)


async def _are_open(client: sdk.Client) -> bool:
    wanted = sdk.TaskFilter(queue=QUEUE, states=_OPEN)
    async for _ in client.list(wanted):
        return True
    return False


async def _outcomes(
    client: sdk.Client, repeated: Mapping[str, object]
) -> dict[str, dict[int, sdk.AttemptOutcome | None]]:
    """Look the attempts up of tasks that were started more than once."""
    found = {}
    for task_id in repeated:
        task = await client.get(task_id, full=True)
        found[task_id] = {attempt.number: attempt.outcome for attempt in task.attempts or ()}
    return found


def _as_datetime(micros: Micros) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
