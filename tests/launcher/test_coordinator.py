"""The etcd of a cluster on one machine: kept between runs, ended with its owner, and told about when it fails."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from services.ports import free_port

from duecourse.cli.launcher.children import Nursery
from duecourse.cli.launcher.coordinator import LocalEtcd
from duecourse.cli.launcher.errors import LaunchError
from duecourse.model import bounds
from duecourse.server.etcd import transaction
from duecourse.server.etcd.client import EtcdClient
from duecourse.server.etcd.embedded import Member
from duecourse.timing.clock import SystemClock


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    with Nursery() as one:
        yield one


async def test_what_it_was_told_is_there_in_the_next_run(nursery: Nursery, tmp_path: Path) -> None:
    etcd = LocalEtcd(nursery, SystemClock(), tmp_path)
    await etcd.start()
    async with EtcdClient([etcd.endpoint], SystemClock()) as client:
        await client.write([transaction.put(b"key", b"kept")])
    await etcd.stop()
    assert etcd.what_ended() is not None
    again = LocalEtcd(nursery, SystemClock(), tmp_path)
    await again.start()
    assert again.what_ended() is None
    async with EtcdClient([again.endpoint], SystemClock()) as client:
        found = await client.get(b"key")
    assert found is not None
    assert found.value == b"kept"
    await again.stop()


async def test_an_etcd_that_does_not_start_says_why(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "etcd").write_text("not a folder")
    with pytest.raises(LaunchError, match="etcd ended with exit code 1; the end of its log:"):
        await LocalEtcd(nursery, SystemClock(), tmp_path).start()


async def test_an_etcd_that_is_killed_is_told(nursery: Nursery, tmp_path: Path) -> None:
    clock = SystemClock()
    etcd = LocalEtcd(nursery, clock, tmp_path)
    await etcd.start()
    os.kill(etcd.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while etcd.what_ended() is None:
            await clock.sleep(20 * bounds.MILLISECOND)
    assert etcd.what_ended() == f"etcd was ended by SIGKILL, see {tmp_path / 'etcd.log'}"


async def test_an_etcd_that_is_not_there_is_not_healthy(tmp_path: Path) -> None:
    assert not await Member("etcd", tmp_path, free_port(), free_port()).is_healthy()
