"""Keys of one's own in a shared etcd, and a cluster in it."""

import uuid
from collections.abc import AsyncIterator

import pytest
from services.clustering import SHARDS, InProcessCluster, a_cluster
from services.etcd import EtcdCluster

from duecourse.server.etcd.keys import Keys
from duecourse.server.storage.memory import MemoryStore


@pytest.fixture
def keys() -> Keys:
    return Keys(f"test-{uuid.uuid4()}")


@pytest.fixture
async def cluster(etcd: EtcdCluster, keys: Keys) -> AsyncIterator[InProcessCluster]:
    async with a_cluster(etcd.endpoints[0], keys, MemoryStore(SHARDS)) as cluster:
        yield cluster
