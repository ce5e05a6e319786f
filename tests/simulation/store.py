"""The simulated store: the memory store behind links that delay, refuse, lose answers, and freeze; a link per node.

Every operation travels, is applied in one step, and its answer travels back, so that anything may happen in between. An
operation that was sent is applied even if its sender has died, unless the link loses it; a node that got no answer in
time does not know whether, or when, it will be. Without trouble it keeps all promises of `TaskStore`.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Generic, Protocol, TypeVar

from simulation.loop import Process

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.fence import Fence
from duecourse.server.core.task import Attempt, ShardId, Task, TaskKey
from duecourse.server.storage import (
    CommitAnswer,
    CorruptRecord,
    LaneRequest,
    Loaded,
    LoadedBuckets,
    Raised,
    RaiseRefused,
    RaiseRequest,
    Refused,
    ShardBatch,
    ShardRow,
    Stale,
    StoreClock,
    StoredTask,
    StoreUnavailable,
    TaskPage,
    TaskQuery,
    Unknown,
)
from duecourse.server.storage.memory import MemoryStore

_T = TypeVar("_T")
_QUICK: Final = 5 * bounds.MILLISECOND
_READ_TIMEOUT: Final = 5 * bounds.SECOND


class Trouble(StrEnum):
    """What is wrong with a link."""

    NONE = "none"
    UNREACHABLE = "unreachable"
    """Surely nothing is applied."""
    REFUSING = "refusing"
    """Reads are served; writes are refused."""
    LOSSY = "lossy"
    """Now and then a connection breaks before or after an operation was applied."""
    FROZEN = "frozen"
    """Nothing is answered until it thaws; then what waited is applied, or was lost."""
    SLOW = "slow"


class Observer(Protocol):
    """Who sees what the store applies, in the step in which it does."""

    def applied(self, process: Process, batches: Sequence[ShardBatch], answers: Mapping[ShardId, CommitAnswer]) -> None:
        """See a commit."""
        ...

    def raised(self, process: Process, answers: Mapping[ShardId, Raised | RaiseRefused]) -> None:
        """See terms begin."""
        ...

    def purged(self, process: Process, fence: Fence, ended_before: Micros) -> None:
        """See a purge that was applied or refused."""
        ...

    def set_aside(self, process: Process, fence: Fence, key: TaskKey) -> None:
        """See the end of a task whose record does not decode."""
        ...

    def knew_time(self, process: Process, at: Micros) -> None:
        """See a process learn what the store's clock showed at a time."""
        ...

    def happened(self, moment: str, process: Process) -> None:
        """See a moment go by at which a fault may strike."""
        ...


class Quiet:
    """An observer that looks away."""

    def applied(self, process: Process, batches: Sequence[ShardBatch], answers: Mapping[ShardId, CommitAnswer]) -> None:
        """Look away."""

    def raised(self, process: Process, answers: Mapping[ShardId, Raised | RaiseRefused]) -> None:
        """Look away."""

    def purged(self, process: Process, fence: Fence, ended_before: Micros) -> None:
        """Look away."""

    def set_aside(self, process: Process, fence: Fence, key: TaskKey) -> None:
        """Look away."""

    def knew_time(self, process: Process, at: Micros) -> None:
        """Look away."""

    def happened(self, moment: str, process: Process) -> None:
        """Look away."""


class Link:
    """A node's way to the store, and what is wrong with it."""

    def __init__(self, seed: object) -> None:
        self.trouble = Trouble.NONE
        self.loss = 0.3
        """How often a lossy link loses something."""
        self._random = random.Random(f"{seed} link")
        self._held: list[Callable[[], None]] = []

    def mend(self) -> None:
        """Be well again; of what was held some was lost, and the rest is applied now."""
        self.trouble = Trouble.NONE
        held, self._held = self._held, []
        for arrive in held:
            if self._random.random() < 0.7:
                arrive()

    def hold(self, arrive: Callable[[], None]) -> None:
        """Keep an operation until the link thaws."""
        self._held.append(arrive)

    def delay(self) -> Micros:
        """Draw how long one way takes."""
        draw = self._random.random()
        if self.trouble is Trouble.SLOW:
            return int(draw**3 * 4 * bounds.SECOND)
        return int(400 + draw * 300) if draw < 0.97 else int(draw * 30 * bounds.MILLISECOND)

    def loses(self) -> bool:
        """Draw whether a connection breaks now."""
        return self.trouble is Trouble.LOSSY and self._random.random() < self.loss

    def lingers(self) -> bool:
        """Draw whether a break is noticed only by the time-out, and what was sent is applied late."""
        return self._random.random() < 0.3

    def late(self) -> Micros:
        """Draw how late something that lingers is applied."""
        return int(self._random.random() * 8 * bounds.SECOND)


class _NoAnswer(Exception):
    """The answer was lost; it may or may not have been applied."""


class _NotApplied(Exception):
    """Surely not applied."""


