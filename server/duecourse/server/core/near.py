"""What a shard keeps in memory of its waiting tasks: bounded heads of its lanes, and cursors to their rest.

A shard knows the waiting tasks due before its *horizon*; later ones are only in the store. Of each lane it keeps a
*head*. While the head is complete its cursor is None: every waiting task of the lane due before the horizon is in
memory. A head that overflows is cut, and the cursor is the key of its last task: what comes after is only in the
store, and is read on when the head runs low.

The two ways to lose a task here are closed like this:

- A task placed while a read of its lane's rest runs, beyond the cursor, may be missing in what the read saw. It is
  noted as left out, and the read does not move the cursor past it.
- A cursor that moves back while such a read runs outdates it: the read's version no longer matches, and it is dropped.

The horizon advances before the load of what it uncovers is issued, so that a task placed meanwhile enters memory by
itself. Loads may bring tasks that have changed since: every write compares the revision.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator

from duecourse.model.instants import Micros
from duecourse.server.core import lifecycle
from duecourse.server.core.effects import LaneLoad
from duecourse.server.core.task import DueKey, Lane, ShardId, Task, TaskKey

_DUE_SLACK = 1_024


class Head:
    """The first tasks of one lane."""

    __slots__ = ("_versions", "cursor", "is_loading", "lane", "left_out", "tasks", "version")

    def __init__(self, lane: Lane, versions: Iterator[int]) -> None:
        self.lane = lane
        self.tasks: set[Task] = set()
        self.cursor: DueKey | None = None
        self._versions = versions
        self.version = 0
        self.is_loading = False
        self.left_out: DueKey | None = None

    def admits(self, key: DueKey) -> bool:
        """Tell whether a task belongs into memory; note it as left out if not."""
        if self.cursor is None or key <= self.cursor:
            return True
        self.leave_out(key)
        return False

    def leave_out(self, key: DueKey) -> None:
        """Keep a read that runs from moving the cursor up to a key."""
        if self.is_loading and (self.left_out is None or key < self.left_out):
            self.left_out = key

    def move_cursor(self, cursor: DueKey | None) -> None:
        """Set the cursor; a read that runs is outdated."""
        self.cursor = cursor
        self.version = next(self._versions)
        self.is_loading = False
        self.left_out = None


def due_key(task: Task) -> DueKey:
    """Return a waiting task's place in its lane."""
    due_time = task.progress.due_time
    assert due_time is not None, "an ended task has no place in a lane"
    return DueKey(due_time, task.sequence)


