"""What the checker lets a node believe of the store's clock."""

from simulation.clock import START, Reference
from simulation.loop import SimulationLoop

from duecourse.model import bounds


def _scene() -> tuple[SimulationLoop, Reference]:
    loop = SimulationLoop(1)  # type: ignore[abstract]
    return loop, Reference(loop)


def test_a_small_step_is_followed_at_once_and_a_large_one_when_it_is_accepted() -> None:
    loop, reference = _scene()
    node = loop.process("node")
    reference.jump(400 * bounds.MILLISECOND)
    assert reference.reached(node) == START + 400 * bounds.MILLISECOND
    reference.jump(bounds.HOUR)
    assert reference.reached(node) == START + 400 * bounds.MILLISECOND
    assert reference.read() == START + bounds.HOUR + 400 * bounds.MILLISECOND
    reference.accept()
    assert reference.reached(node) == reference.read()


def test_a_node_that_has_not_read_a_step_back_goes_on_and_stands_still_once_it_has() -> None:
    loop, reference = _scene()
    unaware, aware = loop.process("unaware"), loop.process("aware")
    loop.now = bounds.SECOND
    reference.jump(-300 * bounds.MILLISECOND)
    reference.was_read(aware, loop.now)
    loop.now += 100 * bounds.MILLISECOND
    assert reference.reached(unaware) == START + 1_100 * bounds.MILLISECOND
    assert reference.reached(aware) == START + bounds.SECOND
    loop.now += 300 * bounds.MILLISECOND
    assert reference.reached(aware) == START + 1_100 * bounds.MILLISECOND


def test_a_step_that_was_not_followed_and_is_taken_back_leaves_no_trace() -> None:
    loop, reference = _scene()
    node = loop.process("node")
    reference.jump(3 * bounds.SECOND)
    loop.now = 2 * bounds.SECOND
    reference.mend()
    assert reference.reached(node) == START + 2 * bounds.SECOND == reference.read()


def test_a_node_that_may_have_followed_a_step_that_was_taken_back_may_go_on_with_it_for_a_while() -> None:
    loop, reference = _scene()
    node = loop.process("node")
    for step in (8 * bounds.SECOND, -8 * bounds.SECOND):
        loop.now += 10 * bounds.SECOND
        reference.jump(step)
        reference.accept()
    loop.now += bounds.SECOND
    reference.was_read(node, loop.now)
    assert reference.reached(node) == START + loop.now + 8 * bounds.SECOND
