"""The clock of a node: it reads, goes on where it cannot, and says what is amiss."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.clock.cluster_clock import READING_INTERVAL, ClusterClock
from duecourse.server.storage import StoreClock, StoreUnavailable
from duecourse.server.storage.memory import MemoryStore
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing.clock import ManualClock


class Local(ManualClock):
    """A machine's own clock; its wall clock may be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Micros = 0

    def wall(self) -> Micros:
        return self.now().earliest + self.error


class Reference(MemoryStore):
    """A store whose clock may be off, or not be read."""

    def __init__(self, local: Local) -> None:
        super().__init__(1, wall=lambda: local.now().earliest + self.ahead)
        self.ahead: Micros = 0
        self.is_away = False

    async def read_clock(self) -> StoreClock:
        if self.is_away:
            raise StoreUnavailable("it is away")
        return await super().read_clock()


@dataclass
class Node:
    group: asyncio.TaskGroup
    local: Local = field(default_factory=Local)
    metrics: Metrics = field(default_factory=Metrics)
    others: Sequence[Micros] | None = ()
    running: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.reference = Reference(self.local)
        self.clock = ClusterClock(self.reference, self.local, "node", self.metrics, lambda: self.others)

    async def passes(self, duration: Micros) -> None:
        """Let time pass, reading by reading; the first time, begin."""
        if self.running is None:
            self.running = self.group.create_task(self.clock.run())
        for _ in range(duration // READING_INTERVAL):
            await self.local.advance(READING_INTERVAL)
            for _ in range(4):
                await self.local.sleep(0)

    def shown(self, name: str) -> str:
        (line,) = [line for line in self.metrics.render().decode().splitlines() if line.startswith(f"duecourse_{name}")]
        return line.split()[-1]


@pytest_asyncio.fixture
async def node() -> AsyncIterator[Node]:
    async with asyncio.TaskGroup() as group:
        yield (one := Node(group))
        assert one.running is not None
        one.running.cancel()


async def test_it_is_set_at_once_where_clocks_agree(node: Node) -> None:
    assert not node.clock.is_set
    assert node.clock.why_not_set() == "the store's clock has not been read yet"
    assert (node.clock.wall_clock_offset(), node.clock.uncertainty(), node.clock.alarms()) == (0, 0, [])
    await node.passes(bounds.SECOND)
    assert node.clock.is_set
    assert node.clock.why_not_set() is None
    assert node.clock.alarms() == []
    assert abs(node.clock.now().earliest - node.local.wall()) < bounds.MILLISECOND
    assert 0 < node.clock.uncertainty() < bounds.MILLISECOND


async def test_before_it_knows_whether_there_are_others_it_accepts_nothing(node: Node) -> None:
    node.others = None
    await node.passes(bounds.MINUTE)
    assert not node.clock.is_set
    assert node.clock.why_not_set() == "no other node has confirmed the store's clock yet"
    node.others = ()
    await node.passes(bounds.SECOND)
    assert node.clock.is_set
    node.others, node.local.error, node.reference.ahead = None, bounds.HOUR, bounds.HOUR
    await node.passes(bounds.SECOND)
    assert len(node.clock.alarms()) == 2
    node.others = ()
    await node.passes(bounds.SECOND)
    assert node.clock.alarms() == []


async def test_without_readings_it_goes_on_and_says_so(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    await node.passes(bounds.SECOND)
    node.reference.is_away = True
    await node.passes(10 * bounds.SECOND)
    assert int(float(node.shown('clock_readings_total{result="failed"}'))) >= 20
    assert 5 * bounds.MILLISECOND < node.clock.uncertainty() < 6 * bounds.MILLISECOND
    assert node.clock.now().earliest <= node.local.wall() <= node.clock.now().latest
    node.reference.is_away = False
    await node.passes(bounds.SECOND)
    assert node.clock.uncertainty() < bounds.MILLISECOND
    logged = capsys.readouterr()
    assert (logged.out + logged.err).count("clock_not_read") == 1
    assert (logged.out + logged.err).count("clock_read_again") == 1


async def test_a_reference_that_is_refused_is_told_once_and_by_how_much(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    await node.passes(bounds.SECOND)
    node.reference.ahead = -bounds.HOUR
    await node.passes(10 * bounds.SECOND)
    (alarm,) = node.clock.alarms()
    assert alarm.startswith("the store's clock is 3600.0 s behind the cluster clock")
    assert node.clock.why_not_set() is None
    assert round(float(node.shown("reference_offset_seconds"))) == -3600
    logged = capsys.readouterr()
    assert (logged.out + logged.err).count("clock_refused") == 1
    await node.reference.accept_clock(None, "operator", 0)
    await node.passes(bounds.SECOND)
    (alarm,) = node.clock.alarms()
    assert alarm.startswith("this machine's wall clock is 3600.0 s ahead of the cluster clock")
    assert float(node.shown("reference_offset_seconds")) == 0
    assert round(float(node.shown("wall_clock_offset_seconds"))) == 3600


async def test_a_clock_that_is_wrong_at_the_start_is_told(node: Node) -> None:
    node.local.error = bounds.HOUR
    await node.passes(bounds.SECOND)
    told = node.clock.why_not_set()
    assert told is not None
    assert told.startswith("the store's clock is 3600.0 s behind this machine's")
    assert "accept-clock" in told
