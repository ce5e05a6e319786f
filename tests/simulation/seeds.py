"""Seeds that once failed, with what they found and the change that mended it. They are run again with every change.

A seed stands for its plan as `plan.draw` draws it, and for what comes of that: whoever changes either has it find
something else, or nothing. So each names the mutation that puts its fault back, and `planted` demands that one of a
mutation's seeds still finds it; where none does, it looks for one to be recorded in their place. What is so rare that
there is none among thousands says so in `why_not_found`.
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
    mutation: str
    """What puts the fault back."""


FOUND: Final = (
    Found(
        Kind.SOLO,
        22,
        "S13",
        "a replaced leader that went on after a pause told workers that leases of its successor were lost",
        "Call a lease lost only after a read, since a replaced leader does not know its successor's grants",
        "a lease called lost without a read",
    ),
    Found(
        Kind.SOLO,
        93,
        "S13",
        "the same",
        "Call a lease lost only after a read, since a replaced leader does not know its successor's grants",
        "a lease called lost without a read",
    ),
    Found(
        Kind.SOLO,
        4,
        "L4",
        "a node whose store lost answers while it took its shards gave up, though nobody had superseded it",
        "Keep trying to take a shard through a long outage, and know a late raise for one's own",
        "a term whose raise took effect late is taken for another node's",
    ),
    Found(
        Kind.SOLO,
        474,
        "S7",
        "an assignment that was under way for longer than its attempt's time and grace was started all the same",
        "Start no assignment whose attempt may have timed out on its way",
        "an assignment is started whose attempt may have timed out on its way",
    ),
    Found(
        Kind.CLUSTER,
        2364,
        "L1",
        "a task that a store which was set back had forgotten was in memory twice when it was submitted anew",
        "Let go of what a store that was set back has forgotten, when it takes the task anew",
        "what a store has forgotten stays in memory when it takes it anew",
    ),
    Found(
        Kind.CLUSTER,
        1127,
        "L1",
        "a record that did not decode and that only the audit met was not set aside",
        "Set aside what does not decode also when only the audit meets it",
        "a record that does not decode is passed over by the audit",
    ),
    Found(
        Kind.CLUSTER,
        1674,
        "L4",
        "a candidacy that its node had withdrawn just before etcd was restored from an older copy stood for ever",
        "Look until candidacies that are withdrawn are seen to be gone",
        "a candidacy that was withdrawn is not looked at again",
    ),
    Found(
        Kind.SOLO,
        1583,
        "L1",
        "a task that had changed since an audit read it, and had not been in memory then, was counted as missed",
        "Count as missed only what has not changed since the audit read it",
        "what has changed since an audit read it counts as missed",
    ),
    Found(
        Kind.CLUSTER,
        116582,
        "S3",
        "a node that started took what was confirmed before the store's clock jumped for a word on what it showed then",
        "Set no node's clock by what was confirmed before the store's clock stepped",
        "a clock is set by what was confirmed before a step",
    ),
    Found(
        Kind.SOLO,
        200201,
        "P4",
        "a node that drained ended its streams before it had handled the last answers of the store",
        "Return what was granted while a node drained and could not be sent any more",
        "a drain does not wait until answers are handled",
    ),
    Found(
        Kind.SOLO,
        350167,
        "L2",
        "a lease that was heard of just after a pause of its leader lasted longer by the pause",
        "Excuse no lease for longer than if it was heard of after the pause",
        "a pause prolongs also what was heard of after it",
    ),
)
