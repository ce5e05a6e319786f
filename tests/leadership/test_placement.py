"""Where shards are placed: evenly, alike on every node, and without moving more than has to move."""

from hypothesis import given
from hypothesis import strategies as st

from duecourse.server.core.task import ShardId
from duecourse.server.leadership import Member
from duecourse.server.leadership.placement import place

SHARDS = 64

names = st.lists(
    st.text("abcdefghijklmnopqrstuvwxyz-0123456789", min_size=1, max_size=20), min_size=1, max_size=12, unique=True
)


def member(name: str, reason: str = "", failing: frozenset[ShardId] = frozenset()) -> Member:
    return Member(
        node_id=name, address="", peer_address="", version="", ineligible_reason=reason, failing_shards=failing
    )


def share(nodes: int) -> int:
    return -(-SHARDS // nodes)


@given(names)
def test_every_shard_is_placed_and_no_node_has_more_than_its_share(nodes: list[str]) -> None:
    placed = place([member(name) for name in nodes], SHARDS)
    assert sorted(placed) == list(range(SHARDS))
    counts = [list(placed.values()).count(name) for name in nodes]
    assert max(counts) <= share(len(nodes))


@given(names, st.randoms())
def test_every_node_computes_the_same(nodes: list[str], random: object) -> None:
    one = [member(name) for name in nodes]
    other = list(reversed(one))
    assert place(one, SHARDS) == place(other, SHARDS)


@given(names)
def test_a_node_that_leaves_moves_its_own_shards_and_at_most_two_shares_beyond(nodes: list[str]) -> None:
    before = place([member(name) for name in nodes], SHARDS)
    gone = nodes[0]
    after = place([member(name) for name in nodes[1:]], SHARDS)
    if not after:
        return
    beyond = [shard for shard in before if before[shard] != gone and before[shard] != after[shard]]
    assert len(beyond) <= 2 * share(len(nodes) - 1)


@given(names)
def test_a_node_that_joins_takes_its_share_and_moves_at_most_two_beyond(nodes: list[str]) -> None:
    before = place([member(name) for name in nodes], SHARDS)
    after = place([member(name) for name in [*nodes, "JOINED"]], SHARDS)
    moved = [shard for shard in before if before[shard] != after[shard]]
    beyond = [shard for shard in moved if after[shard] != "JOINED"]
    assert len(beyond) <= 2 * share(len(nodes))


def test_of_three_nodes_one_that_leaves_moves_hardly_more_than_its_shards() -> None:
    beyond = []
    for number in range(100):
        nodes = [f"node-{number}-{letter}" for letter in "abc"]
        before, after = (place([member(name) for name in some], SHARDS) for some in (nodes, nodes[1:]))
        beyond.append(sum(before[shard] not in (nodes[0], after[shard]) for shard in before))
    assert sum(beyond) / len(beyond) < 0.05 * SHARDS


def test_a_node_that_is_not_eligible_gets_nothing() -> None:
    placed = place([member("a"), member("b", "it drains"), member("c")], SHARDS)
    assert set(placed.values()) == {"a", "c"}


def test_when_no_node_is_eligible_all_get_their_share() -> None:
    placed = place([member("a", "it drains"), member("b", "its store does not answer")], SHARDS)
    assert set(placed.values()) == {"a", "b"}


def test_a_shard_avoids_a_node_that_cannot_load_it() -> None:
    usual = place([member("a"), member("b"), member("c")], SHARDS)
    shard = next(shard for shard, node in usual.items() if node == "b")
    placed = place([member("a"), member("b", failing=frozenset({shard})), member("c")], SHARDS)
    assert placed[shard] in ("a", "c")
    assert sum(usual[other] != placed[other] for other in usual) <= 3


def test_a_shard_that_no_node_can_load_stays_where_it_was() -> None:
    usual = place([member("a"), member("b")], SHARDS)
    placed = place([member("a", failing=frozenset({ShardId(7)})), member("b", failing=frozenset({ShardId(7)}))], SHARDS)
    assert placed == usual


def test_without_nodes_nothing_is_placed() -> None:
    assert place([], SHARDS) == {}
