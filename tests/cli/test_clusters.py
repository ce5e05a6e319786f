"""`duecourse cluster` and `duecourse node`, against a scripted node."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from cli.conftest import CommandLine
from services.scripted import ScriptedNode, Status

from duecourse.model import bounds
from duecourse.timing.clock import SystemClock
from duecourse.v1 import cluster_service_pb2 as pb

DUECOURSE = [sys.executable, "-m", "duecourse.cli.main"]


def a_node(node_id: str, **told: Any) -> pb.Node:
    node = pb.Node(node_id=node_id, address=f"{node_id}:7400", version="0.2.0", answered=True, **told)
    node.wall_clock_offset.FromMicroseconds(-1_500)
    node.clock_uncertainty.FromMicroseconds(250)
    return node


def a_cluster(*nodes: pb.Node, leaders: tuple[str, ...] = ()) -> pb.GetClusterResponse:
    answer = pb.GetClusterResponse(coordination="c0ffee", answering_node="node-1", nodes=nodes, worker_streams=1)
    for number, leader in enumerate(leaders):
        state = pb.SHARD_STATE_LED if leader else pb.SHARD_STATE_UNLED
        answer.shards.add(shard=number, slot_from=number, slot_until=number + 1, state=state, leader=leader, epoch=7)
    return answer


def three_nodes() -> pb.GetClusterResponse:
    waits = a_node("node-1", ready_tasks=12, worker_streams=3)
    waits.oldest_ready_age.FromMilliseconds(3_250)
    silent = a_node("node-3")
    silent.answered = False
    return a_cluster(waits, a_node("node-2", ineligible_reason="it drains"), silent, leaders=("node-1",) * 4)


def test_the_cluster_is_shown(duecourse: CommandLine) -> None:
    result = duecourse("cluster", "status", "--shards")
    assert result.exit_code == 0
    assert "coordination\tsolo\n" in result.stdout
    assert "node-1\t127.0.0.1:7400\t0.1.0\t1\t5\t2\t" in result.stdout
    assert "0\t0-16383\tled\tnode-1\t3\t5\t2\n" in result.stdout


def test_what_each_node_tells_is_shown(duecourse: CommandLine, node: ScriptedNode) -> None:
    node.script("GetCluster", three_nodes())
    result = duecourse("cluster", "status")
    assert result.exit_code == 0
    assert "coordination\tetcd, cluster c0ffee\n" in result.stdout
    assert "worker streams\t3\n" in result.stdout
    assert "due and waiting\t12 tasks, the oldest for 3.2 s\n" in result.stdout
    assert "node-1\tnode-1:7400\t0.2.0\t4\t0\t0\teligible\t12\t3.2 s\t3\t-1.5 ms ±0.2\n" in result.stdout
    assert "node-2\tnode-2:7400\t0.2.0\t0\t0\t0\tit drains\t0\t\t0\t-1.5 ms ±0.2\n" in result.stdout
    assert "node-3\tnode-3:7400\t0.2.0\t0\t0\t0\tno answer\t\t\t\t\n" in result.stdout


def test_one_task_that_waits_is_one_task(duecourse: CommandLine, node: ScriptedNode) -> None:
    waits = a_node("node-1", ready_tasks=1)
    waits.oldest_ready_age.FromMilliseconds(900)
    node.script("GetCluster", a_cluster(waits, leaders=("node-1",)))
    assert "due and waiting\t1 task, the oldest for 0.9 s\n" in duecourse("cluster", "status").stdout


def test_the_cluster_is_readable_on_a_terminal_of_80_columns(node: ScriptedNode) -> None:
    busy = a_node("node-1", ready_tasks=12_345, worker_streams=3)
    busy.oldest_ready_age.FromMilliseconds(310_000)
    node.script("GetCluster", a_cluster(busy, a_node("node-2"), leaders=("node-1",) * 64))
    ours, theirs = pty.openpty()
    command = [*DUECOURSE, "cluster", "status", "--address", node.address]
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    subprocess.run(command, stdout=theirs, env=environment, check=True, timeout=60)
    os.close(theirs)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", os.read(ours, 20_000).decode()).splitlines()
    os.close(ours)
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith("node-1"))
    assert row.split()[1:] == ["node-1:7400", "64", "0", "0", "eligible", "12345", "5", "min", "3", "-1.5", "ms"]
    assert any(line.split() == ["version", "0.2.0"] for line in lines)


def test_the_cluster_for_programs_is_json(duecourse: CommandLine, node: ScriptedNode) -> None:
    node.script("GetCluster", three_nodes())
    told = json.loads(duecourse("cluster", "status", "--json", "--shards").stdout)
    assert told["shard_states"] == {"led": 4}
    assert told["shards"][0]["leader"] == "node-1"
    first, second, third = told["nodes"]
    assert first["shards_led"] == 4
    assert first["oldest_ready_age_s"] == 3.25
    assert first["wall_clock_offset_s"] == -0.0015
    assert (second["is_eligible"], second["ineligible_reason"]) == (False, "it drains")
    assert (third["answered"], third["ready_tasks"], third["worker_streams"]) == (False, None, None)


def test_shards_without_a_leader_are_a_failure(duecourse: CommandLine, node: ScriptedNode) -> None:
    node.script("GetCluster", a_cluster(leaders=("", "")))
    result = duecourse("cluster", "status")
    assert result.exit_code == 1
    assert "2 of 2 shards have no leader" in result.stderr


async def _until(condition: Callable[[], bool], seen: Callable[[], str]) -> None:
    clock = SystemClock()
    end = clock.elapsed() + 30 * bounds.SECOND
    while not condition():
        assert clock.elapsed() < end, seen()
        await clock.sleep(20 * bounds.MILLISECOND)


def _watch(node: ScriptedNode, log: Path, *options: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        command = [*DUECOURSE, "cluster", "status", "--watch", "--address", node.address, *options]
        return subprocess.Popen(command, stdout=file, stderr=file)


def test_a_watch_through_a_pipe_shows_a_block_a_second_until_it_is_stopped(node: ScriptedNode, tmp_path: Path) -> None:
    trouble = Status(grpc.StatusCode.FAILED_PRECONDITION, message="not now")
    node.script("GetCluster", three_nodes(), trouble, a_cluster(a_node("node-1"), leaders=("",)))
    watch = _watch(node, tmp_path / "log")
    text = (tmp_path / "log").read_text
    asyncio.run(_until(lambda: "answered by" in text().partition("1 of 1 shards have no leader")[2], text))
    watch.send_signal(signal.SIGINT)
    assert watch.wait(20) == 0
    blocks = text().split("\n\n")
    assert "node-3\tnode-3:7400" in blocks[0]
    assert blocks[0].endswith("all shards have a leader")
    assert blocks[1] == "no answer: not now"


def test_a_watch_for_programs_is_a_line_of_json_a_second(node: ScriptedNode, tmp_path: Path) -> None:
    node.script("GetCluster", three_nodes(), Status(grpc.StatusCode.FAILED_PRECONDITION, message="not now"))
    watch = _watch(node, tmp_path / "log", "--json")
    text = (tmp_path / "log").read_text
    asyncio.run(_until(lambda: text().count("\n") >= 3, text))
    watch.send_signal(signal.SIGINT)
    assert watch.wait(20) == 0
    first, second, third, *_ = map(json.loads, text().splitlines())
    assert (len(first["nodes"]), second, len(third["nodes"])) == (3, {"error": "not now"}, 1)


def test_a_watch_on_a_terminal_redraws_it(node: ScriptedNode) -> None:
    node.script("GetCluster", a_cluster(a_node("node-1"), leaders=("node-1",)), three_nodes())
    ours, theirs = pty.openpty()
    command = [*DUECOURSE, "cluster", "status", "--watch", "--address", node.address]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    watch = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while b"no answer" not in shown:
        shown += os.read(ours, 65_536)
    watch.send_signal(signal.SIGINT)
    try:
        while os.read(ours, 65_536):
            pass
    except OSError:  # nobody holds the other end any more
        pass
    os.close(ours)
    assert watch.wait(20) == 0
    assert b"standing" in shown


def test_a_node_is_drained_and_waited_for(duecourse: CommandLine, node: ScriptedNode) -> None:
    one, two = a_node("node-1"), a_node("node-2")
    node.script(
        "GetCluster",
        a_cluster(one, two, leaders=("node-1", "node-2")),
        a_cluster(one, two, leaders=("node-2", "node-2")),
        a_cluster(one, two, leaders=("node-1", "node-2")),
        a_cluster(one, leaders=("node-1", "node-1")),
    )
    result = duecourse("node", "drain", "node-2")
    assert result.exit_code == 0
    assert result.stdout == "node-2 has gone\n"
    assert result.stderr == "node-2 drains\nnode-2 leads 2 of 2 shards\nnode-2 leads 1 of 2 shards\n"
    assert pb.DrainNodeRequest(node_id="node-2") in node.requests


def test_a_node_that_takes_too_long_to_drain_is_told(duecourse: CommandLine, node: ScriptedNode) -> None:
    answer = a_cluster(a_node("node-1"), a_node("node-2"), leaders=("node-2",))
    node.script("GetCluster", *[answer] * 100)
    result = duecourse("node", "drain", "node-2", "--timeout", "1s")
    assert result.exit_code == 4
    assert "node-2 is not gone after 1s" in result.stderr


def test_a_node_that_is_not_there_cannot_be_drained(duecourse: CommandLine, node: ScriptedNode) -> None:
    node.script("DrainNode", Status(grpc.StatusCode.NOT_FOUND, "NODE_NOT_FOUND", "there is no node node-9"))
    result = duecourse("node", "drain", "node-9")
    assert result.exit_code == 1
    assert "there is no node node-9: `duecourse cluster status` lists those that there are" in result.stderr


def test_the_only_node_that_was_asked_may_drain_itself(duecourse: CommandLine, node: ScriptedNode) -> None:
    gone = Status(grpc.StatusCode.UNAVAILABLE, message="failed to connect to all addresses")
    node.script("GetCluster", a_cluster(a_node("node-1"), a_node("node-2"), leaders=("node-1",)), *[gone] * 100)
    result = duecourse("node", "drain", "node-1", "--timeout", "20s")
    assert result.exit_code == 0
    assert "node-1 no longer answers" in result.stdout


def test_the_last_node_may_be_drained_and_gone_at_once(duecourse: CommandLine, node: ScriptedNode) -> None:
    gone = Status(grpc.StatusCode.UNAVAILABLE, message="failed to connect to all addresses")
    node.script("GetCluster", a_cluster(a_node("node-1"), leaders=("node-1",)), *[gone] * 100)
    result = duecourse("node", "drain", "node-1", "--timeout", "20s")
    assert result.exit_code == 0
    assert result.stdout == "node-1 has gone; it was the last node\n"
