"""`duecourse task`: what is sent, what is shown, how it ends."""

import json
import os
import pty
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from cli.conftest import CommandLine
from services.scripted import ScriptedNode, Silence, Status, a_task, submitted

from duecourse.v1 import cluster_service_pb2, task_pb2, task_service_pb2

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def test_a_task_is_submitted_with_what_the_flags_say(duecourse: CommandLine, node: ScriptedNode) -> None:
    command = (
        'task submit --type remind --queue mail --id t1 --payload {"to":"ann"} --run-at 2030-01-02T03:04:05+01:00'
        " --priority 3 --fairness-key acme --max-attempts 7 --attempt-timeout 1m30s --on-lost-attempt fail"
        " --start-deadline 2030-01-03T00:00:00Z --completion-deadline 2030-01-04T00:00:00Z"
        " --label env=prod --label team=a=b --header traceparent=00-1"
    )
    result = duecourse(*command.split())
    assert (result.exit_code, result.stdout) == (0, "t1\n")
    task = node.requests[0].task
    assert (task.task_type, task.queue, task.task_id) == ("remind", "mail", "t1")
    assert (task.payload, task.content_type) == (b'{"to":"ann"}', "application/json")
    assert task.run_at.ToDatetime(UTC) == datetime(2030, 1, 2, 2, 4, 5, tzinfo=UTC)
    assert (task.priority, task.fairness_key, task.retry_policy.max_attempts) == (3, "acme", 7)
    assert task.attempt_timeout.ToSeconds() == 90
    assert task.on_lost_attempt == task_pb2.ON_LOST_ATTEMPT_FAIL
    assert task.HasField("start_deadline")
    assert task.HasField("completion_deadline")
    assert dict(task.labels) == {"env": "prod", "team": "a=b"}
    assert dict(task.headers) == {"traceparent": "00-1"}


def test_a_delay_is_left_to_the_server_to_resolve(duecourse: CommandLine, node: ScriptedNode) -> None:
    duecourse("task", "submit", "-t", "remind", "--delay", "10s")
    assert node.requests[0].task.delay.ToSeconds() == 10


@pytest.mark.parametrize("arguments", [(), ("--now",)])
def test_a_task_without_a_time_is_due_now(
    duecourse: CommandLine, node: ScriptedNode, arguments: tuple[str, ...]
) -> None:
    duecourse("task", "submit", "-t", "remind", *arguments)
    assert node.requests[0].task.WhichOneof("when") == "now"


