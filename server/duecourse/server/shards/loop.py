"""`Loop`: drives all shards of a node from one inbox, and carries out what they ask for.

A turn takes everything that arrived, lets the shards handle it, matches ready tasks with workers, and hands the effects
on in batches. Turns run when something arrived and when something is due; between them nothing is done, and no sleep is
longer than a second. A shard that fails in a way that nobody foresaw ends its own term, not the node.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Never, Protocol

from duecourse.model import bounds, slots
from duecourse.model.instants import Micros, Now
from duecourse.server.core import callers, errors
from duecourse.server.core.effects import Answer, Assignment, Effects, StopReason, Verdict
from duecourse.server.core.events import Event, Grant, Tick, Unsent
from duecourse.server.core.lease import Holder, Lease
from duecourse.server.core.matcher import Matcher
from duecourse.server.core.shard import Shard
from duecourse.server.core.task import Epoch, Lane, ShardId
from duecourse.server.core.writes import Write
from duecourse.server.failpoints import AFTER_ANSWER, BEFORE_ASSIGNMENT, Failpoints
from duecourse.server.shards.agenda import Agenda
from duecourse.server.telemetry import logs
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing.clock import Clock

_log = logs.get("shards.loop")

_MATCHES_PER_TURN = 2_048
_TICK: Micros = bounds.LONGEST_SLEEP // 2
_GRAIN: Micros = bounds.MILLISECOND
"""Event loops count in milliseconds, and run in circles for what is left of one."""


class Streams(Protocol):
    """What the loop has for the workers' streams."""

    def last_read(self, holder: Holder) -> int:
        """Return the number of the last message read from a worker."""
        ...

    def assign(self, assignments: Sequence[Assignment]) -> Sequence[Lease]:
        """Send assignments; returns the leases of those whose stream had ended."""
        ...

    def verdicts(self, verdicts: Sequence[tuple[Holder, bytes, Verdict]]) -> None:
        """Tell what became of outcomes."""
        ...

    def stops(self, stops: Sequence[tuple[Holder, bytes, StopReason]]) -> None:
        """Ask attempts to stop."""
        ...

    def lost(self, lost: Sequence[tuple[Holder, bytes]]) -> None:
        """Tell which leases are lost."""
        ...

    def adopted(self, adopted: Sequence[tuple[Holder, bytes]]) -> None:
        """Expect leases of those who have listed them."""
        ...

    def terms_started(self, terms: Sequence[tuple[ShardId, Epoch]]) -> None:
        """Tell which terms this node has begun."""
        ...

    def term_ended(self, shard: ShardId, epoch: Epoch) -> None:
        """Tell of a term that is over."""
        ...

    wants_demands: bool
    """Whether workers have credit on other nodes that they could move here."""

    def demands(self, demands: Sequence[tuple[Holder, int]]) -> None:
        """Tell how many tasks wait for a stream's credit."""
        ...


class Lanes(Protocol):
    """Where writes go."""

    def submit(self, shard: Shard, writes: list[Write]) -> None:
        """Commit writes, in order."""
        ...


class Reading(Protocol):
    """Where reads go."""

    def submit(self, effects: Effects, shards: Mapping[ShardId, Shard]) -> None:
        """Carry out the reads of a turn."""
        ...


