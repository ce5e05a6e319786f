"""Faults that are planted to prove that the simulation finds them: each a change of a file that makes it wrong.

A change names text that occurs in its file exactly once; where it no longer does, the command says so, and the change
has to be written anew.
"""

from dataclasses import dataclass
from typing import Final

_SERVER: Final = "server/duecourse/server"
_WORKER: Final = "worker/duecourse/worker"


@dataclass(frozen=True, slots=True)
class Mutation:
    """A planted fault."""

    name: str
    file: str
    before: str
    after: str
    like: str = ""
    """The report of a fault of this kind in another system."""
    is_blind: bool = False
    """Written from the code alone, without a thought of what is checked."""
    why_not_found: str = ""
    """If it is known to survive: what makes up for it."""


MUTATIONS: Final = (
    Mutation(
        "acknowledged before the commit",
        f"{_SERVER}/core/shard.py",
        "        out.writes.append(Insert(submission, task, origin))\n",
        "        out.writes.append(Insert(submission, task, origin))\n"
        "        out.answers.append((origin, Submitted(task.uid, True)))\n",
    ),
    Mutation(
        "no fence on updates",
        f"{_SERVER}/storage/memory.py",
        "            if stale is None:\n                current",
        "            if stale is None or not batch.inserts:\n                current",
    ),
    Mutation(
        "no fence on deletes",
        f"{_SERVER}/storage/memory.py",
        "            return stale\n        ended = sorted(",
        "            pass\n        ended = sorted(",
        like="temporalio/temporal#12016",
    ),
    Mutation(
        "an epoch is not raised",
        f"{_SERVER}/storage/memory.py",
        "        epoch = Epoch(row.epoch + 1) if request.epoch is None else request.epoch\n",
        "        epoch = Epoch(max(1, row.epoch)) if request.epoch is None else request.epoch\n"
        "        row = replace(row, epoch=Epoch(0))\n",
    ),
    Mutation(
        "revisions are not compared",
        f"{_SERVER}/storage/memory.py",
        "            if record is None or record.progress.revision != update.progress.revision - 1:",
        "            if record is None:",
        like="quartz-scheduler/quartz#107",
    ),
    Mutation(
        "attempts counted when they start, not when they are granted",
        f"{_SERVER}/core/lifecycle.py",
        "        last.attempts_used + 1,\n",
        "        last.attempts_used,\n",
        like="oban-bg/oban#137",
    ),
    Mutation(
        "one attempt more than allowed",
        f"{_SERVER}/core/lifecycle.py",
        "    if task.progress.attempts_used >= task.policy.max_attempts:",
        "    if task.progress.attempts_used > task.policy.max_attempts:",
    ),
    Mutation(
        "a failure after a requested cancellation is tried again",
        f"{_SERVER}/core/lifecycle.py",
        "    if task.progress.cancel_requested:\n        return TaskState.CANCELLED, None\n",
        "",
        like="riverqueue/river#141",
    ),
    Mutation(
        "a lease renewed by a stream that is dead",
        f"{_SERVER}/core/lease.py",
        "        return max(self.unexpired_until, self.holder.renewed_at + self.duration)",
        "        return max(self.unexpired_until, self.holder.renewed_at + 1000 * self.duration)",
        like="hatchet-dev/hatchet#4824",
    ),
    Mutation(
        "a cursor that is not moved back where a head is cut",
        f"{_SERVER}/core/near.py",
        "        head.move_cursor(due_key(ordered[kept - 1]))\n",
        "        head.move_cursor(due_key(ordered[-1]))\n",
    ),
    Mutation(
        "leases adopted without being listed",
        f"{_SERVER}/core/leases.py",
        "        if not event.is_complete:\n            return\n",
        "        holder = event.holder\n"
        "        for lease in list(self.by_token.values()):\n"
        "            attempt = lease.task.progress.attempt\n"
        "            if lease.holder is None and attempt and attempt.incarnation == holder.incarnation:\n"
        "                lease.holder = holder\n"
        "        if not event.is_complete:\n"
        "            return\n",
    ),
    Mutation(
        "what is on its way counts as absent",
        f"{_SERVER}/core/leases.py",
        "        return lease.assignment_number <= event.last_assignments\n",
        "        return True\n",
    ),
    Mutation(
        "a handler that had begun is said to be unstarted",
        f"{_SERVER}/core/leases.py",
        "        if task.progress.state is TaskState.RUNNING:\n            progress = lifecycle.failed(",
        "        if task.progress.state is TaskState.SUCCEEDED:\n            progress = lifecycle.failed(",
        why_not_found="no worker of ours leaves out what it has begun; tests/core has one that does",
    ),
    Mutation(
        "a requested cancellation that is not durable",
        f"{_SERVER}/core/cancellations.py",
        "            self._lines.update(task, lifecycle.cancel_requested(last, answers), event, out)\n",
        "            self._ask(task, event, now, out)\n",
        like="celery/celery#1007",
    ),
    Mutation(
        "a lease called lost without a read",
        f"{_SERVER}/core/leases.py",
        "        if key in self._lines.fresh:\n            out.lost.append((event.holder, token))\n",
        "        if key is not None:\n            out.lost.append((event.holder, token))\n",
    ),
    Mutation(
        "due two milliseconds early",
        f"{_SERVER}/core/near.py",
        "        while due and due[0][0] <= earliest:\n            due_time, _, task",
        "        while due and due[0][0] <= earliest + 2000:\n            due_time, _, task",
    ),
    Mutation(
        "a lost answer taken for a commit",
        f"{_SERVER}/shards/lanes.py",
        "                self._ends.uncertain(shard, answer.detail, piece.writes)\n",
        "                self._loop.post_to(shard, Committed(piece.writes, {}, set(), {}))\n",
    ),
    Mutation(
        "a lost answer taken for a refusal",
        f"{_SERVER}/shards/lanes.py",
        "                self._ends.uncertain(shard, answer.detail, piece.writes)\n",
        "                return True\n",
    ),
    Mutation(
        "a bucket whose load failed is not loaded again",
        f"{_SERVER}/shards/buckets.py",
        "                await self._loop.clock.sleep(next(waits))\n                continue\n",
        "                return\n",
    ),
    Mutation(
        "new terms are not announced",
        f"{_SERVER}/shards/loop.py",
        "        self._streams.terms_started([(shard.fence.shard, shard.fence.epoch) for shard in begun])\n",
        "",
    ),
    Mutation(
        "credit of a match that came to nothing is lost",
        f"{_SERVER}/core/matcher.py",
        "            stream.use(lane.task_type, -1)\n",
        "            stream.use(lane.task_type, 0)\n",
    ),
    Mutation(
        "a silent stream is not ended",
        f"{_SERVER}/streams/worker_stream.py",
        "        if now - self._heard_at > limit:\n",
        "        if now - self._heard_at > 1000 * limit:\n",
    ),
    Mutation(
        "a late assignment is started",
        f"{_WORKER}/holdings.py",
        "        earliest = now + bounds.LATE_ASSIGNMENT_MARGIN - attempt.lease\n",
        "        earliest = -bounds.DAY\n",
    ),
    Mutation(
        "an assignment is started whose attempt may have timed out on its way",
        f"{_WORKER}/protocol.py",
        "        until.append(counts_from + _micros(item.time_left) + bounds.STOP_GRACE)\n",
        "        pass\n",
        why_not_found="what was so long under way waits for its renewal, and is late by then; tests/worker has one",
    ),
    Mutation(
        "what came too late to be renewed for certain is started at once",
        f"{_WORKER}/holdings.py",
        "            if attempt.is_short(now) and not (attempt.is_urgent or self._is_renewed(attempt)):\n",
        "            if False:\n",
        why_not_found="a link has to keep an assignment for most of its lease; tests/worker has one",
    ),
    Mutation(
        "an adoption that finds another revision is not written again",
        f"{_SERVER}/core/shard.py",
        "        again = [] if cause is None or isinstance(cause, Grant) else [cause]\n",
        "        again = [cause] if isinstance(cause, End | Cancel | Start) else []\n",
        why_not_found="the store has to fall back to just that attempt while its term goes on; tests/core has it",
    ),
    Mutation(
        "lists are asked for before what is lost is told",
        f"{_SERVER}/streams/worker_stream.py",
        "        waiting = self._ledger.sent_after(outbox.sent_number, tokens)\n",
        "        waiting = set(tokens)\n",
        why_not_found="costs lists, until what is lost is told; tests/streams has it",
    ),
    Mutation(
        "a list of leases forgets what was renewed before it",
        f"{_WORKER}/node_stream.py",
        "        for token in counted - self._held.keys():\n            self.hold(token)\n",
        "        for token in counted:\n            self.release(token)\n            self.hold(token)\n",
    ),
    Mutation(
        "what a node confirmed while another led renews a lease",
        f"{_WORKER}/protocol.py",
        "            stream.begin_again(attempt.token)\n",
        "            pass\n",
        why_not_found="a node that the worker does not reach has to lead in between; tests/worker has one",
    ),
    Mutation(
        "a candidacy that was withdrawn is not looked at again",
        f"{_SERVER}/leadership/standings.py",
        "                async with asyncio.timeout(_LOOK_AGAIN / bounds.SECOND if had_strays else None):\n",
        "                async with asyncio.timeout(None):\n",
    ),
    Mutation(
        "what has changed since an audit read it counts as missed",
        f"{_SERVER}/core/shard.py",
        "            is_as_audited = self._audited.get(key) == task.progress.revision\n",
        "            is_as_audited = key in self._audited\n",
        why_not_found="seen once in some 4,000 seeds; tests/core has it",
    ),
    Mutation(
        "an outcome is forgotten with its stream",
        f"{_WORKER}/outcomes.py",
        "            if not attempt.sent_on and not attempt.is_queued:\n                self._route(attempt)\n",
        "            pass\n",
        why_not_found="what has a leader is sent again on the next TermStarted; tests/worker has the rest",
    ),
    Mutation(
        "an outcome is dropped as soon as it is sent",
        f"{_WORKER}/node_stream.py",
        "            attempt.sent_on = self.serial\n",
        "            attempt.sent_on = self.serial\n            attempt.phase = Phase.FORGOTTEN\n",
    ),
    Mutation(
        "lower epochs are not refused",
        f"{_WORKER}/protocol.py",
        "        if attempt.epoch < highest:\n",
        "        if attempt.epoch < 0:\n",
    ),
    Mutation(
        "a stream that a node lost is not given up",
        f"{_WORKER}/stream.py",
        "        if is_stuck or self._protocol.is_silent(stream, now):\n",
        "        if is_stuck:\n",
    ),
    Mutation(
        "a term whose raise took effect late is taken for another node's",
        f"{_SERVER}/shards/beginnings.py",
        "self._raising.setdefault(shard, os.urandom(16))",
        "os.urandom(16)",
    ),
    Mutation(
        "leases are not loaded with a term",
        f"{_SERVER}/shards/beginnings.py",
        "[task for task in held.tasks if task.shard == number], raised[number].raises",
        "[], raised[number].raises",
    ),
    # What takes several nodes.
    Mutation(
        "terms raised without a higher election revision",
        f"{_SERVER}/leadership/seat.py",
        "Claim(first_epoch(self._cluster, elected.revision))",
        "Claim()",
    ),
    Mutation(
        "a rebound store gets epochs from where they began",
        f"{_SERVER}/leadership/identity.py",
        "epoch_base=Epoch(max(highest, last_base, by_time)))",
        "epoch_base=Epoch(0))",
        why_not_found="a simulated etcd is soon beyond the few revisions that it has lost; tests/leadership has it lose"
        " many",
    ),
    Mutation(
        "a store rebound to lower epochs than it was rebound to before",
        f"{_SERVER}/leadership/identity.py",
        "epoch_base=Epoch(max(highest, last_base, by_time)))",
        "epoch_base=Epoch(max(highest, by_time)))",
        why_not_found="hardly any run has a cluster rebound twice, and its store and all clocks set back in between;"
        " tests/leadership has it",
    ),
    Mutation(
        "what a store has forgotten stays in memory when it takes it anew",
        f"{_SERVER}/core/shard.py",
        "                self._drop_outdated(task.key, task, now, out)\n",
        "                pass\n",
        why_not_found="a store set back has to lose the very task that is then submitted again; tests/core has it",
    ),
    Mutation(
        "a term kept after its election key is gone",
        f"{_SERVER}/leadership/seat.py",
        "                if over is not None:\n",
        "                if over is not None and not over:\n",
        why_not_found="the store's fence ends such a term as soon as another has begun; that it ends at once, though"
        " nobody else leads, is a test of tests/leadership",
    ),
    Mutation(
        "a shard resigned before its term is over",
        f"{_SERVER}/leadership/seat.py",
        "                await taking.hand_over(self.shard)\n",
        "                pass\n",
    ),
    Mutation(
        "elected although others stand before",
        f"{_SERVER}/leadership/election.py",
        "            if first is not None and first.revision == candidacy.revision:\n",
        "            if first is not None:\n",
        why_not_found="who is elected too early raises by the same key, so that the store lets only one of them lead",
    ),
    Mutation(
        "a node without its store goes on to lead",
        f"{_SERVER}/leadership/clustered.py",
        "        return self._taking.store_missed_for() > bounds.STORE_MISSED\n",
        "        return self._taking.store_missed_for() < 0\n",
    ),
    Mutation(
        "a candidacy that is not wanted any more stays",
        f"{_SERVER}/leadership/standings.py",
        "            if own is not None and shard not in self._wanted:\n",
        "            if own is not None and shard in ():\n",
    ),
    Mutation(
        "a new session without the keys of the old one",
        f"{_SERVER}/leadership/session.py",
        "        for key, kept in list(self._kept.items()):\n",
        "        for key, kept in [self._kept.popitem() for _ in range(len(self._kept))]:\n",
    ),
    Mutation(
        "answers of several nodes put together in the wrong order",
        f"{_SERVER}/rpc/routing.py",
        "            for item, answer in zip(part, await found, strict=True):\n",
        "            for item, answer in zip(reversed(part), await found, strict=True):\n",
    ),
    Mutation(
        "due by the node's own clock",
        f"{_SERVER}/clock/cluster_clock.py",
        "        return self._discipline.now(self._local.elapsed())\n",
        "        wall = self._local.wall()\n        return Now(wall, wall, self._local.elapsed())\n",
        like="rq/rq-scheduler#246",
    ),
    Mutation(
        "any step of the store's clock is followed",
        f"{_SERVER}/clock/discipline.py",
        "        elif is_accepted or abs(gap) <= bounds.MAX_OFFSET:\n",
        "        elif is_accepted or gap:\n",
        like="citusdata/pg_cron#105",
    ),
    Mutation(
        "due within the uncertainty of the clock",
        f"{_SERVER}/core/near.py",
        "        while due and due[0][0] <= earliest:\n",
        "        while due and due[0][0] <= earliest + 1_000:\n",
        why_not_found="making a grant durable takes longer than the clock is uncertain, so that nothing begins early",
    ),
    Mutation(
        "a lease expires by the time since its grant",
        f"{_SERVER}/core/lease.py",
        "        return max(self.unexpired_until, self.holder.renewed_at + self.duration)\n",
        "        return self.unexpired_until\n",
        like="hexpm/hexpm#1825",
    ),
    Mutation(
        "an outcome repeated in other words is said to be recorded",
        f"{_SERVER}/core/shard.py",
        "        elif attempt.outcome_digest == end.digest:\n",
        "        elif attempt.outcome_digest:\n",
        like="OptimalBits/bull#308",
        why_not_found="no worker of ours says two things of one attempt; tests/core has one that does",
    ),
    # Written from the code alone.
    Mutation(
        "the last of those that are due together is left out",
        f"{_SERVER}/core/near.py",
        "                task.is_ready = True\n                ready.append(task)\n\n    def next_due",
        "                task.is_ready = True\n                if not ready or due:\n"
        "                    ready.append(task)\n\n    def next_due",
        is_blind=True,
    ),
    Mutation(
        "deadlines are not watched",
        f"{_SERVER}/core/near.py",
        "            self.with_deadline[task] = None\n",
        "            self.with_deadline.pop(task, None)\n",
        is_blind=True,
    ),
    Mutation(
        "a lane that runs low is not read on",
        f"{_SERVER}/core/near.py",
        "                    self._low[head] = None\n",
        "                    self._low.pop(head, None)\n",
        is_blind=True,
    ),
    Mutation(
        "a new holder keeps the old number of its assignment",
        f"{_SERVER}/core/leases.py",
        "            lease.assignment_number = 0\n",
        "            lease.assignment_number += 0\n",
        is_blind=True,
        why_not_found="no worker of ours leaves out what it listed before; tests/core has it",
    ),
    Mutation(
        "a pause of the node counts as silence of its workers",
        f"{_SERVER}/core/leases.py",
        "            lease.unexpired_until = max(expires_at, min(expires_at + gap, now.elapsed + lease.duration))\n",
        "            lease.unexpired_until = expires_at\n",
        is_blind=True,
        why_not_found="whoever paused that long finds its workers have stopped by themselves; tests/core has it",
    ),
    Mutation(
        "a handler that is to stop gets no grace",
        f"{_SERVER}/core/leases.py",
        "            if now.elapsed >= lease.stop_asked_at + bounds.STOP_GRACE:\n",
        "            if now.elapsed >= lease.stop_asked_at:\n",
        is_blind=True,
    ),
    Mutation(
        "a term begun though its claim is gone",
        f"{_SERVER}/shards/beginnings.py",
        "            if self.claims.get(number) is claims[number]\n",
        "            if number in claims\n",
        is_blind=True,
        why_not_found="the store tells such a leader within a second that another leads; tests/shards has it",
    ),
    Mutation(
        "the cuts of a bucket are not handed to the shard",
        f"{_SERVER}/shards/buckets.py",
        "BucketsLoaded(tasks[number], cuts[number], due_from)",
        "BucketsLoaded(tasks[number], {}, due_from)",
        is_blind=True,
    ),
    Mutation(
        "withdrawn credit counts as free at once",
        f"{_WORKER}/credit.py",
        "        self.withdrawing = count - untold\n",
        "        self.withdrawing = 0\n",
        is_blind=True,
    ),
    Mutation(
        "a worker believes the refusal of a stream for ever",
        f"{_WORKER}/reach.py",
        "        self._refused.pop(stream.address, None)\n",
        "        self._refused.get(stream.address, None)\n",
        is_blind=True,
        why_not_found="no node takes the address of another one here; tests/worker has it",
    ),
    Mutation(
        "attempts wait no longer from one to the next",
        f"{_SERVER}/core/retry.py",
        "        wait = policy.initial_backoff * math.exp(growth)\n",
        "        wait = policy.initial_backoff * growth\n",
        is_blind=True,
    ),
    Mutation(
        "retention is not kept",
        f"{_SERVER}/maintenance/retention.py",
        "loop.clock.now().earliest - retention",
        "loop.clock.now().earliest",
    ),
    Mutation(
        "a cancellation tells another state",
        f"{_SERVER}/core/cancellations.py",
        "return Cancelled(result, progress.state, ",
        "return Cancelled(result, TaskState.PENDING, ",
    ),
    Mutation(
        "of a lane the last to come goes first",
        f"{_SERVER}/core/ready.py",
        "        heapq.heappush(line.heap, entry)\n",
        "        line.heap.insert(0, entry)\n",
    ),
    Mutation(
        "a queue goes before another one for ever",
        f"{_SERVER}/core/matcher.py",
        "                queue.virtual_time = self._virtual_time + 1\n",
        "                queue.virtual_time = self._virtual_time\n",
    ),
    Mutation(
        "a drain does not wait until answers are handled",
        f"{_SERVER}/scheduler.py",
        "not (self.lanes.is_idle and not self.loop.inbox_size)",
        "not self.lanes.is_idle",
        why_not_found="the answer of the store has to wait for the loop just then; tests/shards has it do so",
    ),
    Mutation(
        "a clock is set by what was confirmed before a step",
        f"{_SERVER}/clock/discipline.py",
        "        return not before.earliest(before.at) <= written <= before.latest(seen.at)\n",
        "        return True\n",
        why_not_found="a node has to start in the second in which the store's clock jumps; tests/clock has one",
    ),
    Mutation(
        "no failure is tried again",
        f"{_SERVER}/core/lifecycle.py",
        "    if task.progress.attempts_used >= task.policy.max_attempts:\n",
        "    if True:\n",
    ),
    Mutation(
        "one attempt fewer than asked for",
        f"{_SERVER}/core/lifecycle.py",
        "    if task.progress.attempts_used >= task.policy.max_attempts:\n",
        "    if task.progress.attempts_used >= task.policy.max_attempts - 1:\n",
    ),
    Mutation(
        "what is not retryable is tried again",
        f"{_SERVER}/core/lifecycle.py",
        "    if not is_retryable:\n",
        "    if False:\n",
    ),
    Mutation(
        "a completion deadline is over seconds early",
        f"{_SERVER}/core/lifecycle.py",
        "    if policy.completion_deadline is not None and utc >= policy.completion_deadline:\n",
        "    if policy.completion_deadline is not None and utc + 5_000_000 >= policy.completion_deadline:\n",
    ),
    Mutation(
        "a lost attempt is tried again although it is to fail its task",
        f"{_SERVER}/core/lifecycle.py",
        "    if is_lost and task.policy.fail_when_lost:\n",
        "    if False:\n",
    ),
    Mutation(
        "a start deadline counts after attempts",
        f"{_SERVER}/core/lifecycle.py",
        "utc >= policy.start_deadline and not task.progress.attempts_used:",
        "utc >= policy.start_deadline:",
    ),
    Mutation(
        "a pause prolongs also what was heard of after it",
        f"{_SERVER}/core/leases.py",
        "            lease.unexpired_until = max(expires_at, min(expires_at + gap, now.elapsed + lease.duration))\n",
        "            lease.unexpired_until = expires_at + gap\n",
    ),
    # Drawn at random among all lines that a simple change makes wrong.
    Mutation(
        "what a worker surely has not begun is not given up",
        f"{_SERVER}/core/shard.py",
        "            self.leases.end_unstarted(lease, event, now, out)\n",
        "            pass\n",
        is_blind=True,
    ),
    Mutation(
        "returns in a row are not counted",
        f"{_SERVER}/core/lifecycle.py",
        "    returns = last.returns_in_row + 1\n",
        "    returns = last.returns_in_row\n",
        is_blind=True,
        why_not_found="no worker hands back as often in a row; tests/core has it",
    ),
    Mutation(
        "what another node says counts however old it is",
        f"{_SERVER}/leadership/clustered.py",
        "        return read_at is not None and self._clock.elapsed() - read_at <= _CURRENT\n",
        "        return read_at is not None or self._clock.elapsed() - read_at <= _CURRENT\n",
        is_blind=True,
    ),
    Mutation(
        "the second of two in line never takes over",
        f"{_SERVER}/leadership/clustered.py",
        "        if len(line) < 2:\n",
        "        if len(line) <= 2:\n",
        is_blind=True,
    ),
    Mutation(
        "a recorded outcome is not told to its worker",
        f"{_SERVER}/streams/worker_stream.py",
        "            self._outbox.record(token)\n",
        "            pass\n",
        is_blind=True,
    ),
    Mutation(
        "a record that does not decode is passed over by the audit",
        f"{_SERVER}/maintenance/audit.py",
        "for record in (*due.corrupt, *held.corrupt):",
        "for record in (*due.corrupt, *held.corrupt)[:0]:",
    ),
    Mutation(
        "what does not decode is set aside by the audit although it is in memory",
        f"{_SERVER}/core/shard.py",
        "        for key in event.corrupt:\n            if not self._is_known(key):\n",
        "        for key in event.corrupt:\n            if key not in self.lines.busy:\n",
    ),
    Mutation(
        "a task whose record does not decode is said not to be there",
        f"{_SERVER}/core/cancellations.py",
        "errors.RecordCorrupt(key.task_id)",
        "errors.TaskNotFound(key.task_id)",
    ),
    Mutation(
        "what does not decode is set aside under any term",
        f"{_SERVER}/storage/memory.py",
        "            return stale\n        kept = self._records.get(record.key)",
        "            pass\n        kept = self._records.get(record.key)",
        why_not_found="a replaced leader has to be just about to set a task aside; the conformance suite has one",
    ),
    Mutation(
        "an outcome that is said again is called lost",
        f"{_SERVER}/core/shard.py",
        "        elif attempt.outcome_digest == end.digest:\n",
        "        elif attempt.outcome_digest == end.digest and attempt.outcome is AttemptOutcome.RETURNED:\n",
    ),
    Mutation(
        "the audit passes over the last task of a head",
        f"{_SERVER}/core/near.py",
        "        return key.due_time < complete_to and (head is None or head.cursor is None or key <= head.cursor)\n",
        "        return key.due_time < complete_to and (head is None or head.cursor is None or key < head.cursor)\n",
        is_blind=True,
        why_not_found="an audit that looks at less finds nothing wrong by that",
    ),
    Mutation(
        "who waits for a cancellation's end is not on the agenda",
        f"{_SERVER}/shards/agenda.py",
        "            self._waiting.add(shard)\n",
        "            pass\n",
        is_blind=True,
        why_not_found="the next tick tells them within a second; tests/shards has it",
    ),
    Mutation(
        "credit is taken only for types that nobody subscribed to",
        f"{_SERVER}/streams/worker_stream.py",
        "        if not self._task_types.issuperset(of_types):\n",
        "        if self._task_types.issuperset(of_types):\n",
        is_blind=True,
    ),
    Mutation(
        "who waits for an insert that came to nothing is not told",
        f"{_SERVER}/core/callers.py",
        "        out.answers.append((write.origin, error))\n",
        "        pass\n",
        is_blind=True,
        why_not_found="clients ask again when no answer comes; tests/core has it",
    ),
    Mutation(
        "who waits for a commit is not told if the term ends before it",
        f"{_SERVER}/shards/lanes.py",
        "            self._loop.end(shard, piece.writes if is_applied else (), () if is_applied else piece.writes)\n",
        "            pass\n",
        is_blind=True,
    ),
    Mutation(
        "heads are not cut when lanes become many",
        f"{_SERVER}/core/near.py",
        "                self._cut(oversized, head)\n",
        "                pass\n",
        is_blind=True,
        why_not_found="no run has so many lanes; tests/core has it",
    ),
    Mutation(
        "what was matched is not granted",
        f"{_SERVER}/shards/loop.py",
        "            self._handle(shard, Grant(task, holder, token, self._lease, last_read(holder)), now, out)\n",
        "            pass\n",
        is_blind=True,
    ),
    Mutation(
        "a shard is handed over to nobody, and never to a successor",
        f"{_SERVER}/leadership/clustered.py",
        "                if successor is not None:\n",
        "                if successor is None:\n",
        is_blind=True,
    ),
    Mutation(
        "nobody looks for live nodes before a store is given to a solo node",
        f"{_SERVER}/leadership/rebinding.py",
        "    if client is not None:\n",
        "    if client is None:\n",
        is_blind=True,
        why_not_found="not played here; tests/leadership has it",
    ),
    Mutation(
        "a worker's list proves nothing absent",
        f"{_SERVER}/streams/inquiry.py",
        "        return told is not None and told[0] == epoch and told[1] <= request\n",
        "        return told is None and told[0] == epoch and told[1] <= request\n",
        is_blind=True,
    ),
    Mutation(
        "demand is looked at again though nothing waits",
        f"{_SERVER}/core/matcher.py",
        "            self._look_again |= waiting > 0 and len(pool.demanding.told) < len(pool.streams)\n",
        "            self._look_again |= waiting > 0 or len(pool.demanding.told) < len(pool.streams)\n",
        is_blind=True,
        why_not_found="costs work, and nothing else",
    ),
    Mutation(
        "the list of a stream that has ended goes on counting",
        f"{_WORKER}/reach.py",
        "            self._merge()\n",
        "            pass\n",
        is_blind=True,
        why_not_found="what is dialled in vain is given up by itself; tests/worker has it",
    ),
    Mutation(
        "the grace of a lease is no longer than a new leader listens",
        f"{_SERVER}/core/leases.py",
        "        grace = max(0, min(duration, takeover + duration - now.latest))\n",
        "        grace = min(0, min(duration, takeover + duration - now.latest))\n",
        is_blind=True,
        why_not_found="workers are heard within that; tests/core has it",
    ),
    Mutation(
        "demand is told only where nothing waits",
        f"{_SERVER}/core/matcher.py",
        "            if not waiting and not pool.demanding.told:\n",
        "            if waiting and not pool.demanding.told:\n",
        is_blind=True,
    ),
    Mutation(
        "a transaction has one write more than it may",
        f"{_SERVER}/shards/lanes.py",
        "                if count >= room or bytes_left <= 0:\n",
        "                if count > room or bytes_left <= 0:\n",
        is_blind=True,
        why_not_found="nothing here minds; tests/shards has it",
    ),
    Mutation(
        "a solo node does not notice that a term has ended",
        f"{_SERVER}/leadership/solo.py",
        "        self._ended.append(shard)\n",
        "        pass\n",
        is_blind=True,
    ),
    Mutation(
        "a claim is good for one raise more than its epochs",
        f"{_SERVER}/leadership/__init__.py",
        "        return self._first is not None and self._raises >= RAISES_PER_CLAIM\n",
        "        return self._first is not None and self._raises > RAISES_PER_CLAIM\n",
        is_blind=True,
        why_not_found="no run raises so often under one claim; tests/leadership has it",
    ),
    Mutation(
        "updates are left out of transactions",
        f"{_SERVER}/shards/lanes.py",
        "                    batch.updates.append(write)\n",
        "                    pass\n",
        is_blind=True,
    ),
    Mutation(
        "a term that began is taken for a failure only if there was none",
        f"{_SERVER}/shards/beginnings.py",
        "            if (failure := self._failures.get(number)) is not None:\n",
        "            if (failure := self._failures.get(number)) is None:\n",
        is_blind=True,
    ),
)
