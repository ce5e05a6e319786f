"""A stored record that does not decode stops nobody but itself."""

import pytest
from faults.cluster import Cluster
from faults.recording_client import Ask

from duecourse import client as sdk
from duecourse.model import bounds

_NEAR = 3 * bounds.SECOND
_SPOILED = "near-7"
_NAMES = [f"near-{number}" for number in range(40)]


async def test_a_corrupt_record_is_set_aside_and_the_others_fire(cluster: Cluster) -> None:
    cluster.start_worker()
    async with cluster.client() as client:
        now = cluster.clock.now().latest
        await client.submit(*[Ask(name, now + _NEAR) for name in _NAMES])
        await cluster.recovers("the start")
        cluster.node.kill()
        await cluster.store.execute(
            f"UPDATE duecourse.task SET policy = '\\xffff' WHERE task_id = '{_SPOILED}'", unseen=True
        )
        await cluster.node.start()
    await _check_that_only_it_has_failed(cluster)


async def test_what_does_not_decode_as_it_is_granted_is_set_aside_and_stops_no_node(cluster: Cluster) -> None:
    cluster.start_worker()
    async with cluster.client() as client:
        await cluster.recovers("the start")
        now = cluster.clock.now().latest
        await client.submit(*[Ask(name, now + _NEAR) for name in _NAMES])
        await cluster.store.execute(
            f"UPDATE duecourse.task SET headers = '\\xff' WHERE task_id = '{_SPOILED}' AND state = 'pending'",
            unseen=True,
        )
    await _check_that_only_it_has_failed(cluster)


async def _check_that_only_it_has_failed(cluster: Cluster) -> None:
    await cluster.until_started(*[name for name in _NAMES if name != _SPOILED])
    await cluster.recovers("a corrupt record")
    async with cluster.client() as client:
        with pytest.raises(sdk.DuecourseError) as raised:
            await client.get(_SPOILED)
        assert raised.value.reason == "RECORD_CORRUPT"
    await cluster.settle()
    assert not cluster.starts(_SPOILED)
