"""Any node answers any request: what is sent on, what is tried again, and what is said in the end."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeVar

import grpc
import pytest
import pytest_asyncio
from grpc import aio
from rpc.edge import Told, told
from rpc.several import LONG, SHARDS, Several, SmallNode, several, task_ids
from services import waiting
from services.garbage import none_left
from services.tcp_proxy import Http2, TcpProxy

from duecourse.model import bounds
from duecourse.server.core import errors
from duecourse.server.core.task import ShardId, TaskKey
from duecourse.server.rpc.peers import Peers
from duecourse.server.rpc.relay import NotThere
from duecourse.timing.clock import SystemClock
from duecourse.v1 import error_reason_pb2, task_pb2, task_service_pb2

Method = aio.StreamStreamMultiCallable[bytes, bytes]
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED
TRIES = 5
"""Of calls whose answer comes 100 ms before their deadline, which a machine that is busy may let pass."""
NO_ANSWER = "no answer"
Answer = TypeVar("Answer")


@pytest_asyncio.fixture
async def three() -> AsyncIterator[Several]:
    """Three nodes: shard 0 is led by the first, 1 by the second, 2 and 3 by the third."""
    async with several(3) as nodes:
        for shard, node in enumerate([*nodes.nodes, nodes.nodes[2]]):
            nodes.lead(node, shard)
        yield nodes


def a_task(task_id: str = "", **fields: object) -> task_pb2.NewTask:
    return task_pb2.NewTask(task_id=task_id, task_type="send", now=task_pb2.Now(), **fields)  # type: ignore[arg-type]


async def submit(node: SmallNode, task: task_pb2.NewTask, seconds: float = LONG) -> task_service_pb2.SubmittedTask:
    response = await node.tasks.SubmitTask(task_service_pb2.SubmitTaskRequest(task=task), timeout=seconds)
    return response.submitted


async def in_time(node: SmallNode, ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Make a call whose answer comes just before its deadline; again, if a machine that is busy has let that pass."""
    for _ in range(TRIES - 1):
        try:
            return await ask()
        except aio.AioRpcError as error:
            if error.code() is not DEADLINE_EXCEEDED:
                raise
        # What was called for it is of no account.
        node.metrics.peer_calls.clear()
    return await ask()


async def refused(node: SmallNode, task_id: str, seconds: float) -> Told:
    with pytest.raises(aio.AioRpcError) as caught:
        await in_time(node, lambda: submit(node, a_task(task_id), seconds))
    return told(caught.value)


async def submit_several(
    node: SmallNode, tasks: list[task_pb2.NewTask], seconds: float
) -> task_service_pb2.SubmitTasksResponse:
    request = task_service_pb2.SubmitTasksRequest(tasks=tasks)
    return await in_time(node, lambda: node.tasks.SubmitTasks(request, timeout=seconds))


async def cancel(node: SmallNode, task_id: str, **fields: object) -> task_service_pb2.CancelTaskResponse:
    request = task_service_pb2.CancelTaskRequest(task_id=task_id, **fields)  # type: ignore[arg-type]
    return await node.tasks.CancelTask(request, timeout=LONG)


def reasons(response: task_service_pb2.SubmitTasksResponse) -> list[str]:
    """Return for each item the reason why it was refused, empty if it was not."""
    return [
        error_reason_pb2.ErrorReason.Name(result.error.reason).removeprefix("ERROR_REASON_")
        if result.HasField("error")
        else ""
        for result in response.results
    ]


# Where requests go.


async def test_a_submission_is_carried_out_by_the_leader_of_its_shard(three: Several) -> None:
    a, b, _ = three.nodes
    [task_id] = task_ids(1, 1)
    submitted = await submit(a, a_task(task_id))
    assert submitted.created
    assert submitted.uid == three.shelf.tasks[TaskKey("default", task_id)].uid
    assert three.shelf.submitted_to == {"b": 1}
    assert a.metrics.peer_calls == {"answered": 1}
    assert b.metrics.rpc_requests["peer/SubmitTask", "OK"] == 1


