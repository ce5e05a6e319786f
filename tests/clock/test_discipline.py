"""Which readings of the reference the cluster clock follows."""

import pytest
from clock.scene import Machine, World, cluster_of, go_on

from duecourse.model import bounds
from duecourse.model.instants import Micros

TOLERANCE = 2 * bounds.MILLISECOND


def error(machine: Machine) -> Micros:
    """How far the cluster clock is ahead of true time."""
    return machine.now().earliest - machine.world.true


def test_a_node_alone_whose_clock_agrees_is_set_by_its_second_reading() -> None:
    machine = Machine(World())
    machine.look()
    assert not machine.discipline.is_set
    machine.look()
    assert machine.discipline.is_set
    assert -TOLERANCE < error(machine) <= 0


def test_the_interval_is_narrow() -> None:
    machine = Machine(World())
    go_on(machine, seconds=10)
    now = machine.now()
    assert now.latest - now.earliest < bounds.MILLISECOND


@pytest.mark.parametrize("off", [-bounds.HOUR, -bounds.SECOND, bounds.SECOND, bounds.HOUR])
def test_a_node_alone_whose_clock_disagrees_waits_for_an_operator(off: Micros) -> None:
    world = World()
    machine = Machine(world, wall_ahead=off)
    go_on(machine, seconds=60)
    assert not machine.discipline.is_set
    assert machine.discipline.refused is not None
    assert abs(machine.discipline.refused + off) < TOLERANCE
    world.accept(None, "operator")
    go_on(machine, seconds=1)
    assert -TOLERANCE < error(machine) <= 0
    assert abs(machine.discipline.offset(machine.wall(), world.elapsed) - off) < TOLERANCE


def test_a_node_whose_clock_is_off_as_it_was_starts_again_by_itself() -> None:
    world = World()
    machine = Machine(world, wall_ahead=bounds.HOUR)
    go_on(machine, seconds=1)
    world.accept(None, "operator")
    go_on(machine, seconds=5)
    world.elapsed += bounds.DAY
    again = Machine(world, wall_ahead=bounds.HOUR)
    go_on(again, seconds=1)
    assert again.discipline.is_set
    other = Machine(world, "other", wall_ahead=bounds.HOUR)
    go_on(other, seconds=60)
    assert other.discipline.is_set is False


@pytest.mark.parametrize("off", [-bounds.HOUR, 0, bounds.HOUR])
def test_a_node_beside_others_is_set_once_one_of_them_confirms(off: Micros) -> None:
    world, machines = cluster_of(2)
    late = Machine(world, "late", wall_ahead=off, others=machines)
    late.look()
    late.look()
    assert not late.discipline.is_set
    go_on(*machines, late, seconds=2)
    assert -TOLERANCE < error(late) <= 0
    assert late.discipline.refused is None


def test_a_node_that_starts_is_not_set_by_what_was_confirmed_before_the_reference_stepped() -> None:
    world, machines = cluster_of(2)
    late = Machine(world, "late", others=machines)
    late.look()
    # It cannot read for a while, and the reference jumps by less than that.
    go_on(*machines, seconds=4)
    world.ahead = 3 * bounds.SECOND
    late.look()
    go_on(late, *machines, seconds=5)
    assert not late.discipline.is_set
    world.ahead = 0
    go_on(late, *machines, seconds=5)
    assert -TOLERANCE < error(late) <= 0


def test_a_node_beside_others_is_not_set_by_a_reference_that_they_do_not_follow() -> None:
    world, machines = cluster_of(2)
    world.ahead = bounds.HOUR
    # Its own clock has jumped with the store's, as on the same machine.
    late = Machine(world, "late", wall_ahead=bounds.HOUR, others=machines)
    go_on(*machines, late, seconds=60)
    assert not late.discipline.is_set
    assert -2 * TOLERANCE < error(machines[0]) <= 0


@pytest.mark.parametrize("jump", [-bounds.HOUR, -bounds.SECOND, bounds.SECOND, bounds.HOUR])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_jump_of_the_reference_alone_is_not_followed(nodes: int, jump: Micros) -> None:
    world, machines = cluster_of(nodes)
    world.ahead = jump
    go_on(*machines, seconds=600)
    for machine in machines:
        assert -2 * TOLERANCE < error(machine) <= 0
        assert machine.discipline.refused is not None
        assert abs(machine.discipline.refused - jump) < TOLERANCE
    world.ahead = 0
    go_on(*machines, seconds=1)
    assert all(machine.discipline.refused is None for machine in machines)
    assert all(-TOLERANCE < error(machine) <= 0 for machine in machines)


@pytest.mark.parametrize("jump", [-bounds.HOUR, bounds.HOUR])
def test_a_jump_of_one_nodes_wall_clock_changes_nothing(jump: Micros) -> None:
    world, machines = cluster_of(3)
    machines[0].wall_ahead = jump
    go_on(*machines, seconds=60)
    for machine in machines:
        assert -TOLERANCE < error(machine) <= 0
        assert machine.discipline.refused is None
    assert abs(machines[0].discipline.offset(machines[0].wall(), world.elapsed) - jump) < TOLERANCE


