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
    async with cluster.client() as client:
        now = cluster.clock.now().latest
        await client.submit(*[Ask(name, now + _NEAR) for name in _NAMES])
        cluster.node.kill()
        await _spoil(cluster, "policy = '\\xffff'")
        await cluster.node.start()
    cluster.start_worker()
    await _check_that_only_it_has_failed(cluster)


async def test_what_does_not_decode_as_it_is_granted_is_set_aside_and_stops_no_node(cluster: Cluster) -> None:
    async with cluster.client() as client:
        now = cluster.clock.now().latest
        await client.submit(*[Ask(name, now + _NEAR) for name in _NAMES])
        await _spoil(cluster, "headers = '\\xff'")
    cluster.start_worker()
    await _check_that_only_it_has_failed(cluster)


async def _spoil(cluster: Cluster, how: str) -> None:
    """Spoil a record while there is no worker yet that it could be granted to, however long this takes."""
    spoiled = await cluster.store.fetch(
        f"UPDATE duecourse.task SET {how} WHERE task_id = '{_SPOILED}' AND state = 'pending' RETURNING 1", unseen=True
    )
    assert spoiled, "the fault did not fire"


async def _check_that_only_it_has_failed(cluster: Cluster) -> None:
    await cluster.until_started(*[name for name in _NAMES if name != _SPOILED])
    await cluster.recovers("a corrupt record")
    async with cluster.client() as client:
        with pytest.raises(sdk.DuecourseError) as raised:
            await client.get(_SPOILED)
        assert raised.value.reason == "RECORD_CORRUPT"
    await cluster.settle()
    assert not cluster.starts(_SPOILED)