async def test_what_this_node_leads_is_sent_nowhere(three: Several) -> None:
    a = three.nodes[0]
    request = task_service_pb2.SubmitTasksRequest(tasks=map(a_task, task_ids(0, 5)))
    assert reasons(await a.tasks.SubmitTasks(request, timeout=LONG)) == [""] * 5
    assert a.peer_calls == 0


async def test_a_cancellation_is_carried_out_by_the_leader_and_relayed_as_it_is(three: Several) -> None:
    a, b, _ = three.nodes
    [task_id] = task_ids(1, 1)
    with pytest.raises(aio.AioRpcError) as caught:
        await cancel(a, task_id)
    missing = told(caught.value)
    assert (missing.code, missing.reason, len(missing.details)) == (grpc.StatusCode.NOT_FOUND, "TASK_NOT_FOUND", 1)
    await submit(a, a_task(task_id))
    response = await cancel(a, task_id)
    assert response.result == task_service_pb2.CANCEL_RESULT_PREVENTED
    with pytest.raises(aio.AioRpcError) as caught:
        await cancel(a, task_id, expected_revision=3)
    changed = told(caught.value)
    assert (changed.code, changed.reason) == (grpc.StatusCode.ABORTED, "REVISION_MISMATCH")
    assert changed.metadata == {"expected": "3", "current": "7"}
    assert len(changed.details) == 1
    assert len(b.commands.cancel_waits) == 3


async def test_a_batch_is_split_by_leader_and_put_together_in_order(three: Several) -> None:
    tasks = [a_task(task_id) for shard in (2, 0, 1, 3) for task_id in task_ids(shard, 3)]
    tasks = [*tasks[::2], a_task("bad name"), *tasks[1::2]]
    response = await three.nodes[0].tasks.SubmitTasks(task_service_pb2.SubmitTasksRequest(tasks=tasks), timeout=LONG)
    assert reasons(response) == ["" if task.task_id != "bad name" else "INVALID_FIELD" for task in tasks]
    for task, result in zip(tasks, response.results, strict=True):
        if task.task_id != "bad name":
            assert result.submitted.task_id == task.task_id
            assert result.submitted.uid == three.shelf.tasks[TaskKey("default", task.task_id)].uid
        else:
            assert result.error.field == "tasks[6].task_id"
    assert three.shelf.submitted_to == {"a": 3, "b": 3, "c": 6}
    assert three.nodes[0].peer_calls == 2


async def test_an_item_that_the_leader_refuses_is_named_by_its_place_in_the_request(three: Several) -> None:
    a, b, _ = three.nodes
    mine, theirs = task_ids(0, 2), task_ids(1, 2)
    b.commands.answers[theirs[1]] = errors.InvalidField("tasks[1].run_at", "is too far")
    tasks = map(a_task, (mine[0], theirs[0], mine[1], theirs[1]))
    response = await a.tasks.SubmitTasks(task_service_pb2.SubmitTasksRequest(tasks=tasks), timeout=LONG)
    error = response.results[3].error
    assert (error.field, error.message) == ("tasks[3].run_at", "tasks[3].run_at: is too far")


async def test_an_id_that_was_generated_is_the_same_submission_wherever_it_is_tried(three: Several) -> None:
    a, b, c = three.nodes
    for node in (a, b, c):
        node.commands.loses = True
    asked = asyncio.Event()

    async def lose_once() -> None:
        if asked.is_set():
            for node in (a, b, c):
                node.commands.loses = False
        asked.set()

    for node in (a, b, c):
        node.commands.wait = lose_once
    submitted = await submit(a, a_task())
    assert [key.task_id for key in three.shelf.tasks] == [submitted.task_id]
    assert not submitted.created


