"""The rules of the scheduler: pure, synchronous, without clock, randomness or logging.

A `Shard` owns the tasks of a range of slots during one term and turns events into effects; the `Matcher` decides which
due task goes to which worker. Both are driven by the node's loop, which carries out what they ask for.

A task's life::

            submit                 grant                 started
  (none) ───────────▶ PENDING ───────────▶ LEASED ───────────────▶ RUNNING
                        │  ▲                 │  │                    │ │ │
                 cancel │  │ proven          │  │ cancel, proven     │ │ └─ success ─────────▶ SUCCEEDED
                        ▼  │ unstarted       │  │ unstarted          │ └─── failure, no more ─▶ FAILED
                    CANCELLED ◀──────────────┼──┘                    │
                        ▲                    └─ lease lost ─┐        │ failure, timeout or lease lost,
                 cancel │                                   ▼        ▼ attempts left
                        └──────────────────────────────── RETRY_WAIT ─────▶ (due again) LEASED

What always holds:

- A task enters memory only by the commit that reports it created, or by a load; nothing leaves the node (no answer, no
  assignment) before the commit that makes it true.
- Per task at most one write is in flight; an event for such a task waits for the write's answer.
- Every write compares the task's revision, and the store compares the term's fence.
"""
