"""What is to happen in a run, drawn from its seed before it begins: the set-up, the tasks, and the faults.

It is plain data, so that a run that fails can be tried again with fewer tasks and fewer faults.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros

TASK_TYPES: Final = ("send", "resize")
QUEUES: Final = ("default", "mail")
SHORTEST: Final = 30 * bounds.SECOND
"""A run that ends earlier does not count."""
_UNHURRIED: Final = 5 * bounds.SECOND
RETRY_AFTER: Final[Micros] = 300 * bounds.MILLISECOND
"""What a handler asks for that wants to be tried again later."""


class Kind(StrEnum):
    """What kind of cluster it is."""

    SOLO = "solo"
    """One node without etcd at a time, each followed by another."""
    CLUSTER = "cluster"
    """Nodes that meet in etcd."""


class Leaving(StrEnum):
    """How one node of a cluster is left when all else is healed."""

    NOTHING = "well"
    PAUSED = "paused"
    DEAD = "dead"
    WITHOUT_STORE = "without the store"
    WITHOUT_ETCD = "without etcd"


class Ending(StrEnum):
    """How an attempt's handler ends, if nobody stops it."""

    SUCCESS = "success"
    FAILURE = "failure"
    FATAL = "fatal"
    LATER = "later"
    """Asks to be tried again after a while."""
    STUBBORN = "stubborn"
    """Succeeds, and does not listen when it is asked to stop."""


class FaultKind(StrEnum):
    """What can go wrong."""

    NODE_CRASH = "node crash"
    NODE_LOST = "node lost"
    """Its machine is gone: nobody is told."""
    NODE_PAUSE = "node pause"
    NODE_REPLACED = "node replaced"
    NODE_REPLACED_WHILE_PAUSED = "node replaced while paused"
    NODE_DRAIN = "node drain"
    STORE_UNREACHABLE = "store unreachable"
    STORE_REFUSING = "store refusing"
    STORE_LOSSY = "store lossy"
    STORE_FROZEN = "store frozen"
    STORE_SLOW = "store slow"
    STREAMS_CUT = "streams cut"
    STREAMS_LOST = "streams lost"
    STREAMS_DEAF = "streams deaf"
    """What the worker says is lost."""
    STREAMS_MUTE = "streams mute"
    """What the node says is lost."""
    WORKER_PARTITION = "worker partition"
    CLIENT_PARTITION = "client partition"
    CLIENT_CUT = "client cut"
    SLOW_NETWORK = "slow network"
    WORKER_CRASH = "worker crash"
    WORKER_PAUSE = "worker pause"
    WORKER_STOP = "worker stop"
    CLOCK_JUMP = "clock jump"
    STORE_GONE_FOR_ALL = "store gone for all"
    NODE_PAIR_PARTITION = "node pair partition"
    NODE_ISOLATED = "node isolated"
    """From etcd, the store, and all other nodes; workers and clients may still reach it."""
    NODE_JOINS = "node joins"
    NODE_LEAVES = "node leaves"
    """Drains, and does not come back for a while."""
    ETCD_PARTITION = "etcd partition"
    """Between a node and all of etcd."""
    ETCD_STREAMS_LOST = "etcd streams lost"
    """Watch and keep-alive of a node fall silent; its calls go on."""
    ETCD_ANSWER_LOST = "etcd answer lost"
    ETCD_MEMBER_KILLED = "etcd member killed"
    ETCD_MEMBER_FROZEN = "etcd member frozen"
    ETCD_AWAY = "etcd away"
    ETCD_FROZEN = "etcd frozen"
    ETCD_SLOW = "etcd slow"
    ETCD_COMPACTED = "etcd compacted"
    """While the watches of a node are lost."""
    SESSION_REVOKED = "session revoked"
    ELECTION_KEY_DELETED = "election key deleted"
    MEMBER_KEY_DELETED = "member key deleted"
    ETCD_RESTORED = "etcd restored"
    """From an older copy; an operator follows the advice that nodes give."""
    STORE_FELL_BACK = "store fell back"
    """To an older state of its own, as when a replica is promoted that lagged behind."""
    STORE_CLOCK_JUMP = "store clock jump"
    ALL_CLOCKS_JUMP = "all clocks jump"
    RECORD_SPOILED = "record spoiled"
    """A task's: it decodes no more."""