class Near:
    """The waiting tasks of one shard that are in memory."""

    def __init__(self, shard: ShardId, horizon: Micros, head: int) -> None:
        self.shard = shard
        self.horizon = horizon
        self.head = head
        """How many tasks of a lane are kept; twice as many may be for a while."""
        self.tasks: dict[TaskKey, Task] = {}
        self.heads: dict[Lane, Head] = {}
        self.with_deadline: dict[Task, None] = {}
        """In an order that is the same wherever it runs, so that a simulation can be repeated."""
        self._due: list[tuple[Micros, int, Task]] = []
        self._due_bound = _DUE_SLACK
        self._low: dict[Head, None] = {}
        self._uncovered: set[Micros] = set()
        """Where the ranges of buckets begin that the horizon has uncovered and that are still being read."""
        self._versions = itertools.count(1)
        """One for all heads: a read for a head that is gone must not be taken for one of the lane's next head."""

    def advance(self, horizon: Micros) -> Micros:
        """Move the horizon; return up to where it was. The buckets in between are to be read now."""
        reached, self.horizon = self.horizon, horizon
        self._uncovered.add(reached)
        return reached

    def covered(self, due_from: Micros) -> None:
        """Note that the buckets which were uncovered from there on have been read."""
        self._uncovered.discard(due_from)

    def place(self, task: Task, ready: list[Task], due_before: Micros) -> None:
        """Take a waiting task in, if it is near and its lane's head admits it; `ready` gets it if it is due already.

        What is in memory of it is outdated: a load that saw the store before the task last changed.
        """
        due_time = task.progress.due_time
        assert due_time is not None, "an ended task does not wait"
        outdated = self.tasks.get(task.key)
        if outdated is not None:
            self.take(outdated)
        if due_time >= self.horizon:
            return
        head = self.heads.get(task.lane)
        if head is None:
            head = self.heads[task.lane] = Head(task.lane, self._versions)
        elif head.cursor is not None and not head.admits(DueKey(due_time, task.sequence)):
            return
        self.tasks[task.key] = task
        head.tasks.add(task)
        if lifecycle.first_deadline(task) is not None:
            self.with_deadline[task] = None
        if due_time <= due_before:
            task.is_ready = True
            ready.append(task)
        else:
            heapq.heappush(self._due, (due_time, task.sequence, task))
            if len(self._due) > self._due_bound:
                self._drop_outdated()
        if len(head.tasks) > 2 * self.head:
            self._cut(head, self.head)

    def take(self, task: Task) -> None:
        """Take a task out: it is about to change."""
        self._forget(task)
        head = self.heads[task.lane]
        head.tasks.discard(task)
        if len(head.tasks) <= self.head // 2:
            if head.cursor is not None:
                if not head.is_loading:
                    self._low[head] = None
            elif not head.tasks:
                del self.heads[task.lane]

    def collect_due(self, earliest: Micros, ready: list[Task]) -> None:
        """Report the tasks whose due time has come."""
        due = self._due
        while due and due[0][0] <= earliest:
            due_time, _, task = heapq.heappop(due)
            if self.tasks.get(task.key) is task and task.progress.due_time == due_time and not task.is_ready:
                task.is_ready = True
                ready.append(task)

    def next_due(self) -> Micros | None:
        """Return when the next task may be due."""
        return self._due[0][0] if self._due else None

    def is_complete_up_to(self, task: Task) -> bool:
        """Tell whether a waiting task would have to be in memory."""
        key = due_key(task)
        head = self.heads.get(task.lane)
        complete_to = min(self._uncovered, default=self.horizon)
        return key.due_time < complete_to and (head is None or head.cursor is None or key <= head.cursor)

    @property
    def is_low(self) -> bool:
        """Tell whether a lane runs low and its rest is in the store."""
        return bool(self._low)

    def collect_loads(self, loads: list[LaneLoad]) -> None:
        """Ask for the rest of the lanes that run low."""
        for head in self._low:
            if head.cursor is None or head.is_loading or self.heads.get(head.lane) is not head:
                continue
            head.is_loading = True
            head.left_out = None
            loads.append(LaneLoad(self.shard, head.lane, head.version, head.cursor, self.horizon, self.head))
        self._low.clear()

    def lane_loaded(
        self,
        lane: Lane,
        version: int,
        tasks: list[Task],
        is_end: bool,
        knows_better: Callable[[Task], bool],
        ready: list[Task],
        earliest: Micros,
    ) -> None:
        """Merge the rest of a lane, as far as it was read; where memory does not know better."""
        head = self.heads.get(lane)
        if head is None or head.version != version or not head.is_loading:
            return
        if not tasks and not is_end:
            head.is_loading = False
            self._low[head] = None
            return
        left_out = head.left_out
        cursor = None if is_end else due_key(tasks[-1])
        if left_out is not None and (cursor is None or cursor >= left_out):
            cursor = DueKey(left_out.due_time, left_out.sequence - 1)
        head.move_cursor(cursor)
        for task in tasks:
            if not knows_better(task):
                self.place(task, ready, earliest)
        self._settle(head)

    def lower_cursor(self, lane: Lane, cursor: DueKey) -> None:
        """Note that a lane is complete only up to a key."""
        head = self.heads.get(lane)
        if head is None:
            head = self.heads[lane] = Head(lane, self._versions)
        if head.cursor is not None and head.cursor <= cursor:
            head.leave_out(DueKey(cursor.due_time, cursor.sequence + 1))
            return
        head.move_cursor(cursor)
        for task in [task for task in head.tasks if due_key(task) > cursor]:
            head.tasks.discard(task)
            self._forget(task)
        self._settle(head)

    def limit_heads(self, head: int) -> None:
        """Keep so many tasks of a lane from now on."""
        if head < self.head:
            for oversized in [kept for kept in self.heads.values() if len(kept.tasks) > 2 * head]:
                self._cut(oversized, head)
        self.head = head

    def clear(self) -> None:
        """Forget everything; the matcher passes over what it still has of it."""
        for task in self.tasks.values():
            task.is_ready = False
        self.tasks.clear()
        self.heads.clear()

    def _cut(self, head: Head, kept: int) -> None:
        ordered = sorted(head.tasks, key=due_key)
        head.move_cursor(due_key(ordered[kept - 1]))
        for task in ordered[kept:]:
            head.tasks.discard(task)
            self._forget(task)

    def _drop_outdated(self) -> None:
        """Rid the due heap of tasks that were taken or left out, so that it stays in proportion to `tasks`."""
        tasks = self.tasks
        self._due = [
            entry
            for entry in self._due
            if tasks.get(entry[2].key) is entry[2] and entry[2].progress.due_time == entry[0]
        ]
        heapq.heapify(self._due)
        self._due_bound = 2 * len(self._due) + _DUE_SLACK

    def _settle(self, head: Head) -> None:
        if head.cursor is not None:
            if len(head.tasks) <= self.head // 2:
                self._low[head] = None
        elif not head.tasks and self.heads.get(head.lane) is head:
            del self.heads[head.lane]

    def _forget(self, task: Task) -> None:
        self.tasks.pop(task.key, None)
        task.is_ready = False
        if self.with_deadline:
            self.with_deadline.pop(task, None)