def test_a_file_is_sent_byte_for_byte(duecourse: CommandLine, node: ScriptedNode, tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(b"\x00\xff\n")
    duecourse("task", "submit", "-t", "remind", "--payload-file", str(tmp_path / "payload"))
    assert (node.requests[0].task.payload, node.requests[0].task.content_type) == (b"\x00\xff\n", "")


def test_text_needs_its_content_type(duecourse: CommandLine, node: ScriptedNode) -> None:
    refused = duecourse("task", "submit", "-t", "remind", "--payload", "hello")
    assert refused.exit_code == 2
    assert "not JSON" in refused.stderr
    duecourse("task", "submit", "-t", "remind", "--payload", "hello", "--content-type", "text/plain")
    assert (node.requests[0].task.payload, node.requests[0].task.content_type) == (b"hello", "text/plain")


def test_a_submission_for_programs_is_json(duecourse: CommandLine, node: ScriptedNode) -> None:
    node.script(
        "SubmitTask", lambda request: task_service_pb2.SubmitTaskResponse(submitted=submitted("t1", created=False))
    )
    result = duecourse("task", "submit", "-t", "remind", "--id", "t1", "--json")
    assert json.loads(result.stdout) == {"task_id": "t1", "uid": "75" * 16, "created": False}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--type is missing"),
        (["-t", "x", "--run-at", "2030-01-01"], "--run-at: '2030-01-01' does not say its zone"),
        (["-t", "x", "--run-at", "soon"], "--run-at: 'soon' is not an instant"),
        (["-t", "x", "--delay", "soon"], "--delay: 'soon' is not a duration"),
        (["-t", "x", "--delay", "1s", "--now"], "one of run_at, delay and now"),
        (["-t", "x", "--on-lost-attempt", "hope"], "--on-lost-attempt: one of retry, fail is wanted"),
        (["-t", "x", "--label", "a"], "'a' is not of the form key=value"),
        (["-t", "x", "--timeout", "soon"], "'soon' is not a duration"),
        (["-t", "x", "--address", ","], "an address such as"),
        (["-t", "x", "--file", "/nowhere"], "there is no file /nowhere"),
        (["--file", "-", "--id", "t1"], "are a single task's"),
        (["-t", "gre et"], "'gre et' is no name"),
        (["-t", "x", "--queue", ""], "'' is no name"),
        (["-t", "x", "--namespace", "a b"], "'a b' is no name"),
        (["-t", "x", "--priority", "99"], "Invalid value for '--priority'"),
        (["-t", "x", "--max-attempts", "0"], "Invalid value for '--max-attempts'"),
        (["-t", "x", "--delay", "1y"], "--delay: '1y' is not a duration"),
    ],
    ids=range(17),
)
def test_a_wrong_command_line_is_told_and_nothing_is_sent(
    duecourse: CommandLine, node: ScriptedNode, arguments: list[str], said: str
) -> None:
    result = duecourse("task", "submit", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert node.requests == []


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (
            Status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "is too long", field="task.queue"),
            1,
            "error: queue: is too long\n",
        ),
        (Status(grpc.StatusCode.ALREADY_EXISTS, "TASK_EXISTS"), 1, "choose another --id"),
        (Status(grpc.StatusCode.NOT_FOUND, "TASK_NOT_FOUND"), 1, "check the id and --namespace"),
        (Status(UNAVAILABLE, "DRAINING"), 3, "nothing was done; try again"),
        (Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"), 3, "too much to do"),
        (Status(UNAVAILABLE, "STORE_UNAVAILABLE"), 3, "nothing was done; see whether Postgres runs"),
        (Status(UNAVAILABLE, "OUTCOME_UNCERTAIN"), 4, "repeating it with --id t1 is safe"),
        (Silence(), 4, "no answer from"),
        (Status(grpc.StatusCode.INTERNAL, "INVARIANT_VIOLATED", metadata=(("error_id", "e7"),)), 5, "error e7 in"),
        (Status(grpc.StatusCode.PERMISSION_DENIED, message="no \x1b[31mway\nerror: fake"), 1, r"no \x1b[31mway\nerror"),
    ],
    ids=range(10),
)
def test_a_failure_is_one_line_and_an_exit_code(
    duecourse: CommandLine, node: ScriptedNode, status: Any, code: int, said: str
) -> None:
    node.script("SubmitTask", *[status] * 99)
    result = duecourse("task", "submit", "-t", "remind", "--id", "t1", "--timeout", "2s")
    assert result.exit_code == code
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_store_that_does_not_answer_any_more_is_told_with_what_to_do(
    duecourse: CommandLine, node: ScriptedNode
) -> None:
    away = Status(UNAVAILABLE, "STORE_UNAVAILABLE", "the store does not answer")
    node.script("SubmitTask", Status(UNAVAILABLE, "OUTCOME_UNCERTAIN"), *[away] * 99)
    result = duecourse("task", "submit", "-t", "remind", "--id", "t1", "--timeout", "2s")
    assert result.exit_code == 4
    assert result.stderr == (
        "error: the store does not answer: it may or may not have been done; see whether Postgres runs;"
        " repeating it with --id t1 is safe and tells\n"
    )


