"""The key space: what is formatted is parsed, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duecourse.server.core.task import ShardId
from duecourse.server.etcd import keys
from duecourse.server.etcd.keys import Candidate, CandidateKey, Keys, MemberKey

NAMES = st.text(min_size=1, max_size=40).filter(lambda text: text.encode("utf-8", "ignore").decode() == text)


@given(NAMES, NAMES)
def test_the_key_of_a_node_is_parsed_whatever_its_name(prefix: str, node: str) -> None:
    space = Keys(prefix)
    assert space.parse(space.member(node)) == MemberKey(node)
    assert space.member(node).startswith(space.coordination)


@given(st.integers(0, 16_383), st.integers(1, 2**63 - 1))
def test_the_key_of_a_candidate_is_parsed(shard: int, lease: int) -> None:
    space = Keys()
    key = space.candidate(ShardId(shard), lease)
    assert space.parse(key) == CandidateKey(ShardId(shard), lease)
    assert key.startswith(space.election(ShardId(shard)))


def test_a_prefix_does_not_reach_into_another_one() -> None:
    assert Keys("a").parse(Keys("a/coordination/members/x").member("n")) is None
    assert Keys("a").parse(Keys("b").member("n")) is None


@pytest.mark.parametrize("rest", ["", "members", "members/a/b", "elections/x/1", "elections/1/g", "else/1/2"])
def test_keys_of_others_are_none_of_ours(rest: str) -> None:
    assert Keys().parse(Keys().coordination + rest.encode()) is None
    assert Keys().parse(b"\xff" + rest.encode()) is None


@given(NAMES, NAMES)
def test_a_candidate_is_read_as_it_was_written(node: str, address: str) -> None:
    candidate = Candidate(node=node, address=address)
    assert keys.parse_candidate(keys.format_candidate(candidate)) == candidate


@pytest.mark.parametrize("value", [b"", b"x", b"{}", b"[]", b'{"node": 1, "address": "a"}', b"\xff"])
def test_what_is_no_candidate_is_none(value: bytes) -> None:
    assert keys.parse_candidate(value) is None


def test_what_a_newer_version_adds_to_a_candidate_is_ignored() -> None:
    value = b'{"node": "n", "address": "a", "zone": "z"}'
    assert keys.parse_candidate(value) == Candidate(node="n", address="a")


@given(st.binary(min_size=1), st.binary())
def test_the_end_of_a_prefix_is_after_all_that_begin_with_it(prefix: bytes, rest: bytes) -> None:
    if prefix.strip(b"\xff"):
        assert prefix <= prefix + rest < keys.end_of(prefix)
    else:
        with pytest.raises(ValueError, match="all keys"):
            keys.end_of(prefix)