@pytest.mark.parametrize("jump", [-bounds.HOUR, bounds.HOUR])
def test_a_jump_that_most_wall_clocks_agree_with_is_followed_by_all(jump: Micros) -> None:
    world, machines = cluster_of(3)
    world.ahead = jump
    machines[0].wall_ahead = jump
    go_on(*machines, seconds=5)
    assert all(-2 * TOLERANCE < error(machine) <= 0 for machine in machines)
    machines[1].wall_ahead = jump
    before = [machine.now().earliest for machine in machines]
    go_on(*machines, seconds=2)
    for machine, earlier in zip(machines, before, strict=True):
        assert machine.discipline.refused is None
        if jump > 0:
            assert -TOLERANCE < error(machine) - jump <= 0
        else:
            assert machine.now().earliest - earlier < bounds.SECOND, "it stands still until it was caught up with"
    go_on(*machines, seconds=-min(0, jump) / bounds.SECOND + 10)
    assert all(-TOLERANCE < error(machine) - jump <= 0 for machine in machines)


def test_two_of_four_are_no_majority() -> None:
    world, machines = cluster_of(4)
    world.ahead = bounds.HOUR
    machines[0].wall_ahead = machines[1].wall_ahead = bounds.HOUR
    go_on(*machines, seconds=10)
    assert all(error(machine) <= 0 for machine in machines)


def test_an_operator_has_all_nodes_follow() -> None:
    world, machines = cluster_of(3)
    world.ahead = bounds.HOUR
    go_on(*machines, seconds=5)
    world.accept(None, "operator")
    go_on(*machines, seconds=0.5)
    assert all(-TOLERANCE < error(machine) - bounds.HOUR <= 0 for machine in machines)


def test_a_node_that_slept_through_an_acceptance_follows_when_it_wakes() -> None:
    world, machines = cluster_of(3)
    world.ahead = bounds.HOUR
    go_on(*machines[:2], seconds=5)
    world.accept(None, "operator")
    go_on(*machines[:2], seconds=600)
    machines[2].look()
    assert -TOLERANCE < error(machines[2]) - bounds.HOUR <= 0


def test_an_acceptance_does_not_cover_a_jump_after_it() -> None:
    world, machines = cluster_of(3)
    world.ahead = bounds.HOUR
    go_on(*machines[:2], seconds=1)
    world.accept(None, "operator")
    go_on(*machines[:2], seconds=1)
    world.ahead += bounds.HOUR
    go_on(*machines, seconds=5)
    assert error(machines[2]) <= 0
    assert all(-TOLERANCE * 4 < error(machine) - bounds.HOUR <= 0 for machine in machines[:2])


@pytest.mark.parametrize("jump", [-3 * bounds.SECOND, 3 * bounds.SECOND])
def test_an_acceptance_does_not_cover_a_jump_after_it_that_is_shorter_than_a_nodes_sleep(jump: Micros) -> None:
    world, machines = cluster_of(3)
    go_on(*machines[:2], seconds=5)
    # As when a node joins.
    world.accept(None, "another")
    go_on(*machines[:2], seconds=5)
    world.ahead = jump
    go_on(*machines, seconds=5)
    assert all(-4 * TOLERANCE < error(machine) <= 0 for machine in machines)
    world.accept(None, "operator")
    go_on(*machines, seconds=5)
    assert all(-TOLERANCE < error(machine) - jump <= 0 for machine in machines)


@pytest.mark.parametrize("jump", [-3 * bounds.SECOND, 3 * bounds.SECOND])
def test_a_node_that_slept_for_longer_than_a_jump_that_was_accepted_waits_for_a_confirmation(jump: Micros) -> None:
    world, machines = cluster_of(3)
    world.ahead = jump
    go_on(*machines[:2], seconds=5)
    world.accept(None, "operator")
    go_on(*machines[:2], seconds=10)
    go_on(*machines, seconds=5)
    assert all(-TOLERANCE < error(machine) - jump <= 0 for machine in machines)


def test_a_confirmation_by_a_node_that_never_followed_accepts_nothing() -> None:
    world, machines = cluster_of(3)
    world.ahead = -2 * bounds.SECOND
    for machine in machines[:2]:
        machine.wall_ahead = world.ahead
    go_on(*machines[:2], seconds=5)
    world.accept(None, "operator")
    go_on(*machines[:2], seconds=5)
    world.ahead = 0
    # The third never knew of it, and confirms what it has always followed.
    go_on(machines[2], *machines[:2], seconds=5)
    assert all(machine.discipline.refused is not None for machine in machines[:2])
    assert all(-4 * TOLERANCE < error(machine) + 2 * bounds.SECOND <= 0 for machine in machines[:2])


def test_steps_of_200_ms_are_followed_at_once_and_never_back() -> None:
    world, machines = cluster_of(1)
    (machine,) = machines
    for step in (200, 200, -200, -200, 200) * 3:
        world.ahead += step * bounds.MILLISECOND
        before = machine.now().earliest
        for _ in range(4):
            go_on(machine, seconds=0.25)
            after = machine.now().earliest
            assert after >= before
            before = after
        assert machine.discipline.refused is None
        assert -TOLERANCE < error(machine) - world.ahead <= 0


def test_a_reading_that_took_too_long_is_left_out() -> None:
    world, machines = cluster_of(1)
    (machine,) = machines
    world.ahead = 10 * bounds.MILLISECOND
    machine.delay = bounds.SECOND
    go_on(machine, seconds=5)
    assert machine.discipline.stepped == 0
    assert error(machine) <= 0


def test_without_readings_it_goes_on_and_widens() -> None:
    world, machines = cluster_of(1)
    (machine,) = machines
    world.elapsed += 100 * bounds.SECOND
    now = machine.now()
    assert now.earliest <= world.true <= now.latest
    assert 90 * bounds.MILLISECOND < now.latest - now.earliest < 110 * bounds.MILLISECOND