async def test_payload_headers_and_unknown_fields_arrive_as_they_were_sent(three: Several) -> None:
    headers = {"traceparent": "00-1", "tracestate": "x=1", "tenant": "ann"}
    task = a_task(task_ids(1, 1)[0], payload=b"\0\xff" * 1000, headers=headers)
    task.MergeFromString(b"\xfa\x3f\x02hi")  # field 1023, of a version to come
    await submit(three.nodes[0], task)
    stored = three.shelf.tasks[TaskKey("default", task.task_id)]
    assert (stored.payload, stored.headers) == (task.payload, headers)
    assert not (await submit(three.nodes[1], task)).created, "the fingerprint is that of the request as it was sent"
    batch = task_service_pb2.SubmitTasksRequest(tasks=[a_task(task_ids(0, 1)[0]), task])
    assert reasons(await three.nodes[0].tasks.SubmitTasks(batch, timeout=LONG)) == ["", ""]


# What never happens.


async def test_nodes_that_take_each_other_for_the_leader_do_not_send_in_circles() -> None:
    async with several(2) as nodes:
        a, b = nodes.nodes
        shard = ShardId(2)
        a.view.leaders[shard], b.view.leaders[shard] = "b", "a"
        found = await refused(a, task_ids(2, 1)[0], 1)
        assert (found.code, found.reason) == (UNAVAILABLE, "NOT_SHARD_LEADER")
        assert found.metadata["leader"] == b.address
        assert b.peer_calls == 0
        assert 2 <= a.peer_calls <= 12, "each try waits longer than the one before"


async def test_the_peer_surface_refuses_at_once_what_the_node_does_not_lead(three: Several) -> None:
    request = task_service_pb2.SubmitTaskRequest(task=a_task(task_ids(1, 1)[0]))
    with pytest.raises(aio.AioRpcError) as caught:
        await three.nodes[0].peer_tasks.SubmitTask(request, timeout=LONG)
    assert told(caught.value).reason == "NO_LEADER"
    assert three.nodes[0].peer_calls == 0


async def test_workers_are_not_served_on_the_peer_surface(three: Several) -> None:
    open_stream: Method = three.nodes[0].peer_channel.stream_stream("/duecourse.v1.WorkerService/StreamAssignments")
    call = open_stream()
    assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


# What is tried again, and what is said in the end.


async def test_without_a_leader_the_answer_comes_before_the_deadline_and_says_that_nothing_was_done() -> None:
    async with several(1) as nodes:
        found = await refused(nodes.nodes[0], task_ids(2, 1)[0], 1)
        assert (found.code, found.reason) == (UNAVAILABLE, "NO_LEADER")
        assert nodes.nodes[0].peer_calls == 0


async def test_a_node_that_has_lost_touch_with_the_others_does_not_wait_for_a_leader(three: Several) -> None:
    a, b, _ = three.nodes
    three.lead(None, 3)
    a.view.was_seen_lately = False
    assert (await refused(a, task_ids(3, 1)[0], LONG)).reason == "NO_LEADER"
    # What it knows may still be true.
    three.lead(b, 3)
    assert (await submit(a, a_task(task_ids(3, 1)[0]))).created


async def test_a_leader_that_is_elected_meanwhile_gets_the_request_at_once(three: Several) -> None:
    a, b, _ = three.nodes
    three.lead(None, 3)
    async with asyncio.TaskGroup() as group:
        submitting = group.create_task(submit(a, a_task(task_ids(3, 1)[0])))
        # It has found out that there is none: its pauses have grown to where only news help.
        await asyncio.wait((submitting,), timeout=1)
        three.lead(b, 3)
        assert (await submitting).created
    assert three.shelf.submitted_to == {"b": 1}


async def test_a_leader_that_changes_in_the_middle_of_a_call_does_not_fail_it(three: Several) -> None:
    a, b, c = three.nodes
    [task_id] = task_ids(1, 1)
    b.commands.loses = True

    async def move() -> None:
        three.lead(c, 1)
        b.loop.shards[ShardId(1)] = 1  # It does not know yet, and its last commit is under way.

    b.commands.wait = move
    submitted = await submit(a, a_task(task_id))
    assert not submitted.created, "the first try had created it"
    assert three.shelf.submitted_to == {"b": 1, "c": 1}


