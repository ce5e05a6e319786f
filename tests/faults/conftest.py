"""What fault tests share: a cluster on a database of its own, a seed, and how long to go on.

`DUECOURSE_FAULTS=long` asks for the long form of each; `DUECOURSE_FAULTS_SEED` repeats what a run has printed.
"""

import os
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from faults.cluster import Cluster
from faults.cluster_of_nodes import ClusterOfNodes, Links
from services.etcd import EtcdCluster

from duecourse.cli.launcher.children import Nursery
from duecourse.server.storage.embedded import EmbeddedPostgres

_IS_LONG = os.environ.get("DUECOURSE_FAULTS") == "long"
_LONG_SECONDS = 1_800


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give long forms their time."""
    for item in items:
        if _IS_LONG and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(_LONG_SECONDS))


@pytest.fixture
def is_long() -> bool:
    """Whether there is time for the long form."""
    return _IS_LONG


@pytest.fixture
def source(request: pytest.FixtureRequest) -> random.Random:
    """Whatever a test leaves to chance, from a seed that is shown when it fails."""
    seed = os.environ.get("DUECOURSE_FAULTS_SEED") or secrets.token_hex(4)
    print(f"DUECOURSE_FAULTS_SEED={seed}")
    return random.Random(f"{seed}:{request.node.name}")


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    """Start processes of which none outlives the test."""
    with Nursery() as one:
        yield one


@pytest_asyncio.fixture
async def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_dsn: str, nursery: Nursery, source: random.Random
) -> AsyncIterator[Cluster]:
    """Run one node on a database of its own; a parameter is its settings."""
    async with Cluster(tmp_path, postgres_dsn, nursery, source, getattr(request, "param", None)) as one:
        yield one


@pytest_asyncio.fixture
async def cluster_on_own_postgres(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    own_postgres: EmbeddedPostgres,
    nursery: Nursery,
    source: random.Random,
) -> AsyncIterator[Cluster]:
    """Run one node on a server of its own, to be stopped, killed or frozen; a parameter is the node's settings."""
    async with Cluster(tmp_path, own_postgres.dsn, nursery, source, getattr(request, "param", None)) as one:
        yield one


StartCluster = Callable[..., Awaitable[ClusterOfNodes]]


@pytest_asyncio.fixture
async def start_cluster(
    tmp_path: Path, postgres_dsn: str, nursery: Nursery, source: random.Random, etcd: EtcdCluster
) -> AsyncIterator[StartCluster]:
    """Start clusters of several nodes that meet in etcd, each on the test's own database if none is given.

    They share the etcd of all tests, under a prefix of their own, unless they are given another.
    """
    async with AsyncExitStack() as stack:

        async def start(
            nodes: int = 3,
            *,
            links: Links | None = None,
            own_etcd: EtcdCluster | None = None,
            dsn: str = postgres_dsn,
            **settings: str,
        ) -> ClusterOfNodes:
            folder = tmp_path / f"cluster-{source.getrandbits(32):08x}"
            members = (own_etcd or etcd).endpoints
            return await stack.enter_async_context(
                ClusterOfNodes(
                    folder,
                    dsn,
                    nursery,
                    source,
                    stack,
                    etcd=members,
                    nodes=nodes,
                    links=links or {},
                    settings=settings,
                )
            )

        yield start
