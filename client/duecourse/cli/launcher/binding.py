"""Gives the store of a folder to whoever is about to run on it: a solo node, or the cluster of the folder's etcd.

Whoever holds the folder's Postgres has no nodes left from before, so that nobody needs to be looked for.
"""

from duecourse.timing.clock import Clock


async def to_solo(dsn: str) -> bool:
    """Give the store to a solo node; False if it belongs to one, or to nobody yet."""
    _quieten()
    from duecourse.server.leadership.solo import COORDINATION
    from duecourse.server.storage.postgres import PostgresStore

    store = PostgresStore(dsn)
    await store.open()
    try:
        if {row.coordination for row in await store.shards()} <= {"", COORDINATION}:
            return False
        await store.bind(COORDINATION, is_forced=True)
        return True
    finally:
        await store.close()


async def to_cluster(dsn: str, endpoint: str, clock: Clock) -> bool:
    """Make the store and the etcd at an endpoint one cluster; False if they are."""
    _quieten()
    from duecourse.server.etcd.client import EtcdClient
    from duecourse.server.etcd.keys import Keys
    from duecourse.server.leadership import identity
    from duecourse.server.storage.postgres import PostgresStore

    store = PostgresStore(dsn)
    await store.open()
    try:
        async with EtcdClient([endpoint], clock) as client:
            try:
                await identity.establish(client, Keys(), store)
            except identity.IdentityRefused:
                await identity.rebind(client, Keys(), store)
                return True
            return False
    finally:
        await store.close()


def _quieten() -> None:
    """Have the server's rooms log what an operator should see, and nothing else."""
    from duecourse.server.config import LogFormat, LogLevel
    from duecourse.server.telemetry import logs

    logs.configure(LogFormat.AUTO, LogLevel.WARNING)