@pytest.mark.parametrize("refusal", [errors.Draining(), errors.NoLeader(ShardId(1)), errors.OutcomeUncertain()])
async def test_what_a_leader_refuses_because_it_goes_is_taken_to_the_next(
    three: Several, refusal: errors.DomainError
) -> None:
    a, b, c = three.nodes
    b.commands.failure = refusal

    async def move() -> None:
        await waiting.until(lambda: a.peer_calls >= 2)
        three.lead(c, 1)

    async with asyncio.TaskGroup() as group:
        group.create_task(move())
        assert (await submit(a, a_task(task_ids(1, 1)[0]))).created


async def test_the_node_itself_tries_again_what_it_can_no_longer_do(three: Several) -> None:
    a, b, _ = three.nodes
    a.commands.failure = errors.Draining()
    async with asyncio.TaskGroup() as group:
        submitting = group.create_task(submit(a, a_task(task_ids(0, 1)[0])))
        await asyncio.wait((submitting,), timeout=0.1)
        three.lead(b, 0)
        assert (await submitting).created


async def test_the_last_node_that_drains_says_so_at_once() -> None:
    async with several(1) as nodes:
        [a] = nodes.nodes
        nodes.lead(a, 0)
        a.commands.failure = errors.Draining()
        assert (await refused(a, task_ids(0, 1)[0], LONG)).reason == "DRAINING"


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (errors.StoreFailed("away"), "STORE_UNAVAILABLE"),
        (errors.Overloaded("submissions"), "OVERLOADED"),
        (errors.InvariantViolated("id7"), "INVARIANT_VIOLATED"),
    ],
)
async def test_a_refusal_of_the_leader_that_is_no_matter_of_leading_is_relayed_at_once(
    three: Several, failure: errors.DomainError, reason: str
) -> None:
    a, b, _ = three.nodes
    b.commands.failure = failure
    found = await refused(a, task_ids(1, 1)[0], LONG)
    assert found.reason == reason
    assert a.peer_calls == 1
    assert found.metadata == ({"error_id": "id7"} if reason == "INVARIANT_VIOLATED" else {})
    assert (found.retry_after is not None) == (reason != "INVARIANT_VIOLATED")


async def test_a_lost_answer_makes_the_last_word_uncertain_whatever_follows(three: Several) -> None:
    a, b, _ = three.nodes
    b.commands.loses = True
    found = await refused(a, task_ids(1, 1)[0], 1)
    assert (found.code, found.reason) == (UNAVAILABLE, "OUTCOME_UNCERTAIN")

    async def fail_from_now_on() -> None:
        b.commands.failure = errors.StoreFailed("away")

    b.commands.wait = fail_from_now_on
    found = await refused(a, task_ids(1, 2)[1], LONG)
    assert (found.code, found.reason) == (UNAVAILABLE, "OUTCOME_UNCERTAIN")


async def test_a_cancellation_without_a_request_id_is_one_cancellation_however_often_it_is_tried(
    three: Several,
) -> None:
    a, b, _ = three.nodes
    [task_id] = task_ids(1, 1)
    await submit(a, a_task(task_id))
    b.commands.loses = True

    async def lose_once() -> None:
        if b.commands.cancel_waits:
            b.commands.loses = False

    b.commands.wait = lose_once
    response = await cancel(a, task_id)
    assert len(b.commands.cancel_waits) == 2
    assert response.result == task_service_pb2.CANCEL_RESULT_PREVENTED, "not ALREADY_FINISHED, by itself"


