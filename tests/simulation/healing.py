"""What has to come about, and by when, once all is healed that is not gone for good; by itself, without a restart."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from simulation.clock import START, MachineClock
from simulation.history import Grant, Record
from simulation.hosts import incarnation_of
from simulation.loop import Process
from simulation.nodes import api_address
from simulation.plan import SHORTEST, Kind

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import HELD, WAITING, ShardId, Task, TaskKey
from duecourse.server.leadership.membership import JOIN_MARGIN

if TYPE_CHECKING:
    from simulation.world import World

STEP: Final = 200 * bounds.MILLISECOND
_RECONNECT_BOUND: Final = 15 * bounds.SECOND
_LEADERSHIP_BOUND: Final = 10 * bounds.SECOND
"""Beyond a session's time, since all was healed or a shard was last led."""
_EXPIRY_SLACK: Final = 5 * bounds.SECOND
_SETTLES_WITHIN: Final = 3 * bounds.SECOND
_CALM: Final = 5 * bounds.SECOND
_DEADLINE_BOUND: Final = 2 * bounds.SECOND
_ORDERED_AFTER: Final = bounds.SECOND
_PASSED_OVER_AT_MOST: Final = 10
_LONGEST: Final = 150 * bounds.SECOND


class Healing:
    """See the module's docstring."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._checker = world.checker
        setup = world.plan.setup
        self._healed_at = now = world.loop.now
        self._until = now + _LONGEST
        joined = setup.session + JOIN_MARGIN if setup.kind is Kind.CLUSTER else 0
        self._reconnected_by = now + _RECONNECT_BOUND + 2 * setup.heartbeat + joined
        listening = bounds.SILENT_INTERVALS * setup.heartbeat + bounds.LISTEN_MARGIN
        self._expires_within = max(setup.lease, listening) + _EXPIRY_SLACK
        self._led_at: dict[ShardId, Micros] = {}
        self._led_since: dict[ShardId, Micros] = {}
        """Since when the shards that sound nodes lead have been led so, without a break."""
        self._granted_at: dict[bytes, Micros] = {}
        """When leases of workers that are gone were granted, at the earliest, by their tokens."""
        self._overdue_since: dict[TaskKey, Micros] = {}
        """Since when tasks whose deadlines have passed were seen in memory."""
        self._is_connected = False
        self._granted = len(self._checker.grants_from(0))
        self._passed_over: Counter[tuple[Process, str]] = Counter()
        """By node and queue: how many grants of other queues in a row, while tasks of this one could have gone."""

    async def watch(self, clock: MachineClock) -> None:
        """Check, step by step, until every task has ended and every worker is served."""
        world = self._world
        while world.is_sound():
            await clock.sleep(STEP)
            world.watch_over()
            self._check_connections()
            self._check_leaders()
            self._check_the_dead()
            self._check_deadlines()
            self._check_order()
            unfinished = self._checker.unfinished()
            is_over = world.loop.now >= SHORTEST and world.have_clients_ended()
            if is_over and not unfinished and self._is_connected and self._are_all_led():
                await self._rest(clock)
                return
            if world.loop.now > self._until:
                left = ", ".join(f"{one.task.task_id} {one.progress.state}" for one in unfinished[:5])
                # Also those of which the store has lost something have to end, so that this is said of no task.
                self._checker.fail("L1", f"{len(unfinished)} tasks have not ended: {left}")

    async def _rest(self, clock: MachineClock) -> None:
        """Check that every node has the very credit that workers say is out, once nothing is under way any more."""
        # A stream that was lost silently just before may be noticed only now.
        until = max(self._world.loop.now, self._reconnected_by) + _SETTLES_WITHIN
        while missing := self._unequal():
            if self._world.loop.now > until:
                self._checker.fail("P9", f"credit differs: {'; '.join(missing)}")
                return
            await clock.sleep(STEP)

    def _unequal(self) -> Sequence[str]:
        """Tell where a worker and a node differ in how much the node may still send."""
        found = []
        for name, worker in self._world.workers.items():
            incarnation = incarnation_of(worker.process)
            for node in self._world.fleet.sound():
                said = worker.credit_at(api_address(node.address))
                if said is None or node.scheduler is None or not node.is_up:
                    continue
                known = node.credit_of(incarnation)
                if said != known:
                    found.append(f"{name} gave {node.address} {said}, it has {known}")
        return found

    def _check_connections(self) -> None:
        """Check that every worker has found a node; in a cluster, every one that is well."""
        if self._is_connected:
            return
        missing = self._unserved()
        if not missing:
            self._is_connected = True
        elif self._world.loop.now > self._reconnected_by:
            self._checker.fail("L5", f"not connected yet: {', '.join(missing)}")

    def _unserved(self) -> Sequence[str]:
        world = self._world
        if world.plan.setup.kind is Kind.SOLO:
            return [name for name, worker in world.workers.items() if not worker.served_by()]
        addresses = [api_address(node.address) for node in world.fleet.sound()]
        return [
            f"{name} to {address}"
            for name, worker in world.workers.items()
            for address in addresses
            if address not in worker.served_by()
        ]

    def _check_leaders(self) -> None:
        """Check that every shard is led by a node that can, within a session's time and some more."""
        world = self._world
        setup = world.plan.setup
        if setup.kind is Kind.SOLO:
            return
        now = world.loop.now
        for number in range(setup.shards):
            shard = ShardId(number)
            holder = self._checker.holder(shard)
            nodes = (node for node in world.nodes.values() if node.process is holder and node.is_up)
            leaders = [node for node in nodes if node.scheduler is not None and node.scheduler.loop.leads(shard)]
            if any(leader in world.fleet.sound() for leader in leaders):
                self._led_since.setdefault(shard, now)
                self._led_at[shard] = now
                continue
            self._led_since.pop(shard, None)
            if now - self._led_at.get(shard, self._healed_at) > setup.session + _LEADERSHIP_BOUND:
                self._checker.fail("L4", f"no node that can leads shard {shard}; {holder} did")

    def _are_all_led(self) -> bool:
        setup = self._world.plan.setup
        return setup.kind is Kind.SOLO or len(self._led_since) == setup.shards

    def _check_the_dead(self) -> None:
        """Check that nobody waits any more for workers that are gone. A new leader listens before it gives them up."""
        world = self._world
        alive = {incarnation_of(worker.process) for worker in world.workers.values()}
        for record in self._checker.unfinished():
            attempt = record.progress.attempt
            if record.progress.state not in HELD or attempt is None or attempt.incarnation in alive:
                continue
            if self._checker.has_lost(record.task.key):
                # Its leader learns of that by its next audit.
                continue
            # Whose death is not noticed yet may still be granted something.
            granted_at = self._granted_at.setdefault(attempt.lease_token, world.loop.now - STEP)
            since = max(self._healed_at, self._checker.led_since(record.task.shard), granted_at)
            if world.loop.now > since + self._expires_within:
                self._checker.fail("L2", f"{record.task.task_id} waits for a worker that is gone", record.task.key)

    def _check_order(self) -> None:
        """Check that a node grants what was due first in a lane first, and passes no queue over for ever."""
        grants = self._checker.grants_from(self._granted)
        self._granted += len(grants)
        waiting = [one for one in self._checker.unfinished() if one.progress.state in WAITING] if grants else []
        for grant in grants:
            granted = grant.record.task.lane
            self._passed_over.pop((grant.node, granted.queue), None)
            could_go = [one for one in waiting if self._could_go(one, grant)]
            for other in could_go:
                is_older = (other.progress.due_time or 0) + _ORDERED_AFTER < grant.due_time
                if is_older and other.task.lane == granted:
                    key = other.task.key
                    self._checker.fail("L7", f"{grant.record.task.task_id} went before {key.task_id}", key)
            for queue in sorted({one.task.lane.queue for one in could_go} - {granted.queue}):
                self._passed_over[grant.node, queue] += 1
                if self._passed_over[grant.node, queue] > _PASSED_OVER_AT_MOST:
                    self._checker.fail("L6", f"{grant.node} grants nothing of the queue {queue}")

    def _could_go(self, other: Record, grant: Grant) -> bool:
        """Tell whether a task that waits was known to who granted another one, and had been due for a while."""
        task, progress = other.task, other.progress
        # By whoever it is led now, in this very term.
        led_since = max(self._led_since.get(task.shard, grant.at), self._checker.led_since(task.shard))
        return (
            max(other.changed_at, led_since + _CALM, (progress.due_time or 0) - START) + _ORDERED_AFTER < grant.at
            and self._checker.holder(task.shard) is grant.node
            and not (self._checker.has_lost(task.key) or self._checker.is_spoiled(task.key))
        )

    def _is_near(self, task: Task) -> bool:
        """Tell whether the leader of a task has it in memory, as one that waits."""
        holder = self._checker.holder(task.shard)
        schedulers = (node.scheduler for node in self._world.nodes.values() if node.process is holder)
        led = (scheduler.loop.shards.get(task.shard) for scheduler in schedulers if scheduler is not None)
        return any(shard is not None and task.key in shard.near.tasks for shard in led)

    def _check_deadlines(self) -> None:
        """Check that nothing in memory waits whose deadline has passed: it ends then, and not when its turn comes."""
        now = self._world.loop.now
        reference = self._checker.reference
        if not reference.is_steady_since(now - _CALM):
            return
        late = reference.read()
        for record in self._checker.unfinished():
            policy, progress = record.task.policy, record.progress
            deadlines = [policy.completion_deadline, None if progress.attempts_used else policy.start_deadline]
            is_past = any(deadline is not None and deadline < late for deadline in deadlines)
            is_led = self._led_since.get(record.task.shard, now) < now - _CALM
            if not (is_past and is_led and progress.state in WAITING and self._is_near(record.task)):
                self._overdue_since.pop(record.task.key, None)
            elif now > self._overdue_since.setdefault(record.task.key, now) + _DEADLINE_BOUND:
                self._checker.fail("L1", f"{record.task.task_id} waits beyond its deadline", record.task.key)