def test_a_read_that_is_not_answered_is_unavailable(duecourse: CommandLine, node: ScriptedNode) -> None:
    node.script("GetTask", *[Silence()] * 9)
    result = duecourse("task", "get", "t1", "--timeout", "1s")
    assert result.exit_code == 3
    assert result.stderr == f"error: no answer from {node.address} in time: try again\n"


def _script_overdue(
    node: ScriptedNode,
    streams: int,
    leader: str = "node-1",
    state: "task_pb2.TaskState.ValueType" = task_pb2.TASK_STATE_PENDING,
) -> None:
    task = a_task()
    task.task_type = "other"
    task.state = state
    task.due_time.FromJsonString("2020-01-02T03:04:05Z")
    node.script("GetTask", task_service_pb2.GetTaskResponse(task=task))
    cluster = cluster_service_pb2.GetClusterResponse(worker_streams=streams)
    cluster.shards.add(shard=0, slot_until=1, state=cluster_service_pb2.SHARD_STATE_LED, leader=leader)
    node.script("GetCluster", cluster)


def test_a_task_that_is_due_and_waits_says_for_what(duecourse: CommandLine, node: ScriptedNode) -> None:
    _script_overdue(node, streams=0)
    told = duecourse("task", "get", "t1").stderr
    assert "but no worker is connected: start one that takes type 'other' from queue 'default'" in told
    _script_overdue(node, streams=1)
    told = duecourse("task", "get", "t1").stderr
    assert "is one connected that takes type 'other' from queue 'default', and is it not busy?" in told
    _script_overdue(node, streams=1, leader="")
    assert duecourse("task", "get", "t1").stderr == "1 of 1 shards have no leader; their tasks wait\n"


def test_a_task_that_has_ended_or_is_shown_to_a_program_waits_for_nothing(
    duecourse: CommandLine, node: ScriptedNode
) -> None:
    _script_overdue(node, streams=0, state=task_pb2.TASK_STATE_SUCCEEDED)
    assert duecourse("task", "get", "t1").stderr == ""
    _script_overdue(node, streams=0)
    assert duecourse("task", "get", "t1", "--json").stderr == ""


@pytest.mark.parametrize(
    ("state", "attempts", "arguments", "says"),
    [
        (task_pb2.TASK_STATE_FAILED, 1, (), True),
        (task_pb2.TASK_STATE_RETRY_WAIT, 2, (), True),
        (task_pb2.TASK_STATE_FAILED, 0, (), False),
        (task_pb2.TASK_STATE_SUCCEEDED, 2, (), False),
        (task_pb2.TASK_STATE_FAILED, 1, ("--full",), False),
        (task_pb2.TASK_STATE_FAILED, 1, ("--json",), False),
    ],
)
def test_where_to_see_why_attempts_failed_is_told(
    duecourse: CommandLine,
    node: ScriptedNode,
    state: "task_pb2.TaskState.ValueType",
    attempts: int,
    arguments: tuple[str, ...],
    says: bool,
) -> None:
    task = a_task(attempt_count=attempts)
    task.state = state
    node.script("GetTask", task_service_pb2.GetTaskResponse(task=task))
    assert ("`--full` shows them" in duecourse("task", "get", "t1", *arguments).stderr) is says


def test_attempts_are_readable_on_a_terminal_of_80_columns(node: ScriptedNode) -> None:
    attempt = task_pb2.Attempt(number=1, round=1, worker="w1", outcome=task_pb2.ATTEMPT_OUTCOME_FAILED)
    attempt.failure.CopyFrom(task_pb2.Failure(type="ValueError", message="the mail server said: try again later"))
    attempt.lease_time.FromJsonString("2030-01-02T03:04:05.000001Z")
    attempt.start_time.FromJsonString("2030-01-02T03:04:05.012001Z")
    attempt.end_time.FromJsonString("2030-01-02T03:04:17.500001Z")
    node.script("GetTask", task_service_pb2.GetTaskResponse(task=a_task(attempts=[attempt])))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "duecourse.cli.main", "task", "get", "t1", "--full", "--address", node.address]
    subprocess.run(command, stdout=theirs, env=os.environ | {"COLUMNS": "80"}, check=True, timeout=60)
    os.close(theirs)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(ours, 20_000).decode())
    os.close(ours)
    assert "2030-01-02 03:04:05Z +0.012s +12.500s ValueError: the" in shown