async def test_only_the_items_whose_leader_is_missing_fail(three: Several) -> None:
    three.lead(None, 3)
    tasks = [a_task(task_ids(shard, 1)[0]) for shard in range(4)]
    response = await submit_several(three.nodes[0], tasks, 1)
    assert reasons(response) == ["", "", "", "NO_LEADER"]
    assert response.results[3].error.HasField("retry_delay")


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_the_answers_are_true(three: Several, seed: int) -> None:
    source = random.Random(f"routing {seed}")
    moods = [None, None, errors.OutcomeUncertain(), errors.StoreFailed("away"), errors.Overloaded("x")]
    over = asyncio.Event()

    def mood_of(node: SmallNode) -> errors.DomainError | None:
        node.commands.loses = source.random() < 0.3
        return source.choice(moods)

    async def confuse() -> None:
        """Move shards, and have nodes believe what is not so."""
        while not over.is_set():
            node = source.choice([*three.nodes, None])
            three.lead(node, source.randrange(SHARDS))
            deceived = source.choice(three.nodes)
            deceived.view.leaders[ShardId(source.randrange(SHARDS))] = source.choice("abcz")
            deceived.view.tell()
            await SystemClock().sleep(source.randrange(30 * bounds.MILLISECOND))

    async def ask(node: SmallNode, names: list[str]) -> list[tuple[str, str]]:
        request = task_service_pb2.SubmitTasksRequest(tasks=map(a_task, names))
        try:
            response = await node.tasks.SubmitTasks(request, timeout=1)
        except aio.AioRpcError as error:
            if error.code() is not DEADLINE_EXCEEDED:
                raise
            return [(name, NO_ANSWER) for name in names]
        return list(zip(names, reasons(response), strict=True))

    for node in three.nodes:
        node.commands.mood = partial(mood_of, node)
    async with asyncio.TaskGroup() as group:
        group.create_task(confuse())
        calls = [
            group.create_task(ask(source.choice(three.nodes), [f"{number}-{item}" for item in range(8)]))
            for number in range(60)
        ]
        await asyncio.wait(calls)
        over.set()
    told_by = Counter(reason for call in calls for _, reason in call.result())
    stored = {key.task_id for key in three.shelf.tasks}
    for call in calls:
        for name, reason in call.result():
            if reason == "":
                assert name in stored, "acknowledged and lost"
            elif reason not in ("OUTCOME_UNCERTAIN", NO_ANSWER):
                assert name not in stored, f"{reason} says that surely nothing was applied"
    assert told_by[""], told_by
    assert told_by.keys() >= {"OUTCOME_UNCERTAIN", "STORE_UNAVAILABLE", "OVERLOADED"}, told_by


# Networks.


async def test_a_leader_that_cannot_be_reached_is_named_to_the_caller(three: Several) -> None:
    a, b, c = three.nodes
    three.introduce(a.member(), b.member(peer_address="127.0.0.1:1"), c.member())
    found = await refused(a, task_ids(1, 1)[0], 1)
    assert (found.code, found.reason) == (UNAVAILABLE, "NOT_SHARD_LEADER")
    assert found.metadata["leader"] == b.address
    assert set(a.metrics.peer_calls) == {"not there"}


async def test_an_answer_that_is_lost_on_its_way_is_asked_for_again(three: Several) -> None:
    a, b, c = three.nodes
    async with TcpProxy("127.0.0.1", b.peer_port, Http2) as proxy:
        three.introduce(a.member(), b.member(peer_address=f"127.0.0.1:{proxy.port}"), c.member())
        proxy.lose_answer(1)
        submitted = await submit(a, a_task(task_ids(1, 1)[0]))
        assert proxy.faults["answer lost"] == 1
    assert not submitted.created
    assert a.metrics.peer_calls == {"lost": 1, "answered": 1}
    assert len(three.shelf.tasks) == 1