_ONLY_OF_SOLO: Final = frozenset((FaultKind.NODE_REPLACED, FaultKind.NODE_REPLACED_WHILE_PAUSED))
_ONLY_OF_CLUSTERS: Final = frozenset(
    (
        FaultKind.STORE_GONE_FOR_ALL,
        FaultKind.NODE_PAIR_PARTITION,
        FaultKind.NODE_ISOLATED,
        FaultKind.NODE_JOINS,
        FaultKind.NODE_LEAVES,
        FaultKind.ETCD_PARTITION,
        FaultKind.ETCD_STREAMS_LOST,
        FaultKind.ETCD_ANSWER_LOST,
        FaultKind.ETCD_MEMBER_KILLED,
        FaultKind.ETCD_MEMBER_FROZEN,
        FaultKind.ETCD_AWAY,
        FaultKind.ETCD_FROZEN,
        FaultKind.ETCD_SLOW,
        FaultKind.ETCD_COMPACTED,
        FaultKind.SESSION_REVOKED,
        FaultKind.ELECTION_KEY_DELETED,
        FaultKind.MEMBER_KEY_DELETED,
        FaultKind.ETCD_RESTORED,
        FaultKind.STORE_FELL_BACK,
        FaultKind.STORE_CLOCK_JUMP,
        FaultKind.ALL_CLOCKS_JUMP,
    )
)
_NOT_OF: Final = {Kind.SOLO: _ONLY_OF_CLUSTERS, Kind.CLUSTER: _ONLY_OF_SOLO}
_DRAWN_APART: Final = (FaultKind.RECORD_SPOILED,)
"""Came later: drawn with the others, it would have the seeds that found something find nothing."""
_DRAWN: Final = {
    kind: tuple(fault for fault in FaultKind if fault not in {*_NOT_OF[kind], *_DRAWN_APART}) for kind in Kind
}
FAULTS: Final = {kind: (*_DRAWN[kind], *_DRAWN_APART) for kind in Kind}

_SHARE_APART: Final = 0.3
"""Of the seeds."""