class SimulatedStore:
    """See the module's docstring. Implements `TaskStore` for one process."""

    name = "memory"
    is_durable = False

    def __init__(
        self, backing: MemoryStore, link: Link, process: Process | None, world: Any, observer: Observer
    ) -> None:
        self._backing = backing
        self._link = link
        self._process: Any = process
        self._world = world
        self._observer = observer

    async def open(self) -> None:
        """Connect."""
        await self._read(lambda: None)

    async def close(self) -> None:
        """Do nothing."""

    async def shards(self) -> Sequence[ShardRow]:
        """Read the shard rows."""
        return await self._read(lambda: _now(self._backing.shards()))

    async def raise_epochs(
        self, coordination: str, requests: Sequence[RaiseRequest], at: Micros
    ) -> Mapping[ShardId, Raised | RaiseRefused]:
        """Begin terms."""

        def apply() -> Mapping[ShardId, Raised | RaiseRefused]:
            answers = _now(self._backing.raise_epochs(coordination, requests, at))
            self._observer.raised(self._process, answers)
            return answers

        return await self._write(apply)

    async def commit(self, batches: Sequence[ShardBatch]) -> Mapping[ShardId, CommitAnswer]:
        """Write several shards at once."""
        self._observer.happened("commit sent", self._process)
        # What the caller does with its lists once it has given up must not change what was sent.
        sent = [ShardBatch(batch.fence, list(batch.inserts), list(batch.updates)) for batch in batches]

        def apply() -> Mapping[ShardId, CommitAnswer]:
            answers = _now(self._backing.commit(sent))
            self._observer.applied(self._process, sent, answers)
            return answers

        answers: Mapping[ShardId, CommitAnswer]
        try:
            answers = await self._ask(apply, bounds.COMMIT_TIMEOUT, is_write=True)
            self._observer.happened("commit answered", self._process)
        except _NoAnswer as lost:
            answers = {batch.fence.shard: Unknown(str(lost)) for batch in batches}
        except _NotApplied as refused:
            answers = {batch.fence.shard: Refused(str(refused), is_data=False) for batch in batches}
        for answer in answers.values():
            self._note(answer)
        return answers

    async def purge(self, fence: Fence, ended_before: Micros, limit: int) -> int | Stale:
        """Delete tasks that ended long ago."""

        def apply() -> int | Stale:
            answer = _now(self._backing.purge(fence, ended_before, limit))
            if not isinstance(answer, Stale):
                self._observer.purged(self._process, fence, ended_before)
            return answer

        answer = await self._write(apply)
        if isinstance(answer, Stale):
            self._note(answer, "purge ")
        return answer

    async def set_aside(self, fence: Fence, record: CorruptRecord, at: Micros) -> bool | Stale:
        """End a task that does not decode."""

        def apply() -> bool | Stale:
            answer = _now(self._backing.set_aside(fence, record, at))
            if answer is True:
                self._observer.set_aside(self._process, fence, record.key)
            return answer

        return await self._write(apply)

    async def bind(self, coordination: str, *, is_forced: bool = False) -> Sequence[ShardRow]:
        """Write a coordination into the shard rows."""

        def apply() -> Sequence[ShardRow]:
            rows = _now(self._backing.bind(coordination, is_forced=is_forced))
            if is_forced:
                self._observer.happened("bound by force", self._process)
            return rows

        return await self._write(apply)

    async def read_clock(self) -> StoreClock:
        """Read the store's clock."""
        applied: list[tuple[StoreClock, float]] = []

        def apply() -> StoreClock:
            read = _now(self._backing.read_clock())
            applied.append((read, asyncio.get_running_loop().time()))
            return read

        asked = asyncio.get_running_loop().time()
        read = await self._read(apply)
        # A slow answer leaves too much open to tell a small step.
        if (asyncio.get_running_loop().time() - asked) * bounds.SECOND < _QUICK:
            self._observer.knew_time(self._process, int(applied[0][1] * bounds.SECOND))
        return read

    async def accept_clock(self, near: Micros | None, by: str, wall_clock_offset: Micros) -> Micros | None:
        """Have all nodes follow the store's clock."""

        def apply() -> Micros | None:
            accepted = _now(self._backing.accept_clock(near, by, wall_clock_offset))
            if accepted is not None:
                self._observer.happened("clock accepted", self._process)
            return accepted

        return await self._write(apply)

    async def confirm_clock(self, near: Micros, by: str, wall_clock_offset: Micros) -> bool:
        """Record that the store's clock is as it should be."""
        return await self._write(lambda: _now(self._backing.confirm_clock(near, by, wall_clock_offset)))

    async def load_held(self, shards: Sequence[ShardId]) -> Loaded:
        """Read what is leased or running."""
        return await self._read(lambda: _now(self._backing.load_held(shards)), "read held")

    async def load_buckets(
        self, shards: Sequence[ShardId], due_from: Micros, due_before: Micros, head: int
    ) -> LoadedBuckets:
        """Read the first tasks of every lane."""
        return await self._read(
            lambda: _now(self._backing.load_buckets(shards, due_from, due_before, head)), "read buckets"
        )

    async def load_lanes(self, requests: Sequence[LaneRequest]) -> list[Loaded]:
        """Read on in several lanes."""
        return await self._read(lambda: _now(self._backing.load_lanes(requests)), "read lanes")

    async def load_tasks(self, keys: Sequence[TaskKey]) -> list[Task | CorruptRecord | None]:
        """Read single tasks."""
        return await self._read(lambda: _now(self._backing.load_tasks(keys)), "read tasks")

    async def load_oldest_due(self, shards: Sequence[ShardId], due_before: Micros, limit: int) -> Loaded:
        """Read the oldest waiting tasks of each shard."""
        return await self._read(lambda: _now(self._backing.load_oldest_due(shards, due_before, limit)), "read audit")

    async def find_attempts(self, wanted: Sequence[tuple[TaskKey, bytes]]) -> list[Attempt | None]:
        """Find attempts by their tokens."""
        return await self._read(lambda: _now(self._backing.find_attempts(wanted)), "read attempt")

    async def read_task(self, key: TaskKey, *, full: bool) -> StoredTask | CorruptRecord | None:
        """Read a task."""
        return await self._read(lambda: _now(self._backing.read_task(key, full=full)))

    async def list_tasks(self, query: TaskQuery, after: str, limit: int) -> TaskPage:
        """List tasks in the order of their ids."""
        return await self._read(lambda: _now(self._backing.list_tasks(query, after, limit)))

    def _note(self, answer: CommitAnswer, asked: str = "") -> None:
        self._observer.happened(f"store {asked}{type(answer).__name__.lower()}", self._process)

    async def _read(self, apply: Callable[[], _T], moment: str = "") -> _T:
        try:
            answer = await self._ask(apply, _READ_TIMEOUT, is_write=False)
        except (_NoAnswer, _NotApplied) as error:
            raise StoreUnavailable(str(error)) from None
        if moment:
            self._observer.happened(moment, self._process)
        return answer

    async def _write(self, apply: Callable[[], _T]) -> _T:
        try:
            return await self._ask(apply, bounds.COMMIT_TIMEOUT, is_write=True)
        except (_NoAnswer, _NotApplied) as error:
            raise StoreUnavailable(str(error)) from None

    async def _ask(self, apply: Callable[[], _T], timeout: Micros, *, is_write: bool) -> _T:
        """Send an operation and wait for its answer."""
        if self._process is not None and self._process.is_dead:
            raise _NotApplied("the process is dead")
        operation = _Operation(self, apply, is_write=is_write)
        operation.send(timeout)
        try:
            return await operation.answer
        finally:
            operation.limit.cancel()