async def test_a_peer_that_falls_silent_leaves_the_outcome_open_and_others_alone(three: Several) -> None:
    a, b, c = three.nodes
    async with TcpProxy("127.0.0.1", b.peer_port, Http2) as proxy:
        three.introduce(a.member(), b.member(peer_address=f"127.0.0.1:{proxy.port}"), c.member())
        await submit(a, a_task(task_ids(1, 1)[0]))
        proxy.cut()
        tasks = [a_task(task_ids(shard, 2)[1]) for shard in range(4)]
        response = await submit_several(a, tasks, 2)
        assert reasons(response) == ["", "OUTCOME_UNCERTAIN", "", ""]
        assert proxy.faults["cut"]


async def test_a_request_that_a_silent_leader_has_is_answered_by_its_successor(three: Several) -> None:
    a, b, c = three.nodes
    async with TcpProxy("127.0.0.1", b.peer_port, Http2) as proxy:
        three.introduce(a.member(), b.member(peer_address=f"127.0.0.1:{proxy.port}"), c.member())
        await submit(a, a_task(task_ids(1, 1)[0]))
        proxy.cut()
        async with asyncio.TaskGroup() as group:
            submitting = group.create_task(submit(a, a_task(task_ids(1, 2)[1])))
            await waiting.until(lambda: proxy.faults["cut"])
            three.lead(c, 1)
            assert (await submitting).created


# Bounds.


async def test_calls_to_one_node_are_bounded_and_refused_above(three: Several) -> None:
    a, b, _ = three.nodes
    release = asyncio.Event()
    b.commands.wait = release.wait
    peers = Peers(a.view, a.metrics, max_calls=2)
    request = task_service_pb2.SubmitTaskRequest(task=a_task(task_ids(1, 1)[0]))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(peers.call(b.peer_address, "SubmitTask", request, LONG))
            await waiting.until(lambda: len(b.surfaces.peer.calls._limits) == 2)  # type: ignore[union-attr]
            with pytest.raises(errors.Overloaded):
                await peers.call(b.peer_address, "SubmitTask", request, LONG)
            release.set()
        assert a.metrics.admission_refusals == {"calls to another node": 1}
    finally:
        await peers.close()


async def test_requests_that_wait_for_others_are_bounded_in_bytes(
    three: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_FORWARDED_BYTES", 1_000)
    a = three.nodes[0]
    with pytest.raises(aio.AioRpcError) as caught:
        await submit(a, a_task(task_ids(1, 1)[0], payload=bytes(1_000)))
    found = told(caught.value)
    assert (found.code, found.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert a.peer_calls == 0
    assert (await submit(a, a_task(task_ids(0, 1)[0], payload=bytes(1_000)))).created, "what it leads needs no room"
    assert (await submit(a, a_task(task_ids(1, 1)[0]))).created


async def test_the_way_to_a_node_that_has_left_is_closed(three: Several) -> None:
    a, b, c = three.nodes
    peers = Peers(a.view, a.metrics)
    request = task_service_pb2.SubmitTaskRequest(task=a_task(task_ids(1, 1)[0]))
    try:
        await peers.call(b.peer_address, "SubmitTask", request, LONG)
        three.introduce(a.member(), c.member())
        with pytest.raises(NotThere):
            await peers.call(c.peer_address, "SubmitTask", request, LONG)
        assert list(peers._peers) == [c.peer_address]
    finally:
        await peers.close()


async def test_nothing_of_a_refusal_is_left_to_the_garbage_collector(three: Several) -> None:
    """Else the refusals of an outage, each with its request and all its tries, would pile up until it pauses the node.

    So of what nobody leads, and of what another node was asked for that does not lead it after all.
    """
    a, b, c = three.nodes
    [led_by_none] = task_ids(1, 1)
    [passed_on] = task_ids(3, 1)
    for node in (a, b, c):
        del node.view.leaders[ShardId(1)]
    del c.loop.shards[ShardId(3)]
    with none_left(errors.DomainError):
        for task_id in (led_by_none, passed_on):
            await refused(a, task_id, 0.5)
            with pytest.raises(aio.AioRpcError):
                await a.tasks.CancelTask(task_service_pb2.CancelTaskRequest(task_id=task_id), timeout=0.5)
    assert c.metrics.rpc_requests
