"""The streams of a node together: admission, replacement, silence, drain."""

import pytest
from streams.node_side import HEARTBEAT, Node, a_token

from duecourse.model import bounds
from duecourse.server.core.effects import StopReason, Verdict
from duecourse.server.core.errors import Draining, Overloaded
from duecourse.server.core.lease import Holder
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.streams.errors import StreamEnded
from duecourse.v1 import worker_service_pb2 as pb


@pytest.fixture
def node() -> Node:
    return Node(max_streams=3)


def test_more_streams_than_allowed_are_refused_until_one_ends(node: Node) -> None:
    workers = [node.connect(f"w{n}") for n in range(3)]
    with pytest.raises(Overloaded):
        node.open()
    assert node.metrics.admission_refusals["worker_streams"] == 1
    workers[0].stream.end(None)
    node.connect("w3")
    assert node.metrics.worker_streams == 3


def test_a_higher_stream_number_replaces_the_worker_s_older_stream(node: Node) -> None:
    older = node.connect(stream_number=1)
    leases = node.assign(older, "a")
    other = node.connect("other")
    newer = node.connect(stream_number=2)
    assert isinstance(older.stream.error, StreamEnded)
    assert [event.lease for event in node.port.unsent] == leases
    assert leases[0].holder is not None
    assert not leases[0].holder.is_open
    assert not other.stream.is_ended
    assert node.hub.streams == 2
    assert [holder.stream_id for holder in node.port.subscribed] == [other.stream.stream_id, newer.stream.stream_id]


@pytest.mark.parametrize("number", [1, 2])
def test_a_stream_that_comes_late_does_not_replace_a_newer_one(node: Node, number: int) -> None:
    newer = node.connect(stream_number=2)
    late = node.open()
    late.introduce(stream_number=number)
    assert isinstance(late.stream.error, StreamEnded)
    assert not newer.stream.is_ended
    newer.stream.end(None)
    node.connect(stream_number=1)


def test_another_incarnation_of_a_worker_is_another_worker(node: Node) -> None:
    older = node.connect(stream_number=2)
    node.connect(stream_number=1, incarnation="another-incarnation-of-w")
    assert not older.stream.is_ended


def test_a_silent_stream_is_dead_after_two_intervals(node: Node) -> None:
    silent = node.connect("silent")
    mute = node.open()
    lively = node.connect("lively")
    for _ in range(2):
        node.pass_time(HEARTBEAT)
        lively.beat([], 0)
        assert lively.hear_events() == ["heartbeat"]
        silent.hear()
        assert not silent.stream.is_ended
    node.pass_time(bounds.SECOND)
    assert isinstance(silent.stream.error, StreamEnded)
    assert isinstance(mute.stream.error, StreamEnded)
    assert not lively.stream.is_ended


def test_time_in_which_the_node_did_not_run_is_nobody_s_silence(node: Node) -> None:
    worker = node.connect()
    node.pass_time(HEARTBEAT)
    worker.hear()
    node.port.now += 60 * bounds.SECOND
    node.hub.tick(node.port.now)
    assert not worker.stream.is_ended
    worker.hear()
    node.pass_time(HEARTBEAT + 2 * bounds.SECOND)
    assert worker.stream.is_ended


def test_a_drain_is_told_and_takes_no_new_streams(node: Node) -> None:
    worker = node.connect()
    opening = node.open()
    node.hub.drain()
    assert worker.hear_events() == ["draining"]
    assert opening.hear() == []
    with pytest.raises(Draining):
        node.open()
    node.hub.close()
    assert isinstance(worker.stream.error, Draining)
    assert node.hub.streams == 0
    assert node.port.subscribed == []


def test_a_turn_of_the_loop_wakes_a_stream_once(node: Node) -> None:
    worker = node.connect()
    before = node.wakes
    leases = node.assign(worker, "a", "b", "c")
    holder = leases[0].holder
    assert holder is not None
    node.hub.verdicts([(holder, lease.token, Verdict.RECORDED) for lease in leases])
    assert node.wakes == before + 1
    worker.hear()
    node.hub.lost([(holder, leases[0].token)])
    assert node.wakes == before + 2


def test_what_concerns_a_stream_that_has_ended_is_dropped(node: Node) -> None:
    holder = Holder(99, "default", "w", "i", 0)
    node.hub.verdicts([(holder, a_token("a"), Verdict.RECORDED)])
    node.hub.stops([(holder, a_token("a"), StopReason.TIMED_OUT)])
    node.hub.lost([(holder, a_token("a"))])
    node.hub.terms_started([(ShardId(0), Epoch(2))])
    assert node.hub.last_read(holder) == 0


