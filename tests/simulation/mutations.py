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
    ),
    Mutation(
        "attempts counted when they start, not when they are granted",
        f"{_SERVER}/core/lifecycle.py",
        "        last.attempts_used + 1,\n",
        "        last.attempts_used,\n",
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
    ),
    Mutation(
        "a lease renewed by a stream that is dead",
        f"{_SERVER}/core/lease.py",
        "        return max(self.unexpired_until, self.holder.renewed_at + self.duration)",
        "        return max(self.unexpired_until, self.holder.renewed_at + 1000 * self.duration)",
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
    ),
    Mutation(
        "a requested cancellation that is not durable",
        f"{_SERVER}/core/cancellations.py",
        "            self._lines.update(task, lifecycle.cancel_requested(last, answers), event, out)\n",
        "            self._ask(task, event, now, out)\n",
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
        "a shard raised only over terms of its own from the beginning",
        f"{_SERVER}/shards/terms.py",
        "            requests.append(RaiseRequest(shard, holder, None, held and (*held, holder)))\n",
        "            only = (*(held or (b"
        ",)), holder)\n"
        "            requests.append(RaiseRequest(shard, holder, None, only))\n",
    ),
    Mutation(
        "leases are not loaded with a term",
        f"{_SERVER}/shards/terms.py",
        "                HeldLoaded([task for task in held.tasks if task.shard == number], raised[number].raises),\n",
        "                HeldLoaded([], raised[number].raises),\n",
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
        "an outcome is forgotten with its stream",
        f"{_WORKER}/outcomes.py",
        "            if not attempt.sent_on and not attempt.is_queued:\n                self._route(attempt)\n",
        "            pass\n",
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
)
