"""What a node needs from outside before it can be made: its store, and for a cluster etcd, and what the cluster is.

Both are waited for as long as it takes, with a warning each time; what is there but may not be used is refused.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.config import Settings, StoreKind
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.endpoints import Tls, User
from duecourse.server.etcd.errors import EtcdError
from duecourse.server.etcd.keys import Cluster, Keys
from duecourse.server.leadership import identity
from duecourse.server.storage import ShardRow, StoreUnavailable, TaskStore
from duecourse.server.telemetry import logs
from duecourse.timing import backoff
from duecourse.timing.clock import Clock

_log = logs.get("node")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the nodes of a cluster meet, and which cluster it is."""

    client: EtcdClient
    keys: Keys
    cluster: Cluster


async def open_store(settings: Settings, clock: Clock) -> tuple[TaskStore, Sequence[ShardRow]]:
    """Open the store, and read its shards. Raises StoreRefused."""
    store = _make_store(settings)
    waits = _waits()
    while True:
        try:
            await store.open()
            rows = await store.shards()
        except StoreUnavailable as error:
            _log.warning("store_not_open", detail=str(error))
            await clock.sleep(next(waits))
            continue
        if not store.is_durable:
            _log.warning("store_not_durable", detail="tasks are lost when this process ends")
        return store, rows


def etcd_client(settings: Settings, clock: Clock) -> EtcdClient:
    """Make a client of the cluster's etcd; whoever uses it closes it."""
    tls = user = None
    if settings.etcd_ca_file is not None or settings.etcd_cert_file is not None:
        tls = Tls(ca=settings.etcd_ca_file, certificate=settings.etcd_cert_file, key=settings.etcd_key_file)
    if settings.etcd_user is not None:
        assert settings.etcd_password_file is not None, "it was checked with the settings"
        user = User(name=settings.etcd_user, password_file=settings.etcd_password_file)
    return EtcdClient(settings.etcd_endpoints, clock, tls=tls, user=user)


async def meet(settings: Settings, client: EtcdClient, store: TaskStore, clock: Clock) -> Meeting:
    """Find out which cluster this is, or make it. Raises IdentityRefused."""
    keys = Keys(settings.etcd_prefix)
    waits = _waits()
    while True:
        try:
            cluster = await identity.establish(client, keys, store)
            await client.server()
        except (EtcdError, StoreUnavailable) as error:
            _log.warning("cluster_not_known", detail=str(error))
            await clock.sleep(next(waits))
            continue
        return Meeting(client, keys, cluster)


def _make_store(settings: Settings) -> TaskStore:
    match settings.store:
        case StoreKind.POSTGRES:
            from duecourse.server.storage.postgres import PostgresStore

            return PostgresStore(settings.read_postgres_dsn())
        case StoreKind.MEMORY:
            from duecourse.server.storage.memory import MemoryStore

            return MemoryStore(settings.shards)


def _waits() -> Iterator[Micros]:
    return backoff.delays(100 * bounds.MILLISECOND, 2 * bounds.SECOND, random.Random())
