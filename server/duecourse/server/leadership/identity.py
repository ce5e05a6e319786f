"""What a cluster is: a random id and a number of shards, kept in etcd and in the store, and compared at every start.

The store comes first: whoever finds its rows without a coordination writes a new id into all of them, and only the id
that stands there then is written into etcd, if that has none. So a database belongs to one cluster, an etcd prefix to
one database, and whatever else is found is refused with a message that says what to do:

    rows of etcd's id, as many as etcd says                    go on
    rows never led, nothing in etcd                            a new cluster
    rows of an id, no term ever begun, nothing in etcd         a new cluster, whose creation was interrupted
    rows of another id, of `solo`, or of none beside one       refused
    another number of shards                                   refused
    nothing in etcd although terms were begun                  refused: etcd was wiped, or this is another prefix
    an epoch that etcd has not given yet                       refused: etcd was restored from an older copy

`rebind` is the way out of the last ones, with all nodes stopped: a new id in all rows, and in etcd a base that puts
every later epoch above theirs. The base also goes by the time and never falls, so that epochs are higher than those
that a store which was restored has forgotten: workers that run on remember them, and refuse whatever comes under lower
ones.
"""

import os
from collections.abc import Sequence
from typing import Final

from duecourse.model import bounds
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.etcd import transaction
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Cluster, Keys, format_cluster, parse_cluster
from duecourse.server.leadership import RAISES_PER_CLAIM
from duecourse.server.leadership.solo import COORDINATION
from duecourse.server.storage import ShardRow, TaskStore
from duecourse.server.telemetry import logs

REBIND: Final = "stop all nodes and run `duecourse store rebind`"

_log = logs.get("leadership")


class IdentityRefused(Exception):
    """What etcd and the store say of the cluster does not agree; the message says what to do."""


async def establish(client: EtcdClient, keys: Keys, store: TaskStore) -> Cluster:
    """Find out what the cluster is, or make it. Raises IdentityRefused, EtcdError, StoreUnavailable."""
    # In this order: every epoch in these rows was given at a revision that etcd has reached when it is read.
    rows = await store.shards()
    found, revision = await _read(client, keys)
    if found is None:
        await _create(client, keys, store, rows)
    if found is None or not all(row.coordination for row in rows):
        # It was made just now, by this node or another one.
        rows = await store.shards()
        found, revision = await _read(client, keys)
    if found is None:
        raise IdentityRefused(f"{keys.cluster.decode()} was deleted from etcd just now. If it is empty now, {REBIND}")
    _check(found, rows, revision)
    return found


def check_solo(rows: Sequence[ShardRow]) -> None:
    """Raise IdentityRefused if the store belongs to a cluster, and not to a node that is alone."""
    if any(row.coordination not in ("", COORDINATION) for row in rows):
        raise IdentityRefused(
            f"the store belongs to {_names(rows)}: set coordination to etcd; or, if one node is to go on alone, stop"
            " all nodes and run `duecourse store rebind --to-solo`"
        )


def first_epoch(cluster: Cluster, revision: int) -> Epoch:
    """Return the lowest epoch that belongs to an election key created at a revision."""
    return Epoch(cluster.epoch_base + revision * RAISES_PER_CLAIM)


async def rebind(client: EtcdClient, keys: Keys, store: TaskStore) -> Cluster:
    """Make the store's rows and etcd one new cluster, and return it. All nodes must be stopped.

    If it is interrupted, nodes are refused until it was done again. Raises EtcdError, StoreUnavailable.
    """
    rows = await store.bind(_new_id(), is_forced=True)
    highest = max((row.epoch for row in rows), default=0)
    found, revision = await client.read(keys.cluster, keys.cluster + b"\0")
    before = parse_cluster(found[0].value) if found else None
    last_base = before.epoch_base if before is not None else 0
    # What was given before is lower, as long as etcd's revision has grown by less than one a millisecond.
    by_time = ((await store.read_clock()).time // bounds.MILLISECOND - revision) * RAISES_PER_CLAIM
    cluster = Cluster(id=rows[0].coordination, shards=len(rows), epoch_base=Epoch(max(highest, last_base, by_time)))
    await client.txn([], [transaction.put(keys.cluster, format_cluster(cluster))])
    _log.info("cluster_rebound", cluster=cluster.id, shards=cluster.shards, epoch_base=cluster.epoch_base)
    return cluster


async def _read(client: EtcdClient, keys: Keys) -> tuple[Cluster | None, int]:
    """Return what etcd says of the cluster, and the revision at which it said so."""
    found, revision = await client.read(keys.cluster, keys.cluster + b"\0")
    if not found:
        return None, revision
    cluster = parse_cluster(found[0].value)
    if cluster is None:
        raise IdentityRefused(f"etcd holds something else under {keys.cluster.decode()}: choose another prefix")
    return cluster, revision


async def _create(client: EtcdClient, keys: Keys, store: TaskStore, rows: Sequence[ShardRow]) -> None:
    if any(row.epoch for row in rows):
        raise IdentityRefused(
            f"the store belongs to {_names(rows)}, and etcd knows of no cluster under {keys.cluster.decode()}. Check"
            f" etcd_endpoints and etcd_prefix. If etcd was emptied or replaced, or coordination was solo, {REBIND}"
        )
    bound = await store.bind(_new_id())
    cluster = Cluster(id=bound[0].coordination, shards=len(bound), epoch_base=Epoch(0))
    outcome = await client.txn(
        [transaction.absent(keys.cluster)], [transaction.put(keys.cluster, format_cluster(cluster))]
    )
    if outcome.succeeded:
        _log.info("cluster_created", cluster=cluster.id, shards=cluster.shards)


def _check(cluster: Cluster, rows: Sequence[ShardRow], revision: int) -> None:
    if len(rows) != cluster.shards:
        raise IdentityRefused(
            f"the store has {len(rows)} shards, and the cluster was created with {cluster.shards}: this is another"
            " database, or another cluster's etcd_prefix"
        )
    if any(row.coordination != cluster.id for row in rows):
        raise IdentityRefused(
            f"the store belongs to {_names(rows)}, and etcd holds cluster {cluster.id}: two clusters were pointed at"
            f" one database or one etcd_prefix. If this etcd is to lead this store from now on, {REBIND}"
        )
    ahead = _ahead(cluster, rows, revision)
    if ahead is not None:
        raise IdentityRefused(
            f"shard {ahead} has an epoch that this etcd has not given yet: etcd was restored from an older copy. To go"
            f" on with it, {REBIND}"
        )


def _ahead(cluster: Cluster, rows: Sequence[ShardRow], revision: int) -> ShardId | None:
    """Return a shard whose epoch etcd cannot have given by a revision."""
    limit = first_epoch(cluster, revision + 1)
    return next((row.shard for row in rows if row.epoch >= limit), None)


def _names(rows: Sequence[ShardRow]) -> str:
    names = sorted({row.coordination for row in rows} - {""})
    whose = ("a solo node" if name == COORDINATION else f"cluster {name}" for name in names)
    return " and ".join(whose) or "no cluster yet"


def _new_id() -> str:
    return os.urandom(8).hex()
