"""Gives a store to another cluster, or to a solo node, with all nodes stopped: what `duecourse store rebind` does.

For when nodes refuse what they find: etcd was lost or restored from an older copy, a cluster is to have another etcd,
or one node is to become several, or the other way round. Tasks and epochs stay as they are. A cluster gets a new random
id and, in etcd, a base above all epochs of the rows; so whoever led before can write nothing any more, and no epoch is
given twice.

Nodes that live are looked for where they show themselves, as keys in etcd and as sessions of the store, and nothing is
done while there are any. One that is cut off from both escapes the look, and does no harm: its fence is gone.
"""

from collections.abc import Sequence

from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Cluster, Keys, MemberKey, end_of
from duecourse.server.leadership import identity
from duecourse.server.leadership.solo import COORDINATION
from duecourse.server.storage import ShardRow, TaskStore


class NodesAlive(Exception):
    """There are nodes; nothing was done."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"{', '.join(names)} may be alive: stop all nodes first; one that was killed counts as alive for as long as"
            " its session lasts"
        )
        self.names = tuple(names)


async def to_cluster(client: EtcdClient, keys: Keys, store: TaskStore) -> Cluster:
    """Make store and etcd one new cluster. Raises NodesAlive, EtcdError, StoreUnavailable; do it again then."""
    await _check(client, keys)
    return await identity.rebind(client, keys, store)


async def to_solo(client: EtcdClient | None, keys: Keys, store: TaskStore) -> Sequence[ShardRow]:
    """Give the store to a solo node, and return its rows. Without a client nobody looks for nodes in etcd.

    Raises NodesAlive, EtcdError, StoreUnavailable; do it again then.
    """
    if client is not None:
        await _check(client, keys)
    return await store.bind(COORDINATION, is_forced=True)


async def _check(client: EtcdClient, keys: Keys) -> None:
    found, _ = await client.read(keys.coordination, end_of(keys.coordination))
    names = sorted({parsed.node for kv in found if isinstance(parsed := keys.parse(kv.key), MemberKey)})
    if names:
        raise NodesAlive(names)
