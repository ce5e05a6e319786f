"""Whose cluster a store's rows are: written once, and again only by force, which ends all terms."""

from conformance.harness import Harness

from duecourse.server.storage import RaiseRefused, RaiseRequest, Stale


async def test_rows_without_a_coordination_take_the_first_that_binds_them(harness: Harness) -> None:
    first = await harness.store.bind("first")
    second = await harness.store.bind("second")
    assert {row.coordination for row in first} == {row.coordination for row in second} == {"first"}
    assert len(first) == harness.shards
    assert all(row.epoch == 0 for row in second)


async def test_binding_by_force_ends_all_terms_and_keeps_epochs(harness: Harness) -> None:
    fences = await harness.lead(0, 1)
    rows = await harness.store.bind("mine", is_forced=True)
    assert {row.coordination for row in rows} == {"mine"}
    assert [rows[fence.shard].epoch for fence in fences] == [fence.epoch for fence in fences]
    assert isinstance(await harness.commit(fences[0]), Stale)


async def test_after_binding_by_force_only_the_new_coordination_raises(harness: Harness) -> None:
    (fence,) = await harness.lead(3)
    await harness.store.bind("mine", is_forced=True)
    request = RaiseRequest(fence.shard, b"new", None)
    refused = (await harness.store.raise_epochs("solo", [request], 1))[fence.shard]
    assert isinstance(refused, RaiseRefused)
    assert refused.coordination == "mine"
    raised = (await harness.store.raise_epochs("mine", [request], 1))[fence.shard]
    assert not isinstance(raised, RaiseRefused)
    assert raised.fence.epoch == fence.epoch + 1
