"""The simulated store, for the suite that every store has to pass."""

import pytest
from conformance.harness import Harness
from services.postgres import SHARDS
from simulation.store import Link, Quiet, SimulatedStore

from duecourse.server.core.task import TaskKey
from duecourse.server.storage.memory import MemoryStore


@pytest.fixture
async def harness() -> Harness:
    backing = MemoryStore(SHARDS)
    store = SimulatedStore(backing, Link("conformance"), None, None, Quiet())

    async def snapshot() -> bytes:
        return backing.snapshot()

    async def spoil(key: TaskKey) -> None:
        backing.spoil(key)

    return Harness(store, snapshot, spoil)
