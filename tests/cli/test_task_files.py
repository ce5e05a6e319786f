"""`duecourse task submit --file`: many tasks, from lines of JSON."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from cli.conftest import CommandLine
from hypothesis import given
from hypothesis import strategies as st
from services.scripted import ScriptedNode, Status, answer_all

from duecourse.cli import task_files
from duecourse.cli.task_files import Lines
from duecourse.v1 import error_reason_pb2, task_service_pb2


def _sent(node: ScriptedNode) -> list[Any]:
    return [task for request in node.requests for task in request.tasks]


def _lines(*objects: Any) -> str:
    return "".join(json.dumps(one) + "\n" for one in objects)


def test_every_line_of_a_file_is_a_task(duecourse: CommandLine, node: ScriptedNode, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(
        _lines(*({"task_type": "remind", "task_id": f"t{number}"} for number in range(1_234)))
    )
    result = duecourse("task", "submit", "--file", str(tmp_path / "tasks.jsonl"))
    assert result.exit_code == 0
    assert {task.task_id for task in _sent(node)} == {f"t{number}" for number in range(1_234)}
    assert len(_sent(node)) == 1_234
    assert "submitted 1,234 tasks" in result.stderr
    assert result.stdout == ""


def test_standard_input_is_read_and_the_last_line_needs_no_end(duecourse: CommandLine, node: ScriptedNode) -> None:
    result = duecourse("task", "submit", "-f", "-", given='\n{"task_type":"a"}\r\n\n  \n{"task_type":"b"}')
    assert result.exit_code == 0
    assert [task.task_type for task in _sent(node)] == ["a", "b"]


def test_a_line_has_the_fields_of_a_task(duecourse: CommandLine, node: ScriptedNode) -> None:
    line = {
        "task_type": "remind",
        "payload": {"to": "änn"},
        "content_type": "application/vnd.x+json",
        "headers": {"h": "1"},
        "run_at": "2030-01-02T03:04:05Z",
        "queue": "mail",
        "task_id": "t1",
        "priority": -2,
        "fairness_key": "acme",
        "retry_policy": {"max_attempts": 3, "initial_backoff": "2s", "multiplier": 3, "max_backoff": 60, "jitter": 0},
        "attempt_timeout": 1.5,
        "start_deadline": "2030-01-03T00:00:00+00:00",
        "completion_deadline": "2030-01-04T00:00:00Z",
        "on_lost_attempt": "fail",
        "labels": {"env": "prod"},
    }
    duecourse("task", "submit", "-f", "-", given=_lines(line, {"task_type": "raw", "payload_base64": "AP8="}))
    task, raw = _sent(node)
    assert (json.loads(task.payload), task.content_type) == ({"to": "änn"}, "application/vnd.x+json")
    assert (task.priority, task.fairness_key, task.queue) == (-2, "acme", "mail")
    assert task.retry_policy.max_backoff.ToSeconds() == 60
    assert task.retry_policy.HasField("jitter")
    assert task.attempt_timeout.ToMilliseconds() == 1_500
    assert (raw.payload, raw.content_type) == (b"\x00\xff", "")


def test_flags_speak_for_lines_that_do_not_say_otherwise(duecourse: CommandLine, node: ScriptedNode) -> None:
    lines = _lines({}, {"task_type": "other", "delay": "5s"}, {"now": True})
    duecourse("task", "submit", "-f", "-", "--type", "remind", "--run-at", "2030-01-02T03:04:05Z", given=lines)
    sent = _sent(node)
    assert [task.task_type for task in sent] == ["remind", "other", "remind"]
    assert [task.WhichOneof("when") for task in sent] == ["run_at", "delay", "now"]


def test_bad_lines_are_told_by_their_numbers_and_the_rest_is_submitted(
    duecourse: CommandLine, node: ScriptedNode
) -> None:
    lines = [
        '{"task_type": "good"}',
        "nonsense",
        "[1]",
        '{"task_type": 5}',
        '{"tsk_type": "a"}',
        '{"queue": "a"}',
        '{"task_type": "a", "run_at": "2030-01-01"}',
        '{"task_type": "a", "delay": true}',
        '{"task_type": "a", "labels": {"a": 1}}',
        '{"task_type": "a", "run_at": "2030-01-01T00:00:00Z", "delay": 1}',
        '{"task_type": "a", "payload": 1, "payload_base64": ""}',
        '{"task_type": "a", "payload_base64": "?"}',
        '{"task_type": "a", "retry_policy": {"attempts": 3}}',
        '{"task_type": "a", "max_attempts": 2.5}',
        '{"task_type": "a", "on_lost_attempt": []}',
        '{"task_type": "a", "priority": 99999999999}',
        '{"task_type": "a", "delay": 1e300}',
        '{"task_type": "a", "payload": NaN}',
        "[" * 100_000,
        b'{"task_type": "\xff"}'.decode(errors="surrogateescape"),
        '{"task_type": "good too"}',
    ]
    result = duecourse("task", "submit", "-f", "-", given="\n".join(lines).encode(errors="surrogateescape"))
    assert result.exit_code == 1
    told = [line for line in result.stderr.splitlines() if line.startswith("line ")]
    assert sorted(int(line.split(":")[0].removeprefix("line ")) for line in told) == list(range(2, 21))
    assert "is task_type meant?" in result.stderr
    assert "does not say its zone" in result.stderr
    assert "submitted 2 tasks" in result.stderr
    assert "19 lines failed" in result.stderr
    assert [task.task_type for task in _sent(node)] == ["good", "good too"]


def test_a_line_that_the_server_refuses_is_told_by_its_number(duecourse: CommandLine, node: ScriptedNode) -> None:
    def answer(request: task_service_pb2.SubmitTasksRequest) -> task_service_pb2.SubmitTasksResponse:
        response = answer_all(request)
        response.results[1].error.CopyFrom(
            task_service_pb2.ItemError(
                code=grpc.StatusCode.INVALID_ARGUMENT.value[0],
                reason=error_reason_pb2.ERROR_REASON_INVALID_FIELD,
                message="tasks[1].queue: is too long",
                field="tasks[1].queue",
            )
        )
        return response

    node.script("SubmitTasks", answer)
    result = duecourse("task", "submit", "-f", "-", "--json", given=_lines({"task_type": "a"}, {"task_type": "b"}))
    assert result.exit_code == 1
    assert "line 2: queue: is too long" in result.stderr
    good, bad = map(json.loads, result.stdout.splitlines())
    assert (good["line"], good["created"]) == (1, True)
    assert (bad["line"], bad["error"]) == (2, "queue: is too long")


def test_a_cluster_that_does_not_answer_ends_the_run(duecourse: CommandLine, node: ScriptedNode) -> None:
    node.script("SubmitTasks", *[Status(grpc.StatusCode.UNAVAILABLE, "NO_LEADER")] * 999)
    result = duecourse("task", "submit", "-f", "-", "--timeout", "2s", given=_lines({"task_type": "a"}))
    assert result.exit_code == 3
    assert "line 1: scripted: nothing was done; try again" in result.stderr
    assert "stopped early" in result.stderr


def test_a_flood_of_bad_lines_does_not_flood_the_terminal(duecourse: CommandLine) -> None:
    result = duecourse("task", "submit", "-f", "-", given="x\n" * 1_000)
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) < 60
    assert "1,000 lines failed" in result.stderr


def test_a_line_without_an_end_stays_within_memory() -> None:
    lines = Lines()
    fed = [lines.feed(b"x" * 1_000_000) for _ in range(30)]
    assert not any(fed)
    assert lines.feed(b'\n{"a": 1}\n') == [(1, None), (2, b'{"a": 1}')]
    assert lines.feed(b"y" * (task_files.MAX_LINE_BYTES + 1)) == []
    assert lines.feed(b"") == [(3, None)]


@given(st.lists(st.binary(max_size=6).map(lambda line: line.replace(b"\n", b" "))), st.data())
def test_lines_do_not_depend_on_how_they_are_read(written: list[bytes], data: st.DataObject) -> None:
    stream = b"\n".join(written)
    lines = Lines()
    read = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        read += lines.feed(stream[:size])
        stream = stream[size:]
    read += lines.feed(b"")
    assert read == [(number, line) for number, line in enumerate(written, start=1) if line.strip()]


@pytest.mark.parametrize("slow", [1, 7])
def test_a_slow_producers_lines_do_not_wait_for_more_of_them(
    duecourse: CommandLine, node: ScriptedNode, slow: int, tmp_path: Path
) -> None:
    """Each read of the stream is submitted by itself, before the next read."""
    sizes = []

    class Slow:
        def __init__(self) -> None:
            self.left = [b'{"task_type":"a"}\n' * slow] * 3

        def read(self, _size: int) -> bytes:
            sizes.append(len(_sent(node)))
            return self.left.pop() if self.left else b""

    from duecourse.cli import connection

    tally = task_files.Tally(node.address, as_json=False)
    with connection.session(node.address, "default", "10s") as session:
        task_files.submit(session, Slow(), {}, tally)  # type: ignore[arg-type]
    assert sizes == [0, slow, 2 * slow, 3 * slow]
