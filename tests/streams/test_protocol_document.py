"""The example in docs/protocol.md is true: a node says what is written there."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict
from streams.node_side import HEARTBEAT, Node, a_token

from duecourse.server.core.effects import Verdict
from duecourse.v1 import worker_service_pb2 as pb

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def example() -> list[tuple[str, dict[str, Any]]]:
    """Return who says what."""
    (block,) = re.findall(r"```\n(> .*?)```", DOCUMENT.read_text(), re.DOTALL)
    entries = re.split(r"^(?=[<>] )", block, flags=re.MULTILINE)
    return [(entry[0], json.loads(entry[1:])) for entry in entries if entry]


def test_the_example_is_what_a_node_says() -> None:
    node = Node()
    node.view.become(n1="n1.example:7400", n2="n2.example:7400")
    worker = node.open()

    def beat() -> None:
        node.hub.check_began()
        node.hub.check_succeeded()
        node.pass_time(HEARTBEAT)

    # What the node decides by itself, before it says so.
    decides: dict[str, Callable[[], object]] = {
        "assignments": lambda: node.assign(worker, "order-17", last_read=2),
        "heartbeat": beat,
        "outcomes_recorded": lambda: node.hub.verdicts(
            [(node.port.subscribed[0], a_token("order-17"), Verdict.RECORDED)]
        ),
        "demand": lambda: node.hub.demands([(node.port.subscribed[0], 40)]),
    }
    for who, content in example():
        if who == ">":
            worker.stream.receive(ParseDict(content, pb.StreamAssignmentsRequest()), node.port.now)
            assert worker.stream.error is None
            continue
        (event,) = content
        decides.get(event, lambda: None)()
        message = worker.stream.take()
        assert message is not None
        assert message == ParseDict(content, pb.StreamAssignmentsResponse())
    assert worker.hear() == []