def test_a_node_that_is_not_there_is_told_with_what_to_do(duecourse: CommandLine) -> None:
    result = duecourse("task", "get", "t1", "--address", "127.0.0.1:1", "--timeout", "2s")
    assert result.exit_code == 3
    assert result.stderr.startswith("error: cannot reach a node at 127.0.0.1:1 (")
    assert "duecourse dev" in result.stderr


def test_a_person_is_told_what_is_waited_for_before_it_is_given_up() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "duecourse.cli.main", "task", "get", "t1", "--address", "127.0.0.1:1"]
    ended = subprocess.run([*command, "--timeout", "2500ms"], stderr=theirs, check=False, timeout=60)
    os.close(theirs)
    first, second, *_ = os.read(ours, 10_000).decode().splitlines()
    os.close(ours)
    assert ended.returncode == 3
    assert first == "127.0.0.1:1 does not answer yet; trying for up to 2.5 s"
    assert second.startswith("error: cannot reach a node at 127.0.0.1:1")


def test_attempts_are_told_of_how_many(duecourse: CommandLine, node: ScriptedNode) -> None:
    first = a_task(attempt_count=1, retry_policy=task_pb2.RetryPolicy(max_attempts=5))
    again = a_task(attempt_count=6, retry_policy=task_pb2.RetryPolicy(max_attempts=5))
    again.round = 2
    node.script("GetTask", *(task_service_pb2.GetTaskResponse(task=task) for task in (first, again)))
    assert "attempts\t1 (at most 5)\n" in duecourse("task", "get", "t1").stdout
    assert "attempts\t6 (at most 5 in each round)\nround\t2\n" in duecourse("task", "get", "t1").stdout


def test_a_task_is_shown_as_pairs(duecourse: CommandLine) -> None:
    result = duecourse("task", "get", "t9")
    shown = dict(line.split("\t") for line in result.stdout.splitlines())
    assert (shown["task id"], shown["state"]) == ("t9", "pending")
    assert shown["run at"] == "2030-01-02T03:04:05.678901Z"
    assert shown["attempt timeout"] == "10m"


def test_a_full_task_shows_payload_result_and_attempts(duecourse: CommandLine, node: ScriptedNode) -> None:
    attempt = task_pb2.Attempt(
        number=1,
        round=1,
        worker="w1",
        outcome=task_pb2.ATTEMPT_OUTCOME_FAILED,
        failure=task_pb2.Failure(type="ValueError", message="no\n\x1b[2J"),
        progress="half\x1b[2J",
    )
    task = a_task(
        payload=b'{"to":"ann"}', content_type="application/json", result=b"\xff", attempts=[attempt, task_pb2.Attempt()]
    )
    node.script("GetTask", *[task_service_pb2.GetTaskResponse(task=task)] * 2)
    shown = duecourse("task", "get", "t1", "--full").stdout
    assert 'payload\t{"to":"ann"}\n' in shown
    assert "result\t1 bytes\n" in shown
    assert "1\t1\tfailed\tw1\t" in shown
    assert "half\\x1b[2J\tValueError: no\\n\\x1b[2J\n" in shown
    assert "0\t0\topen\t" in shown
    told = json.loads(duecourse("task", "get", "t1", "--full", "--json").stdout)
    assert told["payload"] == {"to": "ann"}
    assert told["result_base64"] == "/w=="
    assert told["attempts"][0]["progress"] == "half\x1b[2J"
    assert told["attempts"][0]["failure"] == {"type": "ValueError", "message": "no\n\x1b[2J"}
    assert node.requests[0].view == task_pb2.TASK_VIEW_FULL


