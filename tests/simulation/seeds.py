"""Seeds that once failed, with what they found and the change that mended it. They are run again with every change.

A seed stands for its plan as `plan.draw` draws it: whoever changes that function draws other plans from then on, and
relies on `planted`, where the same faults are planted anew, for what these seeds have proven.
"""

from dataclasses import dataclass
from typing import Final

from simulation.plan import Kind


@dataclass(frozen=True, slots=True)
class Found:
    """A fault that the simulation found."""

    kind: Kind
    seed: int
    invariant: str
    fault: str
    change: str


FOUND: Final = (
    Found(
        Kind.SOLO,
        5,
        "S13",
        "a replaced leader that went on after a pause told workers that leases of its successor were lost",
        "Call a lease lost only after a read, since a replaced leader does not know its successor's grants",
    ),
    Found(
        Kind.SOLO,
        27,
        "S13",
        "the same, with three workers",
        "Call a lease lost only after a read, since a replaced leader does not know its successor's grants",
    ),
    Found(
        Kind.SOLO,
        702,
        "L4",
        "a node whose store was away for 25 s while it took its shards gave up, though nobody had superseded it",
        "Keep trying to take a shard through a long outage, and know a late raise for one's own",
    ),
    Found(
        Kind.SOLO,
        2077,
        "S7",
        "an assignment that was under way for longer than its attempt's time and grace was started all the same",
        "Start no assignment whose attempt may have timed out on its way",
    ),
    Found(
        Kind.CLUSTER,
        20109,
        "L1",
        "a task that a store which was set back had forgotten was in memory twice when it was submitted anew",
        "Let go of what a store that was set back has forgotten, when it takes the task anew",
    ),
    Found(
        Kind.CLUSTER,
        101545,
        "L1",
        "a cluster rebound twice, with the store set back in between and all clocks after it, got lower epochs",
        "Never rebind a cluster to lower epochs than etcd says it was rebound to before",
    ),
)
