"""`Routing`: has submissions and cancellations carried out by those who lead their shards, this node or another.

What this node leads goes to its own commands, the rest to the leaders, all at once, and the answers are put together in
order. The other node serves what it is sent by its own commands only, so nothing is passed on twice: two nodes that
each take the other for the leader both answer that they are not.

Leaders move, and what is known of them is a hint. What was not carried out because a node does not lead, or was not
reached, is tried again with the same ids: at once when the view of the cluster changes, and after a wait, which doubles
if somebody is known to lead, and is a second if nobody is.
So is what may have been carried out, because the answer was lost: the same request again tells. Each try gets half of
the time that is left, and the last word comes early enough to reach the caller. It is true of all tries together:

    every try surely changed nothing    NOT_SHARD_LEADER with the leader's address, so that the caller can go there, or
                                        NO_LEADER if none is known
    one try's answer was lost           OUTCOME_UNCERTAIN

unless a later try has told. A node that has lost touch with the others does not wait: one that has not may know better
who leads. Requests that wait here for others are bounded in bytes.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import Message

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core import errors
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.leadership import ClusterView
from duecourse.server.rpc.peers import Peers
from duecourse.server.rpc.relay import NotThere
from duecourse.server.rpc.status import Relayed
from duecourse.server.telemetry.metrics import Metrics
from duecourse.timing import backoff
from duecourse.timing.clock import Clock

Send = Callable[[str, Message, float], Any]
"""Calls a method of one other node with a request, for so many seconds. Raises DomainError."""

_SHORTEST_TRY: Final = 50 * bounds.MILLISECOND
_PATIENT_TRY: Final = bounds.SECOND
_ANSWER_MARGIN: Final = 100 * bounds.MILLISECOND
_LONGEST: Final = bounds.DEFAULT_CALL_DEADLINE + bounds.MAX_CANCEL_WAIT
_ELSEWHERE: Final = (NotThere, errors.NoLeader, errors.NotShardLeader, errors.Draining)
_TRY_AGAIN: Final = (*_ELSEWHERE, errors.OutcomeUncertain)
_PASSING_CODES: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_HELD: Final = "requests that wait for another node"


class Mutation(Protocol):
    """Some items, each of one shard, that can be carried out here or there, and again without harm."""

    shards: Sequence[ShardId]
    """Of each item."""
    at_least: Micros
    """What a try needs to be answered."""

    def size(self) -> int:
        """Return about how many bytes it keeps in memory."""
        ...

    async def here(self, items: Sequence[int]) -> Sequence[Any]:
        """Carry items out on this node: for each its answer or a DomainError. Raises DomainError for all of them."""
        ...

    async def there(self, items: Sequence[int], send: Send, seconds: float) -> Sequence[Any]:
        """Have another node carry items out; answers as `here`."""
        ...


class Routing:
    """See the module's docstring."""

    def __init__(
        self,
        node_id: str,
        led: KeysView[ShardId],
        view: ClusterView,
        peers: Peers,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """Begin; `led` are the shards that this node leads and has loaded, at any time."""
        self._node_id = node_id
        self._led = led
        self._view = view
        self._peers = peers
        self._clock = clock
        self._metrics = metrics
        self._random = random.Random()
        self._held_bytes = 0
        self._news = asyncio.Event()
        view.subscribe(self._changed)

    async def carry_out(self, mutation: Mutation, seconds: float | None) -> Sequence[Any]:
        """Have all items carried out within the seconds that are left: for each its answer or a DomainError."""
        until = self._until(seconds)
        everything = range(len(mutation.shards))
        answers: list[Any] = [None] * len(everything)
        left: Sequence[int] = everything
        if self._led >= set(mutation.shards):
            answers[:] = await self._here(mutation, everything)
            left = _to_try_again(everything, answers)
            if not left:
                return answers
        with self._holding(mutation) as has_room:
            if has_room:
                await self._try_until(until, mutation, left, answers)
            else:
                for item in left:
                    if not isinstance(answers[item], errors.OutcomeUncertain):
                        answers[item] = errors.Overloaded(_HELD)
        return answers

    def _until(self, seconds: float | None) -> Micros:
        """Return the elapsed time at which the last word is spoken."""
        allowed = bounds.DEFAULT_CALL_DEADLINE if seconds is None else min(int(seconds * bounds.SECOND), _LONGEST)
        return self._clock.elapsed() + allowed - min(_ANSWER_MARGIN, allowed // 4)

    @contextmanager
    def _holding(self, mutation: Mutation) -> Iterator[bool]:
        """Count a request's bytes while it waits for others; yields False if there is no room for it."""
        size = mutation.size()
        if self._held_bytes + size > bounds.MAX_FORWARDED_BYTES:
            self._metrics.admission_refusals["forwarded_bytes"] += 1
            yield False
            return
        self._held_bytes += size
        try:
            yield True
        finally:
            self._held_bytes -= size

    async def _try_until(self, until: Micros, mutation: Mutation, left: Sequence[int], answers: list[Any]) -> None:
        """Try the items that are left until they are answered or time is over."""
        uncertain = {item for item in left if isinstance(answers[item], errors.OutcomeUncertain)}
        waits = self._waits()
        while True:
            before = self._leaders({mutation.shards[item] for item in left})
            time_left = until - self._clock.elapsed()
            if time_left >= _SHORTEST_TRY or answers[left[0]] is None:
                seconds = min(time_left, max(time_left // 2, _PATIENT_TRY, mutation.at_least)) / bounds.SECOND
                await self._round(mutation, left, answers, max(0.0, seconds))
                left = _to_try_again(left, answers)
                uncertain.update(item for item in left if isinstance(answers[item], errors.OutcomeUncertain))
            if not left or time_left < _SHORTEST_TRY or self._is_last(answers[left[0]]):
                break
            if not self._view.is_current():
                break
            wanted = {mutation.shards[item]: before[mutation.shards[item]] for item in left}
            time_left = until - self._clock.elapsed()
            # Where nobody is known to lead, only news can help.
            wait = next(waits) if any(wanted.values()) else bounds.LONGEST_SLEEP
            if await self._pause(wanted, min(wait, time_left)):
                waits = self._waits()
        for item in {*left, *uncertain}:
            if isinstance(answers[item], errors.DomainError):
                answers[item] = self._verdict(mutation.shards[item], answers[item], is_uncertain=item in uncertain)

    async def _round(self, mutation: Mutation, items: Sequence[int], answers: list[Any], seconds: float) -> None:
        """Try items once, each with its leader, all leaders at once."""
        here: list[int] = []
        there: defaultdict[str, list[int]] = defaultdict(list)
        for item in items:
            shard = mutation.shards[item]
            if shard in self._led:
                here.append(item)
                continue
            leader = self._view.leader(shard)
            if leader is None or leader.node_id == self._node_id or not leader.peer_address:
                answers[item] = errors.NoLeader(shard)
            else:
                there[leader.peer_address].append(item)

        async def at(address: str | None, part: Sequence[int]) -> None:
            found = self._here(mutation, part) if address is None else self._there(mutation, part, address, seconds)
            for item, answer in zip(part, await found, strict=True):
                answers[item] = answer

        parts: list[tuple[str | None, list[int]]] = [*there.items()]
        if here:
            parts.append((None, here))
        if len(parts) == 1:
            await at(*parts[0])
            return
        async with asyncio.TaskGroup() as group:
            for address, part in parts:
                group.create_task(at(address, part), name=f"carry out at {address or 'this node'}")

    async def _here(self, mutation: Mutation, items: Sequence[int]) -> Sequence[Any]:
        try:
            return await mutation.here(items)
        except errors.DomainError as error:
            return [error] * len(items)

    async def _there(self, mutation: Mutation, items: Sequence[int], address: str, seconds: float) -> Sequence[Any]:
        async def send(method: str, request: Message, seconds: float) -> Any:
            return await self._peers.call(address, method, request, seconds)

        try:
            return await mutation.there(items, send, seconds)
        except errors.DomainError as error:
            return [error] * len(items)

    def _is_last(self, error: errors.DomainError) -> bool:
        """Tell whether this node drains and there is nobody to take over what it leads."""
        others = [member for member in self._view.members() if member.node_id != self._node_id]
        return isinstance(error, errors.Draining) and all(member.ineligible_reason for member in others)

    async def _pause(self, before: Mapping[ShardId, str], wait: Micros) -> bool:
        """Wait for so long, or until one of the shards has another leader than before; True: it has.

        It is never much shorter, since news come in crowds, and so do those who wait for them.
        """
        await self._clock.sleep(min(wait, bounds.FIRST_FORWARD_WAIT))
        try:
            async with asyncio.timeout(max(0, wait - bounds.FIRST_FORWARD_WAIT) / bounds.SECOND):
                while self._leaders(before) == before:
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    def _leaders(self, shards: Iterable[ShardId]) -> dict[ShardId, str]:
        """Return where each shard is led, empty if nobody knows."""
        leaders = {shard: self._view.leader(shard) for shard in shards}
        return {shard: leader.peer_address if leader else "" for shard, leader in leaders.items()}

    def _verdict(self, shard: ShardId, error: errors.DomainError, *, is_uncertain: bool) -> errors.DomainError:
        """Turn an item's last error into what all its tries together say."""
        is_passing = isinstance(error, errors.StoreFailed | errors.Overloaded) or (
            isinstance(error, Relayed) and error.refusal.code in _PASSING_CODES
        )
        if is_uncertain and (is_passing or isinstance(error, _TRY_AGAIN)):
            return errors.OutcomeUncertain()
        if not isinstance(error, _ELSEWHERE) or isinstance(error, errors.Draining):
            return error
        leader = self._view.leader(shard)
        if leader is None or leader.node_id == self._node_id:
            return errors.NoLeader(shard)
        return errors.NotShardLeader(shard, Epoch(0), leader.address)

    def _waits(self) -> Iterator[Micros]:
        return backoff.delays(bounds.FIRST_FORWARD_WAIT, bounds.LONGEST_FORWARD_WAIT, self._random)

    def _changed(self) -> None:
        """Wake all that wait: members or leaders have changed."""
        news, self._news = self._news, asyncio.Event()
        news.set()


def _to_try_again(items: Sequence[int], answers: Sequence[Any]) -> list[int]:
    # Nearly all are good, and one class is looked for faster than several.
    failed = [item for item in items if isinstance(answers[item], errors.DomainError)]
    return [item for item in failed if isinstance(answers[item], _TRY_AGAIN)]
