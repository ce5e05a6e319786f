"""Keys of one's own in a shared etcd, and a client of it."""

import uuid
from collections.abc import AsyncIterator

import pytest
from services.etcd import EtcdCluster

from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.keys import Keys
from duecourse.timing.clock import SystemClock


@pytest.fixture
def keys() -> Keys:
    return Keys(f"test-{uuid.uuid4()}")


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
async def client(etcd: EtcdCluster, clock: SystemClock) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(etcd.endpoints, clock) as client:
        yield client