class Loop:
    """See the module's docstring. Implements `streams.Port`."""

    def __init__(
        self,
        clock: Clock,
        shard_count: int,
        lease: Micros,
        head: int,
        metrics: Metrics,
        failpoints: Failpoints,
    ) -> None:
        self.shards: dict[ShardId, Shard] = {}
        """The shards that this node leads and has loaded."""
        self.clock = clock
        self.matcher = Matcher()
        self.is_granting = True
        self.last_turn = clock.elapsed()
        self._shard_count = shard_count
        self._lease = lease
        self._head = head
        self._metrics = metrics
        self._failpoints = failpoints
        self._inbox: list[tuple[Shard, Event]] = []
        self._wake = asyncio.Event()
        self._next_tick = 0
        self._touched: dict[Shard, None] = {}
        """Shards that handled something in this turn: only of these can anything have become due earlier."""
        self._agenda = Agenda()
        self._parting: dict[Shard, asyncio.Event] = {}
        """Shards that are being handed over, and what is set once all that they have begun is answered."""
        self._streams: Streams
        self._lanes: Lanes
        self._reads: Reading
        self._resolve: Callable[[Any, Answer], None]
        self._fail: Callable[[Shard, Sequence[Write]], None]
        self._leader_of: Callable[[ShardId], str]

    def connect(
        self,
        streams: Streams,
        lanes: Lanes,
        reads: Reading,
        resolve: Callable[[Any, Answer], None],
        fail: Callable[[Shard, Sequence[Write]], None],
        leader_of: Callable[[ShardId], str],
    ) -> None:
        """Name those to whom effects go; `fail` ends the term of a shard that broke, `leader_of` knows addresses."""
        self._streams = streams
        self._lanes = lanes
        self._reads = reads
        self._resolve = resolve
        self._fail = fail
        self._leader_of = leader_of

    async def run(self) -> Never:
        """Turn for ever."""
        while True:
            self._wake.clear()
            self._turn()
            if not self._wake.is_set():
                await self._sleep()

    async def _sleep(self) -> None:
        """Wait until something arrives or is due."""
        loop = asyncio.get_running_loop()
        grains = max(1, -(-self._until_next() // _GRAIN))
        timer = loop.call_later(grains * _GRAIN / bounds.SECOND, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    # What others call: `streams.Port`, commands, lanes, terms.

    def shard_of(self, namespace: str, task_id: str) -> ShardId:
        """Return the shard that holds a task."""
        return self.shard_of_slot(slots.slot_of(namespace, task_id))

    def shard_of_slot(self, slot: int) -> ShardId:
        """Return the shard that holds a slot."""
        return ShardId(slots.shard_of_slot(slot, self._shard_count))

    def leads(self, shard: ShardId) -> bool:
        """Tell whether this node leads the shard, has loaded it, and does not hand it over."""
        led = self.shards.get(shard)
        return led is not None and led not in self._parting

    def leader_of(self, shard: ShardId) -> str:
        """Return the address of the other node that leads a shard, or is about to; empty if none is known."""
        return self._leader_of(shard)

    def terms(self) -> Sequence[tuple[ShardId, Epoch]]:
        """Return the terms that this node leads, has loaded, and does not hand over."""
        return [(shard.fence.shard, shard.fence.epoch) for shard in self.shards.values() if shard not in self._parting]

    def post(self, shard: ShardId, event: Event) -> None:
        """Hand an event to a shard; one that the node does not lead drops it, and tells callers who does."""
        led = self.shards.get(shard)
        # That an assignment did not leave is known to nobody else.
        if led is None or (led in self._parting and not isinstance(event, Unsent)):
            self._turn_away(event, self._not_led(shard))
        else:
            self.post_to(led, event)

    async def settle(self, shard: Shard, within: Micros) -> bool:
        """Let nothing new into a shard, until it ends, and wait until all that it has begun is answered.

        False: it was not within the time.
        """
        settled = self._parting[shard] = asyncio.Event()
        self._wake.set()
        try:
            async with asyncio.timeout(within / bounds.SECOND):
                await settled.wait()
        except TimeoutError:
            return False
        return True

    def post_to(self, shard: Shard, event: Event) -> None:
        """Hand an event to a shard of this very term."""
        self._inbox.append((shard, event))
        self._wake.set()

    def subscribe(self, holder: Holder, queues: frozenset[str], task_types: frozenset[str]) -> None:
        """Make a worker's stream known to the matcher, without credit."""
        self.matcher.subscribe(holder, queues, task_types)

    def credit(self, holder: Holder, delta: int, task_type_deltas: Mapping[str, int]) -> int:
        """Change a stream's credit; returns how much of a withdrawal was still unused."""
        self._wake.set()
        return self.matcher.add_credit(holder, delta, task_type_deltas)

    def give_back(self, holder: Holder, lanes: Iterable[Lane]) -> None:
        """Give a stream back the credit of one assignment of each lane."""
        for lane in lanes:
            self.matcher.unmatched(lane, holder)
        self._wake.set()

    def unsubscribe(self, holder: Holder) -> None:
        """Forget a stream and its credit."""
        self.matcher.unsubscribe(holder)

    def elapsed(self) -> Micros:
        """Read the elapsed time."""
        return self.clock.elapsed()

    def utc(self) -> Micros:
        """Read the cluster clock's latest."""
        return self.clock.now().latest

    def begin(self, shards: Iterable[Shard]) -> None:
        """Take in shards whose terms have begun."""
        begun = list(shards)
        for shard in begun:
            self.shards[shard.fence.shard] = shard
        self._streams.terms_started([(shard.fence.shard, shard.fence.epoch) for shard in begun])
        self._next_tick = 0
        self._wake.set()

    def end(self, shard: Shard, uncertain: Iterable[Write] = (), unapplied: Iterable[Write] = ()) -> bool:
        """Drop a shard whose term is over; False if it was dropped before.

        Those who wait for `uncertain` writes, whose answer was lost, and for `unapplied` ones, surely not
        applied, are told so in any case.
        """
        number = shard.fence.shard
        out = Effects()
        for write in uncertain:
            callers.give_up(write, errors.OutcomeUncertain(), out)
        not_led = self._not_led(number)
        for write in unapplied:
            callers.give_up(write, not_led, out)
        is_led = self.shards.get(number) is shard
        if is_led:
            del self.shards[number]
            parting = self._parting.pop(shard, None)
            if parting is not None:
                parting.set()
            self._agenda.forget(shard)
            self._streams.term_ended(number, shard.fence.epoch)
            shard.close(out)
        self._tell(out)
        return is_led

    @property
    def inbox_size(self) -> int:
        """How many events wait for the next turn."""
        return len(self._inbox)

    def ready(self) -> tuple[int, Micros]:
        """Count the tasks in memory that are due and wait for a worker, and tell since when the oldest one does."""
        if not self.shards:
            return 0, 0
        now = self.clock.now().earliest
        count, oldest = 0, now
        for shard in self.shards.values():
            for task in shard.near.tasks.values():
                if task.is_ready:
                    count += 1
                    oldest = min(oldest, task.progress.due_time or now)
        return count, now - oldest

    # A turn.

    def _turn(self) -> None:
        now = self.clock.now()
        self.last_turn = now.elapsed
        out = Effects()
        inbox = self._inbox
        self._inbox = []
        for shard, event in inbox:
            if self.shards.get(shard.fence.shard) is shard:
                self._handle(shard, event, now, out)
            else:
                self._turn_away(event, self._not_led(shard.fence.shard))
        self._tick(now, out)
        if out.ready:
            self.matcher.add(out.ready)
            out.ready = []
        self._free_credit(out)
        if self.is_granting:
            self._match(now, out)
            if self._streams.wants_demands:
                self._tell_demands(now)
        self._arm(out)
        self._carry_out(out)
        if self._parting:
            self._note_settled()

    def _arm(self, out: Effects) -> None:
        """Look at what was touched: lanes that run low, and what is due next."""
        for shard in self._touched:
            if self.shards.get(shard.fence.shard) is not shard:
                continue
            if shard.near.is_low:
                shard.collect_loads(out)
            self._agenda.note(shard)
        self._touched.clear()

    def _handle(self, shard: Shard, event: Event, now: Now, out: Effects) -> None:
        self._touched[shard] = None
        try:
            shard.handle(event, now, out)
        except Exception:
            number = shard.fence.shard
            _log.exception("shard_failed", shard=number, epoch=shard.fence.epoch, event_kind=type(event).__name__)
            unapplied = [write for write in out.writes if write.task.shard == number]
            out.writes = [write for write in out.writes if write.task.shard != number]
            self._turn_away(event, errors.NoLeader(number))
            self._fail(shard, unapplied)

    def _tick(self, now: Now, out: Effects) -> None:
        due = self._agenda.take(now)
        if now.elapsed >= self._next_tick:
            self._metrics.loop_lag.observe(now.elapsed - self._next_tick if self._next_tick else 0)
            self._next_tick = now.elapsed + _TICK
            due.update(self.shards.values())
            self._share_memory()
        tick = Tick()
        for shard in sorted(due, key=lambda shard: shard.fence.shard):
            self._handle(shard, tick, now, out)

    def _share_memory(self) -> None:
        """Give every lane's head its share of what all heads together may hold: they shrink as lanes become many."""
        heads = sum(len(shard.near.heads) for shard in self.shards.values())
        head = max(bounds.MIN_HEAD, min(self._head, bounds.HEADS_BUDGET // (2 * heads + 1)))
        for shard in self.shards.values():
            if shard.near.head != head:
                shard.near.limit_heads(head)

    def _match(self, now: Now, out: Effects) -> None:
        matches = list(self.matcher.match(now.earliest, _MATCHES_PER_TURN))
        if not matches:
            return
        if len(matches) == _MATCHES_PER_TURN:
            self._wake.set()
        tokens = os.urandom(16 * len(matches))
        last_read = self._streams.last_read
        for index, (task, holder) in enumerate(matches):
            shard = self.shards.get(task.shard)
            if shard is None or shard in self._parting:
                self.matcher.unmatched(task.lane, holder)
                continue
            token = tokens[16 * index : 16 * index + 16]
            self._handle(shard, Grant(task, holder, token, self._lease, last_read(holder)), now, out)
        self._free_credit(out)

    def _tell_demands(self, now: Now) -> None:
        demands = self.matcher.demands(now.elapsed)
        if demands:
            self._streams.demands(demands)

    def _carry_out(self, out: Effects) -> None:
        if out.writes:
            by_shard: defaultdict[ShardId, list[Write]] = defaultdict(list)
            for write in out.writes:
                by_shard[write.task.shard].append(write)
            for number, writes in by_shard.items():
                self._lanes.submit(self.shards[number], writes)
        if out.answers:
            resolve = self._resolve
            for origin, answer in out.answers:
                resolve(origin, answer)
            self._failpoints.passes(AFTER_ANSWER)
        if out.assignments:
            self._failpoints.passes(BEFORE_ASSIGNMENT)
            self._metrics.grants += len(out.assignments)
            for lease in self._streams.assign(out.assignments):
                self.post(lease.task.shard, Unsent(lease))
        if out.verdicts:
            self._streams.verdicts(out.verdicts)
        if out.stops:
            self._streams.stops(out.stops)
        if out.lost:
            self._streams.lost(out.lost)
        if out.adopted:
            self._streams.adopted(out.adopted)
        if out.task_reads or out.attempt_reads or out.lane_loads:
            self._reads.submit(out, self.shards)
        self._count(out)

    def _count(self, out: Effects) -> None:
        metrics = self._metrics
        for outcome in out.ended:
            metrics.attempts_ended[outcome] += 1
        for lateness, is_retry in out.lateness:
            metrics.observe_lateness(lateness, is_retry)
        metrics.audit_misses += out.audit_misses

    def _note_settled(self) -> None:
        """Tell of shards that are handed over, and for which nothing is under way any more."""
        posted = {shard for shard, _ in self._inbox}
        for shard, settled in self._parting.items():
            if shard.is_settled and shard not in posted:
                settled.set()

    def _not_led(self, shard: ShardId) -> errors.DomainError:
        """Say that this node does not lead a shard, and who does, if that is known."""
        address = self.leader_of(shard)
        return errors.NotShardLeader(shard, Epoch(0), address) if address else errors.NoLeader(shard)

    def _turn_away(self, event: Event, error: errors.DomainError) -> None:
        out = Effects()
        callers.turn_away(event, error, out)
        self._tell(out)

    def _tell(self, out: Effects) -> None:
        """Tell those who wait for what will not be done."""
        for origin, answer in out.answers:
            self._resolve(origin, answer)
        self._free_credit(out)

    def _free_credit(self, out: Effects) -> None:
        """Give back the credit of grants that came to nothing."""
        for lane, holder in out.unmatched:
            self.matcher.unmatched(lane, holder)
        out.unmatched = []

    def _until_next(self) -> Micros:
        now = self.clock.now()
        at_most = min(self._next_tick - now.elapsed, bounds.LONGEST_SLEEP)
        if self.is_granting and self._streams.wants_demands:
            at_most = min(at_most, self.matcher.until_demands(now.elapsed))
        return self._agenda.until_next(now, at_most)