SOLO_MOMENTS: Final = (
    "commit sent",
    "commit applied",
    "commit answered",
    "raised",
    "read tasks",
    "read attempt",
    "read lanes",
    "assignments said",
    "outcomes recorded",
    "submission answered",
    "cancel requested",
    "outcome said",
)
"""Moments at which a fault that waits for one strikes."""
CLUSTER_MOMENTS: Final = (*SOLO_MOMENTS, "etcd txn applied", "etcd lease granted", "leases held")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """A task, and what its client does about it. Times count from the beginning of the run."""

    task_id: str
    client: int
    submit_at: Micros
    batch: int
    """Tasks of one client with the same number above 0 are submitted together."""
    run_at: Micros | None
    delay: Micros | None
    queue: str
    task_type: str
    priority: int
    fairness_key: str
    max_attempts: int
    backoff: Micros
    attempt_timeout: Micros
    start_deadline: Micros | None
    completion_deadline: Micros | None
    fails_when_lost: bool
    payload_bytes: int
    endings: Sequence[tuple[Ending, Micros]]
    """Of its attempts in turn; later ones succeed at once."""
    cancel_at: Micros | None
    cancel_wait: Micros
    repeat_at: Micros | None
    """Submit it again."""
    is_repeated_differently: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """A fault: strikes at its time, or at the first such moment after it."""

    at: Micros
    kind: FaultKind
    target: int
    duration: Micros
    moment: str | None
    reaction: Micros
    """How long after its moment it strikes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the cluster is set up."""

    kind: Kind
    nodes: int
    members: int
    """Of etcd; 0: there is none."""
    session: Micros
    shards: int
    workers: int
    clients: int
    slots: int
    prefetch: int
    lease: Micros
    heartbeat: Micros
    horizon: Micros
    head: int
    is_narrow: bool
    """Most tasks wait in one lane."""
    retention: Micros
    step: Micros
    is_shuffled: bool
    duration: Micros
    """How long faults go on; the rest is for healing."""
    leaves_paused: bool
    """What is paused at the end stays so."""
    leaving: Leaving

    @property
    def hurries_from(self) -> Micros:
        """From when handlers hurry: what is left to see of a run that was healed does not need long ones."""
        return max(SHORTEST, self.duration + _UNHURRIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """See the module's docstring."""

    seed: int
    setup: Setup
    tasks: Sequence[TaskPlan]
    faults: Sequence[FaultPlan]


def draw(seed: int, kind: Kind = Kind.CLUSTER) -> Plan:
    """Draw the plan of a seed."""
    source = random.Random(f"{seed} plan" if kind is Kind.SOLO else f"{seed} {kind} plan")
    setup = _setup(source, kind)
    tasks = [
        _task(source, number, setup)
        for number in range(source.randint(*((100, 140) if kind is Kind.SOLO else (104, 110))))
    ]
    faults = [_fault(source, setup, _DRAWN[kind]) for _ in range(source.randint(5, 12))]
    apart = random.Random(f"{seed} {kind} apart")
    if apart.random() < _SHARE_APART:
        faults += [_fault(apart, setup, _DRAWN_APART) for _ in range(apart.randint(1, 3))]
    return Plan(seed=seed, setup=setup, tasks=tasks, faults=sorted(faults, key=lambda fault: fault.at))


def _setup(source: random.Random, kind: Kind) -> Setup:
    lease, heartbeat = source.choice(((15, 5), (15, 3), (6, 2), (8, 1)))
    is_solo = kind is Kind.SOLO
    return Setup(
        kind=kind,
        nodes=1 if is_solo else source.choice((3, 3, 3, 4)),
        members=0 if is_solo else source.choice((1, 1, 3)),
        session=0 if is_solo else source.choice((3, 5, 5)) * bounds.SECOND,
        shards=source.choice((1, 2, 4) if is_solo else (2, 4, 6, 8)),
        workers=source.choice((2, 2, 3)),
        clients=2,
        slots=source.choice((1, 3, 10)),
        prefetch=source.choice((0, 2, 10)),
        lease=lease * bounds.SECOND,
        heartbeat=heartbeat * bounds.SECOND,
        horizon=source.choice((10, 60)) * bounds.SECOND,
        head=source.choice((4, 8, 256)),
        is_narrow=source.random() < 0.5,
        retention=source.choice((bounds.HOUR, bounds.HOUR, 5 * bounds.SECOND)),
        step=source.choice((1, 5, 40)),
        is_shuffled=source.random() < 0.5,
        duration=source.randint(*((30, 45) if is_solo else (20, 27))) * bounds.SECOND,
        leaves_paused=source.random() < 0.5,
        leaving=Leaving.NOTHING if is_solo else source.choice((Leaving.NOTHING, *Leaving)),
    )


def _task(source: random.Random, number: int, setup: Setup) -> TaskPlan:
    span = setup.duration - 5 * bounds.SECOND
    # Most come in bursts: many at once, due at once.
    burst = source.randrange(8)
    submit_at = (
        span * burst // 8 + source.randrange(200 * bounds.MILLISECOND)
        if source.random() < 0.6
        else source.randrange(span)
    )
    is_batched = source.random() < 0.4
    latest = (20 if setup.kind is Kind.SOLO else 12) * bounds.SECOND
    run_at, delay = _when(source, submit_at, burst, span, latest)
    due = submit_at if run_at is None else max(run_at, submit_at)
    has_deadline = source.random()
    is_plain = setup.is_narrow and source.random() < 0.8
    return TaskPlan(
        task_id=f"task-{number}",
        client=source.randrange(setup.clients),
        submit_at=submit_at,
        batch=burst + 1 if is_batched else 0,
        run_at=run_at,
        delay=delay,
        queue=QUEUES[0] if is_plain else source.choice(QUEUES),
        task_type=TASK_TYPES[0] if is_plain else source.choice(TASK_TYPES),
        priority=0 if is_plain else source.choice((0, 0, 0, -3, 5)),
        fairness_key="" if is_plain else source.choice(("", "", "tenant-a", "tenant-b")),
        max_attempts=source.choice((1, 2, 3, 5)),
        backoff=source.choice((1, 50, 500, 2_000)) * bounds.MILLISECOND,
        attempt_timeout=source.choice((1, 4, 10, 30, 600)) * bounds.SECOND,
        start_deadline=due + source.randint(1, 10) * bounds.SECOND if has_deadline < 0.1 else None,
        completion_deadline=due + source.randint(1, 15) * bounds.SECOND if has_deadline > 0.9 else None,
        fails_when_lost=source.random() < 0.15,
        payload_bytes=source.choice((0, 10, 200, 2_000)),
        endings=[_ending(source) for _ in range(source.randint(0, 3))],
        cancel_at=_cancel_at(source, submit_at, due),
        cancel_wait=source.choice((0, 200, 1_000, 3_000)) * bounds.MILLISECOND,
        repeat_at=submit_at + source.randrange(10 * bounds.SECOND) if source.random() < 0.2 else None,
        is_repeated_differently=source.random() < 0.3,
    )


def _when(
    source: random.Random, submit_at: Micros, burst: int, span: Micros, latest: Micros
) -> tuple[Micros | None, Micros | None]:
    draw = source.random()
    if draw < 0.25:
        return None, None
    if draw < 0.4:
        return None, source.randrange(8 * bounds.SECOND)
    if draw < 0.7:
        return span * burst // 8 + bounds.SECOND, None
    if draw < 0.95:
        return submit_at + source.randrange(latest), None
    return submit_at - bounds.MINUTE, None


def _cancel_at(source: random.Random, submit_at: Micros, due: Micros) -> Micros | None:
    draw = source.random()
    if draw < 0.12:
        return submit_at + source.randrange(bounds.SECOND)
    if draw < 0.3:
        return max(submit_at, due + source.randint(-20, 1_000) * bounds.MILLISECOND)
    return None


def _ending(source: random.Random) -> tuple[Ending, Micros]:
    kinds = (
        Ending.SUCCESS,
        Ending.SUCCESS,
        Ending.FAILURE,
        Ending.FAILURE,
        Ending.FATAL,
        Ending.LATER,
        Ending.STUBBORN,
    )
    longest = source.choice((1, 100, 2_000, 12_000))
    return source.choice(kinds), source.randrange(longest * bounds.MILLISECOND)


def _fault(source: random.Random, setup: Setup, kinds: Sequence[FaultKind]) -> FaultPlan:
    moments = SOLO_MOMENTS if setup.kind is Kind.SOLO else CLUSTER_MOMENTS
    return FaultPlan(
        at=source.randrange(bounds.SECOND, setup.duration - bounds.SECOND),
        kind=source.choice(kinds),
        target=source.randrange(12),
        duration=int(source.choice((0.2, 1, 3, 8, 20)) * source.uniform(0.5, 1.5) * bounds.SECOND),
        moment=source.choice(moments) if source.random() < 0.6 else None,
        reaction=source.choice((0, 0, 30, 300, 3_000)),
    )
