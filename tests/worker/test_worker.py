"""A worker over gRPC, against a node that the test plays."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from services.scripted_node import NodeSide, ScriptedNode, assignment, scripted_node, token_of

from duecourse.timing.clock import SystemClock
from duecourse.v1 import worker_service_pb2 as pb
from duecourse.worker import NonRetryable, TaskContext, Worker


@pytest.fixture
async def node() -> AsyncIterator[ScriptedNode]:
    async with scripted_node() as node:
        yield node


@asynccontextmanager
async def running(worker: Worker, *, stops: bool = True) -> AsyncIterator[None]:
    """Run a worker for as long as the block lasts."""
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(worker.run(handle_signals=False))
        yield
        if stops:
            worker.stop()


def a_worker(*addresses: str, slots: int = 4, prefetch: int = 0, grace: float = 20) -> Worker:
    """Return a worker with a handler for notes that returns their payload."""
    worker = Worker(addresses, slots=slots, prefetch=prefetch, name="tester", grace=timedelta(seconds=grace))

    @worker.task("note")
    async def note(context: TaskContext) -> bytes:
        return context.payload

    return worker


async def until(condition: Callable[[], bool]) -> None:
    """Look again and again until a condition holds."""
    clock = SystemClock()
    async with asyncio.timeout(20):
        while not condition():
            await clock.sleep(10_000)


class TestWork:
    async def test_a_task_comes_runs_and_is_recorded(self, node: ScriptedNode) -> None:
        async with running(a_worker(node.address)):
            side = await node.side(1)
            (hello,) = side.all("hello")
            assert (hello.worker, list(hello.queues), list(hello.task_types)) == ("tester", ["default"], ["note"])
            assert len(hello.incarnation) >= 16
            await side.heard("credit")
            await side.assign(assignment("t1", payload=b"1"), assignment("t2", payload=b"2"))
            await side.until(lambda side: len(side.ids("succeeded")) == 2)
            results = {one.attempt.task_id: one.result for batch in side.all("succeeded") for one in batch.attempts}
            assert results == {"t1": b"1", "t2": b"2"}
            await side.until(lambda side: sum(one.delta for one in side.all("credit")) == 6)
        assert [message.number for message in side.said] == list(range(1, len(side.said) + 1))

    async def test_handlers_that_fail_say_how(self, node: ScriptedNode) -> None:
        worker = Worker(node.address)

        @worker.task("odd")
        async def odd(context: TaskContext) -> None:
            raise NonRetryable("no such thing")

        @worker.task("even")
        def even(context: TaskContext) -> None:
            raise KeyError("key")

        async with running(worker):
            side = await node.side(1)
            await side.heard("credit")
            await side.assign(assignment("t1", "odd"), assignment("t2", "even"))
            await side.until(lambda side: len(side.ids("failed")) == 2)
        failed = {one.attempt.task_id: one for batch in side.all("failed") for one in batch.attempts}
        assert failed["t1"].kind == pb.FAILURE_KIND_NON_RETRYABLE
        assert failed["t1"].failure.message == "no such thing"
        assert failed["t2"].kind == pb.FAILURE_KIND_RETRYABLE
        assert failed["t2"].failure.type == "KeyError"

    async def test_why_a_node_does_not_serve_is_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        refused = 0
        enough = asyncio.Event()

        async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal refused
            refused += 1
            if refused == 4:
                enough.set()
            writer.close()

        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            worker = Worker(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            worker.register("wait", wait_for_ever)
            async with running(worker), asyncio.timeout(20):
                await enough.wait()
        reasons = [vars(record)["reason"] for record in caplog.records if "does not serve" in record.message]
        assert reasons
        assert all(one != next_one for one, next_one in pairwise(reasons))

    async def test_a_running_handler_is_stopped_when_its_task_is_cancelled(self, node: ScriptedNode) -> None:
        worker = Worker(node.address)
        worker.register("wait", wait_for_ever)
        async with running(worker):
            side = await node.side(1)
            await side.heard("credit")
            await side.assign(assignment("t", "wait"))
            await side.say(cancel_requested=pb.CancelRequested(lease_tokens=[token_of("t")]))
            await side.heard("failed")
            assert side.all("failed")[0].attempts[0].kind == pb.FAILURE_KIND_CANCELLED

    async def test_an_attempt_out_of_time_is_stopped_by_the_worker_itself(self, node: ScriptedNode) -> None:
        worker = Worker(node.address)
        worker.register("wait", wait_for_ever)
        async with running(worker):
            side = await node.side(1)
            await side.heard("credit")
            await side.assign(assignment("t", "wait", seconds_left=0.3))
            await side.heard("failed")
            assert side.all("failed")[0].attempts[0].kind == pb.FAILURE_KIND_TIMED_OUT

    async def test_long_attempts_are_told_and_renewed_with_their_progress(self, node: ScriptedNode) -> None:
        worker = Worker(node.address)
        release = asyncio.Event()

        @worker.task("long")
        async def long(context: TaskContext) -> None:
            context.heartbeat("half")
            await release.wait()

        async with running(worker):
            side = await node.side(1)
            await side.heard("credit")
            await side.assign(assignment("t", "long"))
            await side.heard("started")
            await side.until(lambda side: any(beat.progress for beat in side.all("heartbeat")))
            assert side.all("heartbeat")[-1].lease_count == 1
            release.set()
            await side.heard("succeeded")

    async def test_what_two_nodes_have_out_never_exceeds_the_slots(self, node: ScriptedNode) -> None:
        async with scripted_node() as other, running(a_worker(node.address, other.address, slots=4)):
            sides = [await node.side(1), await other.side(1)]
            granted = 0

            def out(side: NodeSide) -> int:
                return sum(one.delta for one in side.all("credit"))

            async with asyncio.timeout(20):
                while min(out(side) for side in sides) < 1:
                    withdrawing = [side for side in sides if any(one.delta < 0 for one in side.all("credit"))]
                    for side in withdrawing:
                        taken = -min(one.delta for one in side.all("credit"))
                        await side.say(credit_returned=pb.CreditReturned(count=taken))
                        granted += taken
                    await sides[0].until(lambda side: True)
                    await SystemClock().sleep(20_000)
                    assert out(sides[0]) + out(sides[1]) <= 4
            assert granted


class TestReconnecting:
    async def test_a_stream_that_ends_with_ok_is_reopened(self, node: ScriptedNode) -> None:
        async with running(a_worker(node.address)):
            (await node.side(1)).end()
            side = await node.side(2)
            assert side.all("hello")[0].stream_number == 1
            assert side.all("hello")[0].incarnation == node.sides[0].all("hello")[0].incarnation

    async def test_five_resets_within_three_seconds_are_nothing(self, node: ScriptedNode) -> None:
        async with running(a_worker(node.address)):
            async with asyncio.timeout(20):
                for number in range(1, 6):
                    side = await node.side(number)
                    await side.heard("credit")
                    side.end()
            side = await node.side(6)
            await side.heard("credit")
            await side.assign(assignment("t"))
            await side.heard("succeeded")

    async def test_outcomes_without_a_verdict_are_sent_again(self, node: ScriptedNode) -> None:
        node.opened_with = lambda side: setattr(side, "records_outcomes", len(node.sides) > 0)
        async with running(a_worker(node.address)):
            first = await node.side(1)
            await first.heard("credit")
            await first.assign(assignment("t"))
            await first.heard("succeeded")
            first.end()
            second = await node.side(2)
            assert list(second.all("hello")[0].lease_tokens) == [token_of("t")]
            await second.heard("leases_held")
            await second.heard("succeeded")

    async def test_a_handler_that_ran_meanwhile_reports_on_the_new_stream(self, node: ScriptedNode) -> None:
        worker = Worker(node.address)
        release = asyncio.Event()

        @worker.task("long")
        async def long(context: TaskContext) -> None:
            await release.wait()

        async with running(worker):
            first = await node.side(1)
            await first.heard("credit")
            await first.assign(assignment("t", "long"))
            await until(lambda: worker.health().running == 1)
            first.end()
            second = await node.side(2)
            (held,) = await second.heard("leases_held")
            assert [(lease.task_id, lease.started) for lease in held.leases] == [("t", True)]
            release.set()
            await second.heard("succeeded")

    async def test_a_silent_stream_is_given_up(self, node: ScriptedNode) -> None:
        node.opened_with = lambda side: setattr(side, "beats", len(node.sides) > 0)
        async with running(a_worker(node.address)):
            first = await node.side(1)
            await node.side(2)
            await until(lambda: first.is_over)

    async def test_a_node_that_reads_no_more_is_given_up(self, node: ScriptedNode) -> None:
        worker = Worker(node.address, slots=64)

        @worker.task("large")
        async def large(context: TaskContext) -> bytes:
            return bytes(128 * 1024)

        async with running(worker):
            first = await node.side(1)
            await first.heard("credit")
            first.reads = False
            await first.assign(*[assignment(f"t{i}", "large") for i in range(64)])
            second = await node.side(2)
            await second.until(lambda side: len({*first.ids("succeeded"), *side.ids("succeeded")}) == 64)
            assert len(second.ids("succeeded")) > 0

    async def test_a_node_that_comes_later_or_again_is_found(self) -> None:
        async with scripted_node() as node:
            port = node.port
        worker = a_worker(f"127.0.0.1:{port}")
        async with running(worker):
            await until(lambda: len(worker.health().nodes) == 1)
            assert not worker.health().is_ready
            for _ in range(2):
                async with scripted_node(port=port) as node:
                    side = await node.side(1)
                    await side.heard("credit")
                    await until(lambda: worker.health().is_ready)
                await until(lambda: not worker.health().is_ready)
            async with scripted_node(port=port) as node:
                await node.side(1)

    async def test_a_node_that_breaks_the_protocol_loses_the_stream_and_nothing_else(self, node: ScriptedNode) -> None:
        async with running(a_worker(node.address)):
            first = await node.side(1)
            await first.heard("credit")
            first.assigned = 5
            await first.assign(assignment("t"))
            second = await node.side(2)
            await second.heard("credit")
            await second.assign(assignment("t"))
            await second.heard("succeeded")


class TestStopping:
    async def test_running_handlers_end_and_what_waits_is_returned(self, node: ScriptedNode) -> None:
        worker = Worker(node.address, slots=1, prefetch=1)
        release = asyncio.Event()

        @worker.task("long")
        async def long(context: TaskContext) -> None:
            await release.wait()

        async with running(worker):
            side = await node.side(1)
            await side.heard("credit")
            await side.assign(assignment("t1", "long"), assignment("t2", "long"))
            await until(lambda: (worker.health().running, worker.health().waiting) == (1, 1))
            worker.stop()
            await side.heard("goodbye")
            await side.until(lambda side: side.ids("returned") == ["t2"])
            beats = len(side.all("heartbeat"))
            await side.heard("heartbeat", beats + 1)
            release.set()
        assert side.ids("succeeded") == ["t1"]
        assert not worker.health().is_alive

    async def test_handlers_that_outlast_the_grace_are_asked_to_stop(self, node: ScriptedNode) -> None:
        worker = Worker(node.address, grace=timedelta(milliseconds=100))
        worker.register("wait", wait_for_ever)
        async with running(worker):
            side = await node.side(1)
            await side.heard("credit")
            await side.assign(assignment("t", "wait"))
            await until(lambda: worker.health().running == 1)
        assert side.all("failed")[0].attempts[0].kind == pb.FAILURE_KIND_RETRYABLE
        assert side.all("failed")[0].attempts[0].failure.type == "Stopped"

    async def test_a_thread_that_ignores_it_does_not_keep_the_worker(self, node: ScriptedNode) -> None:
        worker = Worker(node.address, grace=timedelta(milliseconds=100))
        release = threading.Event()
        worker.register("hang", lambda context: release.wait(60))
        async with running(worker):
            side = await node.side(1)
            await side.heard("credit")
            await side.assign(assignment("t", "hang"))
            await until(lambda: worker.health().running == 1)
        assert side.ids("succeeded") == []
        release.set()

    async def test_it_waits_for_a_node_to_record_the_last_outcome(self, node: ScriptedNode) -> None:
        node.opened_with = lambda side: setattr(side, "records_outcomes", len(node.sides) > 0)
        worker = a_worker(node.address)
        async with running(worker):
            first = await node.side(1)
            await first.heard("credit")
            await first.assign(assignment("t"))
            await first.heard("succeeded")
            worker.stop()
            await first.heard("heartbeat", len(first.all("heartbeat")) + 2)
            assert worker.health().is_alive
            await first.say(outcomes_recorded=pb.OutcomesRecorded(recorded=[token_of("t")]))
        assert len(node.sides) == 1

    async def test_sigterm_stops_it_in_good_order(self, node: ScriptedNode) -> None:
        worker = a_worker(node.address)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            side = await node.side(1)
            await side.heard("credit")
            os.kill(os.getpid(), signal.SIGTERM)
            await side.heard("goodbye")

    async def test_a_second_signal_ends_the_process_at_once(self, node: ScriptedNode) -> None:
        script = STUBBORN.format(address=node.address)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
        try:
            side = await node.side(1)
            await side.heard("credit")
            await side.assign(assignment("t", "hang"))
            await side.heard("started")
            process.send_signal(signal.SIGTERM)
            await side.heard("goodbye")
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                assert await process.wait() == -signal.SIGTERM
        finally:
            if process.returncode is None:
                process.kill()


class TestHealth:
    async def test_it_tells_of_every_node(self, node: ScriptedNode) -> None:
        worker = a_worker(node.address, "127.0.0.1:1")
        assert not worker.health().is_alive
        before = datetime.fromtimestamp(SystemClock().now().earliest / 1e6, UTC) - timedelta(seconds=1)
        async with running(worker):
            side = await node.side(1)
            await side.heard("credit")
            await until(lambda: worker.health().is_ready)
            health = worker.health()
            assert health.is_alive
            assert [(one.address, one.is_connected, one.is_serving) for one in health.nodes] == [
                (node.address, True, True),
                ("127.0.0.1:1", False, False),
            ]
            assert all(one.since >= before for one in health.nodes)
            await side.say(draining=pb.Draining())
            await until(lambda: not worker.health().is_ready)
            assert worker.health().nodes[0].is_connected


class TestSettings:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"addresses": ()}, "at least one node"),
            ({"queues": ()}, "queues"),
            ({"queues": ("a b",)}, "queue 'a b'"),
            ({"namespace": ""}, "namespace"),
            ({"name": "x" * 256}, "name"),
            ({"slots": 0}, "slots"),
            ({"slots": 8_000, "prefetch": 8_000}, "8192"),
            ({"threads": 0}, "threads"),
            ({"grace": timedelta(seconds=-1)}, "grace"),
        ],
    )
    def test_wrong_ones_are_refused_at_once(self, wrong: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Worker(**{"addresses": "localhost:7400", **wrong})  # type: ignore[arg-type]

    async def test_a_worker_needs_a_handler_and_runs_once(self, node: ScriptedNode) -> None:
        with pytest.raises(ValueError, match="handlers"):
            await Worker(node.address).run()
        worker = a_worker(node.address)
        async with running(worker):
            await node.side(1)
            with pytest.raises(RuntimeError, match="already"):
                await worker.run()

    def test_handlers_can_be_defined_without_grpc(self) -> None:
        script = (
            "import sys; from duecourse.worker import Worker; Worker('a:1').register('t', print);"
            "import duecourse.worker.runner; assert 'grpc' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


async def wait_for_ever(context: TaskContext) -> None:
    """Wait until it is cancelled."""
    await asyncio.Event().wait()


STUBBORN = """
import asyncio, threading
from duecourse.worker import Worker
worker = Worker("{address}")
worker.register("hang", lambda context: threading.Event().wait())
asyncio.run(worker.run())
"""
