"""What can go wrong with etcd, and between etcd and a node."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from simulation.etcd import Member, SimulatedEtcd
from simulation.nodes import KEYS
from simulation.plan import FaultKind, FaultPlan

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.etcd.keys import CandidateKey, MemberKey

if TYPE_CHECKING:
    from simulation.world import World

Later = Callable[[Callable[[], object]], None]
Strike = Callable[["World", FaultPlan, Later], bool]

_LONGEST_AWAY: Final = 12 * bounds.SECOND
_WATCH: Final = "/etcdserverpb.Watch/Watch"
_STREAMS: Final = (_WATCH, "/etcdserverpb.Lease/LeaseKeepAlive")


def _etcd(world: "World") -> SimulatedEtcd:
    assert world.etcd is not None
    return world.etcd


def _part(world: "World", fault: FaultPlan, later: Later) -> bool:
    """Cut a node off from all members; one way only, at times."""
    address = world.fleet.victim(fault.target)
    for member in _etcd(world).members:
        paths = [(address, member.endpoint), (member.endpoint, address)]
        if fault.target % 4 == 0:
            paths = paths[:1]
        elif fault.target % 4 == 1:
            paths = paths[1:]
        for path in paths:
            world.network.weather.block(*path)
            later(partial(world.network.weather.unblock, *path))
    return True


def _lose_streams(world: "World", fault: FaultPlan, later: Later) -> bool:
    return world.network.lose_methods(world.fleet.victim(fault.target), _STREAMS) > 0


def _lose_answer(world: "World", fault: FaultPlan, later: Later) -> bool:
    """Lose what is under way to a node: answers of what was applied, with notice or without."""
    address = world.fleet.victim(fault.target)
    has_notice = bool(fault.target % 2)
    return sum(world.network.cut(address, one.endpoint, has_notice=has_notice) for one in _etcd(world).members) > 0


def _kill_member(world: "World", fault: FaultPlan, later: Later) -> bool:
    member = _member(world, fault)
    if not member.takes_part:
        return False
    member.kill()
    later(_etcd(world).start)
    return True


def _freeze_member(world: "World", fault: FaultPlan, later: Later) -> bool:
    member = _member(world, fault)
    if not member.takes_part:
        return False
    member.freeze()
    later(member.thaw)
    return True


def _away(world: "World", fault: FaultPlan, later: Later) -> bool:
    etcd = _etcd(world)
    etcd.kill()
    later(etcd.start)
    return True


def _freeze(world: "World", fault: FaultPlan, later: Later) -> bool:
    for member in _etcd(world).members:
        if member.takes_part:
            member.freeze()
        later(member.thaw)
    return True


def _slow(world: "World", fault: FaultPlan, later: Later) -> bool:
    """Let etcd take most of a call's deadline, and more at times."""
    etcd = _etcd(world)
    etcd.slowness = (fault.target + 1) * 150 * bounds.MILLISECOND
    later(etcd.hasten)
    return True


def _compact(world: "World", fault: FaultPlan, later: Later) -> bool:
    """Forget what a node, whose watch falls silent now, would go on with."""
    address = world.fleet.victim(fault.target)
    etcd = _etcd(world)
    world.network.lose_methods(address, (_WATCH,))
    etcd.put(KEYS.member("passing by"), b"")
    etcd.delete(KEYS.member("passing by"))
    etcd.compact()
    return True


def _revoke_session(world: "World", fault: FaultPlan, later: Later) -> bool:
    etcd = _etcd(world)
    leases = {kv.lease for key in etcd.keyspace.keys(KEYS.coordination) if (kv := etcd.keyspace.get(key)) and kv.lease}
    if not leases:
        return False
    etcd.revoke(sorted(leases)[fault.target % len(leases)])
    return True


def _delete_key(world: "World", fault: FaultPlan, later: Later, kind: type[CandidateKey | MemberKey]) -> bool:
    etcd = _etcd(world)
    keys = [key for key in etcd.keyspace.keys(KEYS.coordination) if isinstance(KEYS.parse(key), kind)]
    if not keys:
        return False
    etcd.delete(keys[fault.target % len(keys)])
    return True


def _member(world: "World", fault: FaultPlan) -> Member:
    members = _etcd(world).members
    return members[fault.target % len(members)]


def shortened(fault: FaultPlan) -> Micros:
    """Return how long such a fault lasts: not for so long that nothing else happens."""
    return min(fault.duration, _LONGEST_AWAY)


STRIKES: Final[dict[FaultKind, Strike]] = {
    FaultKind.ETCD_PARTITION: _part,
    FaultKind.ETCD_STREAMS_LOST: _lose_streams,
    FaultKind.ETCD_ANSWER_LOST: _lose_answer,
    FaultKind.ETCD_MEMBER_KILLED: _kill_member,
    FaultKind.ETCD_MEMBER_FROZEN: _freeze_member,
    FaultKind.ETCD_AWAY: _away,
    FaultKind.ETCD_FROZEN: _freeze,
    FaultKind.ETCD_SLOW: _slow,
    FaultKind.ETCD_COMPACTED: _compact,
    FaultKind.SESSION_REVOKED: _revoke_session,
    FaultKind.ELECTION_KEY_DELETED: partial(_delete_key, kind=CandidateKey),
    FaultKind.MEMBER_KEY_DELETED: partial(_delete_key, kind=MemberKey),
}
