"""Which node should lead which shard: a pure function of the live nodes, the same on each of them.

Rendezvous hashing with bounded load. Every pair of a node and a shard has a score, a hash of both names; pairs are
taken from the highest score on, each unless its shard has a node already or its node has its share. So no node has more
than its share, `ceil(shards / nodes)`, and a node that joins or leaves moves little beyond its own shards: those that
it takes or gives, and those that the changed share pushes on.

Nodes that are not eligible get nothing, unless none is; a node gets no shard that it says it cannot load, unless all
say so of that shard.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b

from duecourse.server.core.task import ShardId
from duecourse.server.leadership import Member


def place(members: Collection[Member], shards: int) -> Mapping[ShardId, str]:
    """Return the name of the node that should lead each shard; nothing if there are no nodes."""
    eligible = [member for member in members if not member.ineligible_reason] or list(members)
    if not eligible:
        return {}
    allowed = _allowed(eligible, shards)
    share = -(-shards // len(eligible))
    loads = dict.fromkeys((member.node_id for member in eligible), 0)
    placed: dict[ShardId, str] = {}
    for _, shard, node in _pairs(tuple(sorted(loads)), shards):
        if shard not in placed and loads[node] < share and node in allowed[shard]:
            placed[shard] = node
            loads[node] += 1
    for number in range(shards):
        shard = ShardId(number)
        if shard not in placed:
            # Those that can load it have their share already.
            placed[shard] = node = min(allowed[shard], key=lambda node: (loads[node], -_score(node, shard)))
            loads[node] += 1
    return placed


def _allowed(eligible: Sequence[Member], shards: int) -> Sequence[frozenset[str]]:
    everyone = frozenset(member.node_id for member in eligible)
    failing: dict[ShardId, set[str]] = {}
    for member in eligible:
        for shard in member.failing_shards:
            failing.setdefault(shard, set()).add(member.node_id)
    return [everyone - failing.get(ShardId(number), set()) or everyone for number in range(shards)]


@functools.lru_cache(maxsize=4)
def _pairs(nodes: tuple[str, ...], shards: int) -> list[tuple[int, ShardId, str]]:
    """Return all pairs, from the highest score on."""
    pairs = [(_score(node, ShardId(shard)), ShardId(shard), node) for node in nodes for shard in range(shards)]
    pairs.sort(reverse=True)
    return pairs


def _score(node: str, shard: ShardId) -> int:
    return int.from_bytes(blake2b(f"{node}\0{shard}".encode(), digest_size=8).digest(), "big")