class _Operation(Generic[_T]):
    """Something that was asked of the store: on its way, at the store, or on its way back."""

    __slots__ = ("_apply", "_is_write", "_link", "_loop", "_store", "answer", "limit")

    def __init__(self, store: SimulatedStore, apply: Callable[[], _T], *, is_write: bool) -> None:
        self._store = store
        self._link = store._link
        self._apply = apply
        self._is_write = is_write
        self._loop = loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[_T] = loop.create_future()
        self.limit: asyncio.TimerHandle

    def send(self, timeout: Micros) -> None:
        """Send it; its sender waits so long for an answer."""
        self._later(self._link.delay(), self.arrive)
        self.limit = self._loop.call_later(timeout / bounds.SECOND, self._give_up)

    def arrive(self) -> None:
        """Be applied, or not, and answered, or not, as the link has it."""
        link = self._link
        if link.trouble is Trouble.FROZEN:
            self._note("held")
            link.hold(self.arrive)
        elif link.trouble is Trouble.UNREACHABLE or (link.trouble is Trouble.REFUSING and self._is_write):
            self._note("not applied")
            self._fail(_NotApplied(f"the store is {link.trouble}"))
        elif link.loses():
            self._note("lost before")
            if not link.lingers():
                self._fail(_NoAnswer("the connection broke"))
            elif self._is_write:
                self._later(link.late(), self._arrive_late)
        else:
            result = self._apply()
            if not link.loses():
                self._later(link.delay(), self._succeed, result)
                return
            self._note("lost after")
            if not link.lingers():
                self._fail(_NoAnswer("the connection broke"))

    def _arrive_late(self) -> None:
        self._note("late")
        self._apply()

    def _succeed(self, result: _T) -> None:
        if not self.answer.done():
            self.answer.set_result(result)

    def _fail(self, error: Exception) -> None:
        self._later(self._link.delay(), self._raise, error)

    def _raise(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def _give_up(self) -> None:
        if not self.answer.done():
            self._note("no answer in time")
            self.answer.set_exception(_NoAnswer("no answer in time"))

    def _note(self, what: str) -> None:
        self._store._observer.happened(f"store {what}", self._store._process)

    def _later(self, delay: Micros, call: Callable[..., None], *args: Any) -> None:
        self._loop.call_later(delay / bounds.SECOND, call, *args, context=self._store._world)


def _now(method: Coroutine[Any, Any, _T]) -> _T:
    """Run a method of the memory store, which never waits."""
    try:
        method.send(None)
    except StopIteration as ended:
        result: _T = ended.value
        return result
    raise AssertionError("the memory store waits for nothing")
