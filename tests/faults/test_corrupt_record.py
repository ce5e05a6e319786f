"""A stored record that does not decode stops nobody but itself."""

import pytest
from faults.cluster import Cluster
from faults.recording_client import Ask

from duecourse import client as sdk
from duecourse.model import bounds

_NEAR = 3 * bounds.SECOND


async def test_a_corrupt_record_is_set_aside_and_the_others_fire(cluster: Cluster) -> None:
    cluster.start_worker()
    async with cluster.client() as client:
        now = cluster.clock.now().latest
        await client.submit(*[Ask(f"near-{number}", now + _NEAR) for number in range(40)])
        await cluster.recovers("the start")
        cluster.node.kill()
        await cluster.store.execute(
            "UPDATE duecourse.task SET policy = '\\xffff' WHERE task_id = 'near-7'", unseen=True
        )
        await cluster.node.start()
        await cluster.until_started(*[f"near-{number}" for number in range(40) if number != 7])
        await cluster.recovers("a corrupt record")
        with pytest.raises(sdk.DuecourseError) as raised:
            await client.get("near-7")
        assert raised.value.reason == "RECORD_CORRUPT"
    await cluster.settle()
    assert not cluster.starts("near-7")


async def test_what_does_not_decode_as_it_is_granted_is_set_aside_and_stops_no_node(cluster: Cluster) -> None:
    cluster.start_worker()
    async with cluster.client() as client:
        await cluster.recovers("the start")
        now = cluster.clock.now().latest
        await client.submit(*[Ask(f"near-{number}", now + _NEAR) for number in range(40)])
        await cluster.store.execute(
            "UPDATE duecourse.task SET headers = '\\xff' WHERE task_id = 'near-7' AND state = 'pending'", unseen=True
        )
        await cluster.until_started(*[f"near-{number}" for number in range(40) if number != 7])
        await cluster.recovers("a corrupt record")
        with pytest.raises(sdk.DuecourseError) as raised:
            await client.get("near-7")
        assert raised.value.reason == "RECORD_CORRUPT"
    await cluster.settle()
    assert not cluster.starts("near-7")
