"""Coordination by etcd: several nodes that share out the shards, and take them over from each other.

Every node looks at the same members, computes the same placement, and stands for the shards that are placed on it. Who
is elected raises the shard's epoch in the store, and only that makes it the leader; see `seat` for one shard.

- A shard that is led moves only after the placement has not changed for PLACEMENT_SETTLES, and once its new node stands
  next in line, so that it starts as soon as the old one has resigned. A node that drains hands over at once.
- A shard that nobody leads for two session times is stood for by every eligible node.
- A node is not eligible while it drains, and while its store has not answered for STORE_MISSED. It names the shards
  that it cannot load, so that others get them.
- While etcd is silent, terms go on and nothing moves.

Decisions are made when something has changed in etcd, several times a second while something is to move, and else
once a second; they look at memory only. Beyond signs of life and re-reads, an idle node asks nothing of etcd.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, Never

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import ShardId
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Candidate, Cluster, Keys
from duecourse.server.etcd.mirror import REREAD_INTERVAL, Mirror
from duecourse.server.leadership import Member, Taking
from duecourse.server.leadership.election import Election
from duecourse.server.leadership.membership import DRAINING, IsRefused, Membership
from duecourse.server.leadership.placement import place
from duecourse.server.leadership.seat import Seat
from duecourse.server.leadership.session import DEFAULT_TTL, Session
from duecourse.server.leadership.standings import Standing, Standings
from duecourse.server.storage import RaiseRefused, ShardRow, Stale
from duecourse.server.telemetry import logs
from duecourse.timing.clock import Clock

STORE_AWAY: Final = "its store does not answer"
HAND_OVERS_AT_ONCE: Final = 4
UNLED_SESSIONS: Final = 2
"""So many session times without a leader, and every eligible node stands for a shard."""

_TICK: Final[Micros] = 200 * bounds.MILLISECOND
"""How often is looked at what waits for a time to pass."""
_STEP: Final[Micros] = 5 * bounds.MILLISECOND
_CURRENT: Final[Micros] = 2 * REREAD_INTERVAL + bounds.SECOND
"""How old the last answered read of etcd may be for what it showed to be acted on."""
_ANY_SUCCESSOR: Final[Micros] = bounds.SECOND
"""A node that has drained for so long hands over to whoever is next in line, be it placed there or not."""
_OFFSET_CHANGE: Final[Micros] = 50 * bounds.MILLISECOND
_OFFSET_INTERVAL: Final[Micros] = bounds.SECOND

_log = logs.get("leadership")


async def _never_refused(_: str) -> bool:
    return False


class Clustered:
    """See the module's docstring. Implements `Leadership`."""

    def __init__(
        self,
        node_id: str,
        cluster: Cluster,
        *,
        client: EtcdClient,
        clock: Clock,
        keys: Keys,
        incarnation: str,
        session: Micros = DEFAULT_TTL,
        settles: Micros = bounds.PLACEMENT_SETTLES,
        is_refused: IsRefused = _never_refused,
        wall_clock_offset: Callable[[], Micros] = lambda: 0,
    ) -> None:
        """`incarnation` names the start of this process.

        `is_refused` tells whether an address surely refuses connections, which proves its last node dead.
        """
        self.coordination = cluster.id
        self._node_id = node_id
        self._cluster = cluster
        self._client = client
        self._clock = clock
        self._keys = keys
        self._ttl = session
        self._settles = settles
        self._wall_clock_offset = wall_clock_offset
        self._is_refused = is_refused
        self._mirror = Mirror(client, clock, keys.coordination)
        self._session = Session(client, clock, session)
        self._standings = Standings(client, clock, self._mirror, self._session, keys)
        self.membership = Membership(
            node_id,
            client=client,
            clock=clock,
            keys=keys,
            mirror=self._mirror,
            session=self._session,
            ttl=session,
            incarnation=incarnation,
            is_refused=is_refused,
        )
        self._member: Member | None = None
        self._introduced = asyncio.Event()
        self._drains_since: Micros | None = None
        self._seats: dict[ShardId, Seat] = {}
        self._placement: Mapping[ShardId, str] = {}
        self._placed_by: Sequence[Member] = ()
        self._placed_at: Micros = 0
        self._unled_since: dict[ShardId, Micros] = {}
        self._offset_told_at: Micros = 0
        self._was_ready = False
        self._taking: Taking
        self._wake = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._mirror.subscribe(self._changed)

    # The view.

    def members(self) -> Sequence[Member]:
        """Return the live nodes by name, this one included."""
        members = self.membership.members()
        if self._member is None or self.membership.get(self._node_id) is not None:
            return members
        return sorted([*members, self._member], key=lambda member: member.node_id)

    def leader(self, shard: ShardId) -> Member | None:
        """Return who leads a shard, or is about to."""
        seat = self._seats.get(shard)
        if seat is not None and seat.is_occupied and seat.successor is not None:
            return seat.successor
        standing = self._standings.leader(shard)
        return None if standing is None else self._member_of(standing)

    async def look(self) -> Sequence[Member]:
        """Read who is there beside this node, before it runs; not who has surely died. Raises EtcdError."""
        await self._mirror.read()
        others = [other.member for other in self.membership.others()]
        return [one for one in others if not (one.peer_address and await self._is_refused(one.peer_address))]

    def is_current(self) -> bool:
        """Tell whether etcd has answered lately."""
        read_at = self._mirror.read_at
        return read_at is not None and self._clock.elapsed() - read_at <= _CURRENT

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a listener called whenever members or leaders have changed."""
        self._listeners.append(listener)

    # What the node says.

    def introduce(self, member: Member) -> None:
        """Make this node known under addresses that are served from now on."""
        self._member = member
        self._introduced.set()
        self._wake.set()

    def ended(self, shard: ShardId) -> None:
        """Take a shard again, if it is still this node's to take."""
        seat = self._seats.get(shard)
        if seat is not None:
            seat.ended(self._taking)

    def superseded(self, shard: ShardId, by: Stale | RaiseRefused) -> None:
        """Look at the election again: the store holds what this node's claim cannot raise."""
        seat = self._seats.get(shard)
        if seat is not None:
            seat.superseded(by)

    def why_not_ready(self, led: Collection[ShardId]) -> str | None:
        """Tell what is missing: what others lead is not, and a node that was ready once need not lead all at once."""
        if not self.membership.has_joined:
            return "not a member of the cluster yet"
        if self._is_store_away():
            return STORE_AWAY
        at_odds = sum(seat.is_at_odds and shard not in led for shard, seat in self._seats.items())
        if at_odds:
            return f"the store refuses {at_odds} shards that etcd gives: see the log"
        if not self._was_ready:
            unled = self._due() - frozenset(led) - self._taking.failing()
            if unled:
                return f"{len(unled)} shards are not led yet"
            self._was_ready = True
        return None

    async def drain(self, until: Micros) -> None:
        """Hand all shards over to nodes that stand for them, until there is nobody who would, or an elapsed time."""
        self._drains_since = self._clock.elapsed()
        self._wake.set()
        while self._clock.elapsed() < until and self._can_hand_over():
            await self._clock.sleep(_STEP)

    async def run(self, taking: Taking, shards: Sequence[ShardRow]) -> Never:
        """Take and keep what this node should lead. Raises DuplicateNode."""
        self._taking = taking
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mirror.run(), name="etcd mirror")
            group.create_task(self._session.run(), name="session")
            group.create_task(self._standings.run(), name="standings")
            await self._introduced.wait()
            assert self._member is not None, "it was introduced"
            await self._mirror.wait_read()
            await self.membership.join(self._member)
            self._placed_at = self._clock.elapsed()
            self._seats = self._make_seats([row.shard for row in shards], self._member)
            while True:
                self._wake.clear()
                self.membership.check_name()
                self._describe()
                self._place()
                self._find_unled()
                for seat in self._seats.values():
                    self._decide(seat, group)
                await self._wait()
        raise AssertionError("it goes on for ever")

    # Deciding.

    def _describe(self) -> None:
        """Tell the others what they need to know of this node, when it has changed."""
        assert self._member is not None, "it was introduced"
        member = self._member
        reason = DRAINING if self._drains_since is not None else STORE_AWAY if self._is_store_away() else ""
        now, offset = self._clock.elapsed(), self._wall_clock_offset()
        if abs(offset - member.wall_clock_offset) <= _OFFSET_CHANGE or now - self._offset_told_at < _OFFSET_INTERVAL:
            offset = member.wall_clock_offset
        else:
            self._offset_told_at = now
        self._member = replace(
            member,
            ineligible_reason=reason,
            failing_shards=self._taking.failing(),
            wall_clock_offset=offset,
        )
        self.membership.tell(self._member)

    def _place(self) -> None:
        members = self.membership.members()
        if members is self._placed_by:
            return
        self._placed_by = members
        placement = place(members, len(self._seats))
        if placement != self._placement:
            self._placement = placement
            self._placed_at = self._clock.elapsed()

    def _find_unled(self) -> None:
        """Note since when which shards have had no leader."""
        now = self._clock.elapsed()
        unled = (shard for shard in self._seats if self._standings.leader(shard) is None)
        self._unled_since = {shard: self._unled_since.get(shard, now) for shard in unled}

    def _decide(self, seat: Seat, group: asyncio.TaskGroup) -> None:
        if seat.is_elected:
            if not seat.is_handing_over and self._may_move(seat.shard) and self._has_turn():
                successor = self._successor(seat.shard)
                if successor is not None:
                    seat.hand_over(successor)
        elif self._should_stand(seat):
            if not seat.is_occupied:
                seat.take(group, self._taking, self._wake.set)
        elif seat.is_standing:
            seat.leave()

    def _should_stand(self, seat: Seat) -> bool:
        if self._drains_since is not None:
            return False
        return self._placement.get(seat.shard) == self._node_id or self._is_forsaken(seat)

    def _is_forsaken(self, seat: Seat) -> bool:
        """Tell whether nobody has led a shard for so long that every eligible node should stand and none does yet."""
        shard = seat.shard
        since = self._unled_since.get(shard)
        if since is None:
            return seat.is_standing and self._is_own(shard)
        is_long = self._clock.elapsed() - since >= UNLED_SESSIONS * self._ttl
        return is_long and self._member is not None and not self._member.ineligible_reason

    def _is_own(self, shard: ShardId) -> bool:
        """Tell whether this node's candidacy for a shard is the first, so that it is about to be elected."""
        first, own = self._standings.leader(shard), self._standings.own(shard)
        return first is not None and first == own

    def _may_move(self, shard: ShardId) -> bool:
        """Tell whether a shard that this node leads should go to another, as soon as that one stands for it."""
        if not self.is_current():
            return False
        if self._drains_since is not None:
            return True
        is_placed_elsewhere = self._placement.get(shard, self._node_id) != self._node_id
        return is_placed_elsewhere and self._clock.elapsed() - self._placed_at >= self._settles

    def _has_turn(self) -> bool:
        """Tell whether one more shard may be handed over now: those that wait are led as before."""
        return sum(seat.is_handing_over for seat in self._seats.values()) < HAND_OVERS_AT_ONCE

    def _successor(self, shard: ShardId) -> Member | None:
        """Return who is next in line, if a shard may go there."""
        line = self._standings.of(shard)
        if len(line) < 2:
            return None
        successor = self._member_of(line[1])
        if successor is None or successor.node_id == self._node_id:
            return None
        is_placed = self._placement.get(shard) == successor.node_id
        drains_since = self._drains_since
        may_be_any = drains_since is not None and self._clock.elapsed() - drains_since > _ANY_SUCCESSOR
        return successor if is_placed or may_be_any else None

    def _can_hand_over(self) -> bool:
        """Tell whether there is a shard to hand over, and somebody who may yet take it."""
        is_anybody_there = any(not other.member.ineligible_reason for other in self.membership.others())
        return is_anybody_there and self.is_current() and any(seat.is_elected for seat in self._seats.values())

    def _due(self) -> frozenset[ShardId]:
        """Return the shards that this node should lead by now: it was elected, or is to be and nobody else leads."""
        if not self._seats or not self._placement:
            return frozenset(ShardId(shard) for shard in range(self._cluster.shards))
        return frozenset(
            shard
            for shard, seat in self._seats.items()
            if seat.is_elected or (self._placement.get(shard) == self._node_id and not self._is_led_by_another(shard))
        )

    def _is_led_by_another(self, shard: ShardId) -> bool:
        return self._standings.leader(shard) is not None and not self._is_own(shard)

    def _is_store_away(self) -> bool:
        return self._taking.store_missed_for() > bounds.STORE_MISSED

    def _member_of(self, standing: Standing) -> Member | None:
        candidate = standing.candidate
        if candidate is None:
            return None
        known = self.membership.get(candidate.node)
        return known or Member(node_id=candidate.node, address=candidate.address, peer_address="", version="")

    def _make_seats(self, shards: Sequence[ShardId], member: Member) -> dict[ShardId, Seat]:
        candidate = Candidate(node=member.node_id, address=member.address)
        return {
            shard: Seat(
                shard,
                self._cluster,
                Election(
                    shard,
                    candidate,
                    client=self._client,
                    clock=self._clock,
                    keys=self._keys,
                    mirror=self._mirror,
                    session=self._session,
                    standings=self._standings,
                ),
                clock=self._clock,
                standings=self._standings,
            )
            for shard in shards
        }

    def _changed(self, _: Collection[bytes]) -> None:
        self._wake.set()
        for listener in self._listeners:
            listener()

    async def _wait(self) -> None:
        at_most = bounds.LONGEST_SLEEP if self._is_settled() else _TICK
        try:
            async with asyncio.timeout(at_most / bounds.SECOND):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _is_settled(self) -> bool:
        """Tell whether every shard is led, and what this node leads is to stay here."""
        if self._drains_since is not None or self._unled_since:
            return False
        return all(
            self._placement.get(shard) == self._node_id for shard, seat in self._seats.items() if seat.is_elected
        )