def test_stops_are_grouped_by_stream_and_reason(node: Node) -> None:
    worker = node.connect()
    (holder,) = node.port.subscribed
    node.hub.stops(
        [
            (holder, a_token("a"), StopReason.CANCELLED),
            (holder, a_token("b"), StopReason.TIMED_OUT),
            (holder, a_token("c"), StopReason.CANCELLED),
        ]
    )
    assert [list(message.cancel_requested.lease_tokens) for message in worker.hear()] == [
        [a_token("a"), a_token("c")],
        [a_token("b")],
    ]


def test_a_grant_learns_which_message_of_the_worker_was_read_last(node: Node) -> None:
    worker = node.connect()
    (holder,) = node.port.subscribed
    assert node.hub.last_read(holder) == 1
    worker.beat([], 0)
    assert node.hub.last_read(holder) == 2


class TestTheCluster:
    """What workers are told of the nodes, and of what waits here."""

    def test_nodes_are_told_after_welcome_and_whenever_they_change(self, node: Node) -> None:
        node.view.become(n1="one:7400")
        worker = node.open()
        worker.introduce()
        welcome, cluster = worker.hear()
        assert welcome.HasField("welcome")
        assert nodes_of(cluster) == {"n1": "one:7400"}
        node.view.become(n1="one:7400", n2="two:7400")
        (cluster,) = worker.hear()
        assert nodes_of(cluster) == {"n1": "one:7400", "n2": "two:7400"}

    def test_a_change_of_something_else_is_not_told(self, node: Node) -> None:
        node.view.become(n1="one:7400")
        worker = node.open()
        worker.introduce()
        worker.hear()
        node.view.become(n1="one:7400")
        assert worker.hear() == []

    def test_of_several_changes_that_wait_only_the_last_is_told(self, node: Node) -> None:
        worker = node.connect()
        node.view.become(n1="one:7400", n2="two:7400")
        node.view.become(n1="one:7400", n3="three:7400")
        (cluster,) = worker.hear()
        assert nodes_of(cluster) == {"n1": "one:7400", "n3": "three:7400"}

    def test_a_node_that_nobody_reaches_is_not_told_of(self, node: Node) -> None:
        node.view.become(n1="")
        node.connect()
        assert not node.hub.wants_demands

    def test_demand_is_wanted_only_where_there_are_other_nodes(self, node: Node) -> None:
        node.view.become(n1="one:7400")
        assert not node.hub.wants_demands
        node.view.become(n1="one:7400", n2="two:7400")
        assert node.hub.wants_demands

    def test_demand_is_told_to_those_whom_it_concerns_the_latest_number_only(self, node: Node) -> None:
        worker, leaving = node.connect(), node.connect("leaving")
        leaving.say(goodbye={})
        holder, left = (Holder(one.stream.stream_id, "default", "w", "i", 0) for one in (worker, leaving))
        node.hub.demands([(holder, 3), (left, 3), (Holder(99, "default", "w", "i", 0), 3)])
        node.hub.demands([(holder, 7)])
        assert [message.demand.waiting for message in worker.hear()] == [7]
        node.hub.demands([(holder, 0)])
        assert [message.WhichOneof("event") for message in worker.hear()] == ["demand"]
        assert leaving.hear() == []

    def test_the_end_of_terms_is_told_before_any_heartbeat_that_does_not_speak_of_them(self, node: Node) -> None:
        worker = node.connect()
        node.pass_time(HEARTBEAT - bounds.SECOND)
        worker.hear()
        node.pass_time(2 * bounds.SECOND)
        node.hub.term_ended(ShardId(1), Epoch(1))
        node.hub.term_ended(ShardId(2), Epoch(3))
        ended, beat = worker.hear()
        assert [(term.shard, term.epoch) for term in ended.term_ended.terms] == [(1, 1), (2, 3)]
        assert beat.HasField("heartbeat")

    def test_a_stream_that_meets_another_one_of_its_worker_is_told_where_it_has_come_to(self, node: Node) -> None:
        node.connect(stream_number=1)
        second = node.open()
        second.introduce(stream_number=0)
        assert isinstance(second.stream.error, StreamEnded)
        assert second.stream.error.node_id == "n1"


def nodes_of(message: pb.StreamAssignmentsResponse) -> dict[str, str]:
    return {node.node_id: node.address for node in message.cluster_changed.nodes}