def _pages(*pages: int) -> list[task_service_pb2.ListTasksResponse]:
    return [
        task_service_pb2.ListTasksResponse(
            tasks=[a_task(f"{number}-{index}") for index in range(count)],
            next_page_token=str(number + 1) if number + 1 < len(pages) else "",
        )
        for number, count in enumerate(pages)
    ]


def test_a_list_is_one_line_a_task(duecourse: CommandLine, node: ScriptedNode) -> None:
    node.script("ListTasks", *_pages(2, 0, 1))
    result = duecourse("task", "list")
    assert [line.split("\t")[:2] for line in result.stdout.splitlines()] == [
        ["0-0", "pending"],
        ["0-1", "pending"],
        ["2-0", "pending"],
    ]
    assert result.stderr == ""


def test_an_id_can_be_copied_from_a_list_on_a_narrow_terminal(node: ScriptedNode) -> None:
    task_id = "01890a5d-ac96-774b-bcce-b302099a8057"
    node.script("ListTasks", task_service_pb2.ListTasksResponse(tasks=[a_task(task_id)]))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "duecourse.cli.main", "task", "list", "--address", node.address]
    subprocess.run(command, stdout=theirs, env=os.environ | {"COLUMNS": "80"}, check=True, timeout=60)
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert task_id in shown
    assert "due" not in shown
    assert "tried" in shown


def test_a_list_says_when_there_is_more_than_it_shows(duecourse: CommandLine, node: ScriptedNode) -> None:
    node.script("ListTasks", *_pages(3, 3))
    result = duecourse("task", "list", "--limit", "4", "--json")
    assert [json.loads(line)["task_id"] for line in result.stdout.splitlines()] == ["0-0", "0-1", "0-2", "1-0"]
    assert "more than 4" in result.stderr


def test_a_long_list_is_shown_whole_on_demand(duecourse: CommandLine, node: ScriptedNode) -> None:
    node.script("ListTasks", *_pages(1_000, 1_000, 500))
    result = duecourse("task", "list", "--all", "--json")
    assert len(result.stdout.splitlines()) == 2_500


def test_a_list_asks_for_what_the_filters_say(duecourse: CommandLine, node: ScriptedNode) -> None:
    command = (
        "task list --queue mail --state failed --state CANCELLED --from 2030-01-01T00:00:00Z"
        " --before 2030-01-02T00:00:00Z --namespace billing"
    )
    duecourse(*command.split())
    [request] = node.requests
    assert (request.namespace, request.queue) == ("billing", "mail")
    assert set(request.states) == {task_pb2.TASK_STATE_FAILED, task_pb2.TASK_STATE_CANCELLED}
    assert request.run_at_before.seconds - request.run_at_from.seconds == 86_400


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--state", "odd"], "'odd' is not one of pending"), (["--from", "2030-01-01"], "zone")]
)
def test_a_wrong_filter_is_told(duecourse: CommandLine, arguments: list[str], said: str) -> None:
    result = duecourse("task", "list", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_cancellation_tells_the_truth(duecourse: CommandLine, node: ScriptedNode) -> None:
    requested = task_service_pb2.CancelTaskResponse(
        result=task_service_pb2.CANCEL_RESULT_REQUESTED, state=task_pb2.TASK_STATE_RUNNING, earlier_attempt_may_run=True
    )
    node.script("CancelTask", requested, requested)
    result = duecourse("task", "cancel", "t1", "--wait", "2s", "--revision", "4")
    assert result.stdout == "result\trequested\nstate\trunning\n"
    assert "may still be running" in result.stderr
    assert (node.requests[0].expected_revision, node.requests[0].wait.ToSeconds()) == (4, 2)
    told = json.loads(duecourse("task", "cancel", "t1", "--json").stdout)
    assert told == {"result": "requested", "state": "running", "earlier_attempt_may_run": True}
