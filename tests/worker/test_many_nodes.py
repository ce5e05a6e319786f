"""A worker and several nodes, each with a real room of streams: who is connected to whom, and at which address."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
from streams.node_side import Node
from worker.test_worker import a_worker, running, until

from duecourse.model import bounds
from duecourse.server.rpc.calls import Calls
from duecourse.server.rpc.worker_service import WorkerService
from duecourse.timing.clock import SystemClock
from duecourse.v1 import worker_service_pb2_grpc
from duecourse.worker import Worker

NOWHERE = "127.0.0.1:1"


class Served:
    """A node that listens on two ports."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.node = Node(node_id=node_id)
        self.addresses: list[str] = []
        self.server = grpc.aio.server()
        service = WorkerService(self.node.hub, self.node.port, Calls(self.node.metrics))
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(service, self.server)

    async def start(self) -> None:
        self.addresses = [f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}" for _ in range(2)]
        await self.server.start()

    async def stop(self) -> None:
        self.node.hub.close()
        await self.server.stop(0.2)

    @property
    def streams(self) -> list[int]:
        """Return the streams that workers have introduced themselves on, in the order in which they came."""
        return [holder.stream_id for holder in self.node.port.subscribed]

    @property
    def credit(self) -> int:
        return sum(self.node.port.credits.values())


@asynccontextmanager
async def serving(*names: str) -> AsyncIterator[list[Served]]:
    """Serve nodes that are not told of each other yet."""
    served = [Served(name) for name in names]
    async with AsyncExitStack() as stack:
        for one in served:
            await one.start()
            stack.push_async_callback(one.stop)
        yield served


def tell(nodes: list[Served], **addresses: str) -> None:
    """Tell nodes which nodes there are: those, and all of `addresses` in place of theirs or beside them."""
    for one in nodes:
        one.node.view.become(**{**{other.node_id: other.addresses[0] for other in nodes}, **addresses})


async def settles(worker: Worker, *connected: str) -> None:
    """Wait until a worker is connected to just these nodes, and see that it stays so."""
    clock = SystemClock()

    def is_settled() -> bool:
        return sorted(one.node_id for one in worker.health().nodes if one.is_connected) == sorted(connected)

    await until(is_settled)
    for _ in range(15):
        await clock.sleep(100 * bounds.MILLISECOND)
        assert is_settled(), worker.health()


async def test_one_address_is_enough_to_find_all_nodes() -> None:
    async with serving("n1", "n2", "n3") as nodes:
        tell(nodes)
        worker = a_worker(nodes[0].addresses[0])
        async with running(worker):
            await settles(worker, "n1", "n2", "n3")
            assert worker.health().missing == ()
            assert [len(one.streams) for one in nodes] == [1, 1, 1]
            assert sum(one.credit for one in nodes) == 4


async def test_a_node_that_is_reached_at_two_addresses_has_one_stream() -> None:
    async with serving("n1", "n2") as nodes:
        tell(nodes)
        # The seeds are not what the cluster knows the nodes by, and two of them lead to one node.
        worker = a_worker(nodes[0].addresses[1], nodes[1].addresses[1], nodes[0].addresses[0])
        async with running(worker):
            await settles(worker, "n1", "n2")
            assert [len(one.streams) for one in nodes] == [1, 1]
            before = [list(one.streams) for one in nodes]
            await settles(worker, "n1", "n2")
            assert [list(one.streams) for one in nodes] == before


async def test_a_stream_that_works_is_not_hurt_by_a_seed_that_comes_to_the_same_node_later() -> None:
    async with serving("n1") as nodes:
        (node,) = nodes
        worker = a_worker(*node.addresses)
        async with running(worker):
            await settles(worker, "n1")
            assert len(node.streams) == 1
            assert node.credit == 4


async def test_another_address_of_a_node_is_used_when_the_first_one_fails() -> None:
    async with serving("n1") as nodes:
        (node,) = nodes
        tell(nodes)
        worker = a_worker(node.addresses[1])
        async with running(worker):
            await settles(worker, "n1")
            first = node.streams
            node.node.end_streams()
            await until(lambda: bool(node.streams) and node.streams != first)
            await settles(worker, "n1")
            assert len(node.streams) == 1


async def test_an_address_that_cannot_be_reached_hurts_nobody_and_is_named() -> None:
    async with serving("n1", "n2") as nodes:
        tell(nodes, n2=NOWHERE, n3=NOWHERE)
        worker = a_worker(nodes[0].addresses[0], nodes[1].addresses[0])
        async with running(worker):
            await settles(worker, "n1", "n2")
            assert worker.health().missing == ("n3",)
            assert worker.health().is_ready


async def test_a_node_that_is_gone_is_dialled_no_more_and_one_that_comes_is_found() -> None:
    async with serving("n1", "n2", "n3") as nodes:
        tell(nodes[:2])
        worker = a_worker(nodes[0].addresses[0])
        async with running(worker):
            await settles(worker, "n1", "n2")
            await nodes[1].stop()
            await until(lambda: worker.health().missing == ("n2",))
            tell([nodes[0], nodes[2]])
            await settles(worker, "n1", "n3")
            async with asyncio.timeout(20):
                await until(lambda: len(worker.health().nodes) == 2)
            assert worker.health().missing == ()


async def test_addresses_that_make_no_sense_hurt_nobody() -> None:
    async with serving("n1") as nodes:
        (node,) = nodes
        nonsense = {
            f"x{number}": address for number, address in enumerate(["::::", "not an address", "dns:///", "\x01"])
        }
        tell(nodes, **nonsense)
        worker = a_worker(node.addresses[0])
        async with running(worker):
            await settles(worker, "n1")
            assert set(worker.health().missing) == set(nonsense)
            assert node.credit == 4
