"""Which nodes a worker connects to, and at which addresses: one stream to each node."""

import pytest
from services.worker_machine import Machine

from duecourse.v1 import worker_service_pb2 as pb


@pytest.fixture
def machine() -> Machine:
    """Return a machine with one stream, at the seed `seed`, to the node n1, which has listed n1 and n2."""
    machine = Machine()
    machine.open("seed", node_id="n1")
    machine.hear("seed", cluster_changed=nodes(n1="one:1", n2="two:1"))
    return machine


def nodes(**addresses: str) -> pb.ClusterChanged:
    return pb.ClusterChanged(
        nodes=[pb.WorkerNode(node_id=node_id, address=address) for node_id, address in addresses.items()]
    )


def numbers(machine: Machine, address: str) -> list[int]:
    return [hello.stream_number for hello in machine.told("hello", address)]


def test_a_seed_is_wanted_from_the_start() -> None:
    assert Machine().protocol.reach.wanted(["seed"]) == ["seed"]


def test_nodes_that_are_told_of_are_wanted_and_the_one_that_told_not_again(machine: Machine) -> None:
    assert machine.protocol.reach.wanted(["seed"]) == ["two:1", "seed"]
    assert machine.protocol.reach.missing() == ["n2"]
    machine.open("two:1", node_id="n2")
    assert machine.protocol.reach.wanted(["seed"]) == ["two:1", "seed"]
    assert machine.protocol.reach.missing() == []


def test_a_seed_whose_node_is_reached_elsewhere_is_not_wanted_until_that_stream_ends(machine: Machine) -> None:
    machine.protocol.reach.met("other seed", "n1")
    assert machine.protocol.reach.wanted(["seed", "other seed"]) == ["two:1", "seed"]
    machine.close("seed")
    assert machine.protocol.reach.wanted(["seed", "other seed"]) == ["one:1", "two:1", "seed", "other seed"]


def test_a_stream_to_an_unknown_node_never_ends_one_that_works(machine: Machine) -> None:
    machine.open("other seed", welcome=False)
    assert numbers(machine, "other seed") == [0]


def test_only_the_address_that_the_cluster_knows_has_the_next_number_of_its_node(machine: Machine) -> None:
    machine.close("seed")
    machine.open("seed", welcome=False)
    assert numbers(machine, "seed") == [0]
    machine.open("one:1", welcome=False)
    assert numbers(machine, "one:1") == [1]


def test_a_node_that_tells_of_no_cluster_is_known_by_where_it_was_found() -> None:
    machine = Machine()
    machine.open("seed", node_id="n1")
    machine.close("seed")
    machine.open("seed", welcome=False)
    assert numbers(machine, "seed") == [1]


def test_an_address_whose_node_has_another_stream_is_taken_for_unknown(machine: Machine) -> None:
    machine.open("one:1", welcome=False)
    assert numbers(machine, "one:1") == [0]


def test_a_refusal_that_names_the_node_lets_the_next_stream_replace_what_is_left_of_an_older_one() -> None:
    machine = Machine()
    machine.open("two:1", node_id="n2")
    machine.hear("two:1", cluster_changed=nodes(n1="one:1", n2="two:1"))
    for expected in (0, 1):
        machine.open("seed", welcome=False)
        assert numbers(machine, "seed") == [expected]
        machine.close("seed")
        machine.protocol.reach.met("seed", "n1")
    machine.open("seed", node_id="n1")
    machine.close("seed")
    machine.open("seed", welcome=False)
    assert numbers(machine, "seed") == [0]


def test_of_two_streams_that_both_were_welcomed_by_a_node_the_newer_one_is_kept(machine: Machine) -> None:
    older = machine.streams["seed"]
    assert older.account.out == 4
    machine.open("one:1", node_id="n1")
    assert not older.is_serving
    assert machine.credit("one:1") == 4
    del machine.streams["seed"]
    assert machine.protocol.reach.wanted(["seed"]) == ["one:1", "two:1"]


def test_a_node_that_is_gone_is_not_wanted_any_more_unless_it_is_a_seed(machine: Machine) -> None:
    machine.open("two:1", node_id="n2")
    machine.hear("two:1", cluster_changed=nodes(n1="one:1", n2="two:1"))
    for address in ("seed", "two:1"):
        machine.hear(address, cluster_changed=nodes(n2="two:1"))
    assert machine.protocol.reach.wanted(["seed"]) == ["two:1", "seed"]
    assert machine.streams["seed"].is_serving
    machine.hear("two:1", cluster_changed=nodes(n1="one:1"))
    machine.hear("seed", cluster_changed=nodes(n1="one:1"))
    assert machine.protocol.reach.wanted(["seed"]) == ["seed"]


def test_what_only_the_node_of_a_stream_that_has_ended_lists_is_not_wanted_any_more(machine: Machine) -> None:
    machine.open("two:1", node_id="n2")
    machine.hear("two:1", cluster_changed=nodes(n2="two:1", n3="three:1"))
    assert machine.protocol.reach.wanted(["seed"]) == ["two:1", "three:1", "seed"]
    machine.close("two:1")
    assert machine.protocol.reach.wanted(["seed"]) == ["two:1", "seed"]


def test_the_list_of_one_node_does_not_hide_what_another_one_lists(machine: Machine) -> None:
    machine.open("two:1", node_id="n2")
    machine.hear("two:1", cluster_changed=nodes(n2="two:1", n3="three:1"))
    machine.hear("seed", cluster_changed=nodes(n1="one:1"))
    assert set(machine.protocol.reach.wanted([])) == {"two:1", "three:1"}


def test_what_was_listed_last_is_wanted_when_all_streams_have_ended(machine: Machine) -> None:
    machine.close("seed")
    assert machine.protocol.reach.wanted([]) == ["one:1", "two:1"]
    machine.open("two:1", node_id="n2")
    machine.hear("two:1", cluster_changed=nodes(n2="two:1"))
    assert machine.protocol.reach.wanted([]) == ["two:1"]


def test_a_node_is_found_by_the_address_that_others_know(machine: Machine) -> None:
    assert machine.protocol.reach.stream_at("one:1") is machine.streams["seed"]
    assert machine.protocol.reach.stream_at("two:1") is None
    assert machine.protocol.reach.stream_at("nowhere") is None


def test_a_node_that_changes_its_address_is_wanted_there_when_its_stream_has_ended(machine: Machine) -> None:
    machine.hear("seed", cluster_changed=nodes(n1="one-again:1"))
    assert machine.protocol.reach.wanted([]) == []
    machine.close("seed")
    assert machine.protocol.reach.wanted([]) == ["one-again:1"]


@pytest.mark.parametrize("address", ["10.0.0.7:7400", "[2001:db8::7]:7400", "node-1.example.com:7400", "node_1:1"])
def test_a_node_is_known_by_a_host_and_a_port(machine: Machine, address: str) -> None:
    machine.hear("seed", cluster_changed=nodes(n2=address))
    assert machine.protocol.reach.wanted([]) == [address]


@pytest.mark.parametrize("address", ["", "host", ":1", "dns:///", "dns:///host:1", "unix:/run/x", "a b:1", "h:123456"])
def test_what_is_no_host_and_port_is_not_dialled(machine: Machine, address: str) -> None:
    machine.hear("seed", cluster_changed=nodes(n2=address))
    assert machine.protocol.reach.wanted([]) == []
    assert machine.protocol.reach.missing() == (["n2"] if address else [])
