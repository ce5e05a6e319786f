"""The key space in etcd: the only module that knows it. What is formatted here is parsed here.

    /<prefix>/cluster                                           what the cluster is, for ever
    /<prefix>/coordination/members/<node>                       a node, under its session
    /<prefix>/coordination/elections/<shard>/<lease>            who stands for a shard, under its session

The shard is decimal, padded to five places, the lease hexadecimal, padded to sixteen; names are percent-encoded, so
that no component contains a `/`. Whoever stands for a shard longest leads it: the candidate whose key was created at
the lowest revision.
"""

import json
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

from duecourse.server.core.task import Epoch, ShardId

DEFAULT_PREFIX: Final = "duecourse"


@dataclass(frozen=True, slots=True)
class MemberKey:
    """The key of a node."""

    node: str


@dataclass(frozen=True, slots=True)
class CandidateKey:
    """The key of a candidate."""

    shard: ShardId
    lease: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Who stands for a shard: what the key of a candidate holds."""

    node: str
    address: str
    """Where clients and workers reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What the key of a cluster holds."""

    id: str
    """Random; as the shard rows hold it."""
    shards: int
    epoch_base: Epoch
    """Epochs that this etcd gives lie above it."""


class Keys:
    """The key space of one Duecourse cluster."""

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        self._prefix = f"/{quote(prefix, safe='')}/"
        self._coordination = f"{self._prefix}coordination/"

    @property
    def cluster(self) -> bytes:
        """The key of what the cluster is."""
        return f"{self._prefix}cluster".encode()

    @property
    def coordination(self) -> bytes:
        """The prefix of all that nodes tell each other."""
        return self._coordination.encode()

    def member(self, node: str) -> bytes:
        """Return the key of a node."""
        return f"{self._coordination}members/{quote(node, safe='')}".encode()

    def election(self, shard: ShardId) -> bytes:
        """Return the prefix of the candidates of a shard."""
        return f"{self._coordination}elections/{shard:05d}/".encode()

    def candidate(self, shard: ShardId, lease: int) -> bytes:
        """Return the key of a candidate."""
        return self.election(shard) + f"{lease:016x}".encode()

    def parse(self, key: bytes) -> MemberKey | CandidateKey | None:
        """Tell what a key is; None if it is none of ours."""
        text = key.decode("utf-8", "replace")
        if not text.startswith(self._coordination):
            return None
        try:
            match text[len(self._coordination) :].split("/"):
                case ["members", node]:
                    return MemberKey(unquote(node))
                case ["elections", shard, lease]:
                    return CandidateKey(ShardId(int(shard)), int(lease, 16))
        except ValueError:
            pass
        return None


def format_cluster(cluster: Cluster) -> bytes:
    """Return what the key of a cluster holds."""
    return json.dumps({"id": cluster.id, "shards": cluster.shards, "epoch_base": cluster.epoch_base}).encode()


def parse_cluster(value: bytes) -> Cluster | None:
    """Read what the key of a cluster holds, whatever a newer version has added; None if it is none."""
    try:
        match json.loads(value):
            case {"id": str(number), "shards": int(shards), "epoch_base": int(base)}:
                return Cluster(id=number, shards=shards, epoch_base=Epoch(base))
    except ValueError:
        pass
    return None


def format_candidate(candidate: Candidate) -> bytes:
    """Return what the key of a candidate holds."""
    return json.dumps({"node": candidate.node, "address": candidate.address}).encode()


def parse_candidate(value: bytes) -> Candidate | None:
    """Read what the key of a candidate holds, whatever a newer version has added; None if it is none."""
    try:
        match json.loads(value):
            case {"node": str(node), "address": str(address)}:
                return Candidate(node=node, address=address)
    except ValueError:
        pass
    return None


def end_of(prefix: bytes) -> bytes:
    """Return the first key after all that begin with a prefix."""
    kept = prefix.rstrip(b"\xff")
    if not kept:
        raise ValueError("all keys begin with this prefix")
    return kept[:-1] + bytes([kept[-1] + 1])
