"""Who is there: a key for each live node, under its session, in which it describes itself.

A node joins by making its key, which it may only if no other live node bears its name. A key that is there already may
be of its own last run, whose session lives on for a while after a crash: a node that refuses connections, or whose
address this node now serves at, is dead, and its session is revoked; else its end is waited for. If it does not end,
there are two of one name, and this one gives up. So does a node that lost its session and finds that another one has
taken its name meanwhile: it leaves that one's description alone.
"""

import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import ShardId
from duecourse.server.etcd import transaction
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.errors import EtcdError
from duecourse.server.etcd.keys import Keys, MemberKey
from duecourse.server.etcd.mirror import Mirror
from duecourse.server.etcd.transaction import KeyValue
from duecourse.server.leadership import DuplicateNode, Member
from duecourse.server.leadership.session import Session
from duecourse.server.telemetry import logs
from duecourse.timing.clock import Clock

JOIN_MARGIN: Final[Micros] = 3 * bounds.SECOND
"""How long beyond a session's time a name may be taken: etcd looks for expired leases now and then only."""

DRAINING: Final = "it drains"
"""Why a node is not eligible that is about to end."""

_POLL: Final[Micros] = 100 * bounds.MILLISECOND

_log = logs.get("leadership")

IsRefused = Callable[[str], Awaitable[bool]]
"""Tells whether an address surely refuses connections."""


@dataclass(frozen=True, slots=True)
class Presence:
    """A live node, the lease that its keys go with, and the start of its process that wrote them."""

    member: Member
    lease: int
    incarnation: str


class Membership:
    """See the module's docstring."""

    def __init__(
        self,
        node_id: str,
        *,
        client: EtcdClient,
        clock: Clock,
        keys: Keys,
        mirror: Mirror,
        session: Session,
        ttl: Micros,
        incarnation: str,
        is_refused: IsRefused,
    ) -> None:
        """`incarnation` names the start of this process."""
        self._key = keys.member(node_id)
        self._node_id = node_id
        self._incarnation = incarnation
        self._client = client
        self._clock = clock
        self._keys = keys
        self._mirror = mirror
        self._session = session
        self._ttl = ttl
        self._is_refused = is_refused
        self._present: dict[str, Presence] = {}
        self._members: list[Member] = []
        self._told: Member | None = None
        self._joined_at: int | None = None
        """The revision as of which the key is this node's."""
        mirror.subscribe(self._changed)

    @property
    def has_joined(self) -> bool:
        """Whether the others can see this node."""
        return self._joined_at is not None

    def members(self) -> Sequence[Member]:
        """Return the live nodes, by name."""
        return self._members

    def get(self, node_id: str) -> Member | None:
        """Return a live node."""
        presence = self._present.get(node_id)
        return presence.member if presence else None

    def others(self) -> Collection[Presence]:
        """Return the live nodes but this one."""
        return [presence for name, presence in self._present.items() if name != self._node_id]

    def tell(self, member: Member) -> None:
        """Have the others know this description of the node."""
        if member != self._told and self.has_joined:
            self._told = member
            self._session.keep(
                self._key,
                format_member(member, self._incarnation),
                yields_to=lambda found: self._other(found) is not None,
            )

    def check_name(self) -> None:
        """Look whether another node bears this node's name. Raises DuplicateNode."""
        found = self._mirror.get(self._key)
        # What the mirror shows may be older than this node's key: that of its last run.
        if self._joined_at is not None and found is not None and found.modified > self._joined_at:
            other = self._other(found)
            if other is not None:
                raise DuplicateNode(self._node_id, other.member.address)

    async def join(self, member: Member) -> None:
        """Make the node's key. Raises DuplicateNode."""
        until = self._clock.elapsed() + self._ttl + JOIN_MARGIN
        retries = self._client.retries()
        while True:
            try:
                other = await self._try_join(member)
            except EtcdError as error:
                _log.warning("etcd_not_reached", reason=str(error))
                await self._clock.sleep(next(retries))
                continue
            if other is None:
                break
            if self._clock.elapsed() > until:
                raise DuplicateNode(self._node_id, other.member.address)
            await self._clock.sleep(_POLL)
        self.tell(member)

    async def _try_join(self, member: Member) -> Presence | None:
        """Make the key; else return who else has made it."""
        lease = await self._session.opened()
        outcome = await self._client.txn(
            [transaction.absent(self._key)],
            [transaction.put(self._key, format_member(member, self._incarnation), lease)],
            [transaction.get(self._key)],
        )
        if outcome.succeeded:
            self._joined_at = outcome.revision
            return None
        found = outcome.found(0)[0]
        other = parse_member(found)
        if other is not None and other.incarnation == self._incarnation:
            self._joined_at = found.modified
            return None
        address = other.member.peer_address if other is not None else ""
        if address and (address == member.peer_address or await self._is_refused(address)):
            _log.info("session_revoked", node=self._node_id, lease=f"{found.lease:x}", reason="its process is dead")
            await self._client.revoke(found.lease)
        return other or Presence(member, found.lease, "")

    def _other(self, found: KeyValue) -> Presence | None:
        """Return who has written a key, if it was another node."""
        presence = parse_member(found)
        return None if presence is None or presence.incarnation == self._incarnation else presence

    def _changed(self, changed: Collection[bytes]) -> None:
        is_changed = False
        for key in changed:
            parsed = self._keys.parse(key)
            if isinstance(parsed, MemberKey):
                is_changed = True
                found = self._mirror.get(key)
                presence = None if found is None else parse_member(found)
                if presence is None:
                    self._present.pop(parsed.node, None)
                else:
                    self._present[parsed.node] = presence
        if is_changed:
            self._members = [self._present[name].member for name in sorted(self._present)]


def format_member(member: Member, incarnation: str) -> bytes:
    """Return what the key of a node holds."""
    return json.dumps(
        {
            "node": member.node_id,
            "address": member.address,
            "peer_address": member.peer_address,
            "version": member.version,
            "ineligible_reason": member.ineligible_reason,
            "failing_shards": sorted(member.failing_shards),
            "wall_clock_offset": member.wall_clock_offset,
            "incarnation": incarnation,
        }
    ).encode()


def parse_member(found: KeyValue) -> Presence | None:
    """Read what the key of a node holds, whatever a newer version has added; None if it is none."""
    try:
        match json.loads(found.value):
            case {
                "node": str(node),
                "address": str(address),
                "peer_address": str(peer_address),
                "version": str(version),
                "ineligible_reason": str(ineligible_reason),
                "failing_shards": list(failing),
                "wall_clock_offset": int(offset),
                "incarnation": str(incarnation),
            }:
                member = Member(
                    node_id=node,
                    address=address,
                    peer_address=peer_address,
                    version=version,
                    ineligible_reason=ineligible_reason,
                    failing_shards=frozenset(ShardId(int(shard)) for shard in failing),
                    wall_clock_offset=offset,
                )
                return Presence(member, found.lease, incarnation)
    except (ValueError, TypeError):
        pass
    return None
