"""What can go wrong with etcd, and between etcd and a node."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from simulation.etcd import Member, SimulatedEtcd
from simulation.loop import Process
from simulation.nodes import KEYS
from simulation.plan import FaultKind, FaultPlan

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.etcd.keys import CandidateKey, MemberKey

if TYPE_CHECKING:
    from simulation.world import World

Later = Callable[[Callable[[], object]], None]
Strike = Callable[["World", FaultPlan, str, Later], bool]
"""Told of the address of a node, if it is one that is struck, and of who undoes it all. False: nothing has changed."""

_LONGEST_AWAY: Final = 12 * bounds.SECOND
_WATCH: Final = "/etcdserverpb.Watch/Watch"
_STREAMS: Final = (_WATCH, "/etcdserverpb.Lease/LeaseKeepAlive")


def _etcd(world: "World") -> SimulatedEtcd:
    assert world.etcd is not None
    return world.etcd


def _part(world: "World", fault: FaultPlan, address: str, later: Later) -> bool:
    """Cut a node off from all members; one way only, at times."""
    weather = world.network.weather
    endpoints = _etcd(world).endpoints
    to_etcd = [(address, endpoint) for endpoint in endpoints]
    from_etcd = [(endpoint, address) for endpoint in endpoints]
    paths = {0: to_etcd, 1: from_etcd}.get(fault.target % 4, [*to_etcd, *from_etcd])
    if world.nodes[address].is_gone or not weather.part(paths):
        return False
    later(partial(weather.rejoin, paths))
    return True


def _lose_streams(world: "World", fault: FaultPlan, address: str, later: Later) -> bool:
    return not world.nodes[address].is_gone and world.network.lose_methods(address, _STREAMS) > 0


def _lose_answer(world: "World", fault: FaultPlan, address: str, later: Later) -> bool:
    """Lose what is under way to a node: answers of what was applied, with notice or without."""
    if world.nodes[address].is_gone:
        return False
    has_notice = bool(fault.target % 2)
    return sum(world.network.cut(address, endpoint, has_notice=has_notice) for endpoint in _etcd(world).endpoints) > 0


def _kill_member(world: "World", fault: FaultPlan, address: str, later: Later) -> bool:
    member = _member(world, fault)
    if not member.takes_part:
        return False
    _kill(member, later)
    return True


def _freeze_member(world: "World", fault: FaultPlan, address: str, later: Later) -> bool:
    member = _member(world, fault)
    if not member.takes_part:
        return False
    _freeze(member, later)
    return True


def _away(world: "World", fault: FaultPlan, address: str, later: Later) -> bool:
    running = [member for member in _etcd(world).members if member.is_running]
    for member in running:
        _kill(member, later)
    return bool(running)


def _freeze_all(world: "World", fault: FaultPlan, address: str, later: Later) -> bool:
    answering = [member for member in _etcd(world).members if member.takes_part]
    for member in answering:
        _freeze(member, later)
    return bool(answering)


def _slow(world: "World", fault: FaultPlan, address: str, later: Later) -> bool:
    """Let etcd take most of a call's deadline, and more at times."""
    etcd = _etcd(world)
    if etcd.slowness:
        return False
    etcd.slowness = (fault.target + 1) * 150 * bounds.MILLISECOND
    later(etcd.hasten)
    return True


def _compact(world: "World", fault: FaultPlan, address: str, later: Later) -> bool:
    """Forget what a node, whose watch falls silent now, would go on with."""
    etcd = _etcd(world)
    if world.nodes[address].is_gone or not world.network.lose_methods(address, (_WATCH,)):
        return False
    etcd.put(KEYS.member("passing by"), b"")
    etcd.delete(KEYS.member("passing by"))
    etcd.compact()
    return True


def _revoke_session(world: "World", fault: FaultPlan, address: str, later: Later) -> bool:
    etcd = _etcd(world)
    leases = {kv.lease for key in etcd.keyspace.keys(KEYS.coordination) if (kv := etcd.keyspace.get(key)) and kv.lease}
    if not leases:
        return False
    etcd.revoke(sorted(leases)[fault.target % len(leases)])
    return True


def _delete_key(
    world: "World", fault: FaultPlan, address: str, later: Later, kind: type[CandidateKey | MemberKey]
) -> bool:
    etcd = _etcd(world)
    keys = [key for key in etcd.keyspace.keys(KEYS.coordination) if isinstance(KEYS.parse(key), kind)]
    if not keys:
        return False
    etcd.delete(keys[fault.target % len(keys)])
    return True


def _member(world: "World", fault: FaultPlan) -> Member:
    members = _etcd(world).members
    return members[fault.target % len(members)]


def _kill(member: Member, later: Later) -> None:
    """Kill a member, and start it again later."""
    killed = member.process
    member.kill()
    later(partial(_undo, member, killed, member.start))


def _freeze(member: Member, later: Later) -> None:
    """Freeze a member, and let it go on later."""
    frozen = member.process
    member.freeze()
    later(partial(_undo, member, frozen, member.thaw))


def _undo(member: Member, struck: Process | None, mend: Callable[[], None]) -> None:
    """Mend a member, unless it was started anew since: what became of it then is another's doing."""
    if member.process is struck:
        mend()


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
    FaultKind.ETCD_FROZEN: _freeze_all,
    FaultKind.ETCD_SLOW: _slow,
    FaultKind.ETCD_COMPACTED: _compact,
    FaultKind.SESSION_REVOKED: _revoke_session,
    FaultKind.ELECTION_KEY_DELETED: partial(_delete_key, kind=CandidateKey),
    FaultKind.MEMBER_KEY_DELETED: partial(_delete_key, kind=MemberKey),
}
