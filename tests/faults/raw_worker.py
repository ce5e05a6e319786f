"""A worker made of bare protocol messages, to do what no honest worker does."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import grpc

from duecourse.v1 import worker_service_pb2 as pb
from duecourse.v1 import worker_service_pb2_grpc

_Call = grpc.aio.StreamStreamCall[pb.StreamAssignmentsRequest, pb.StreamAssignmentsResponse]


class RawWorker:
    """One stream; nothing is said but what a test says, and nothing is read but what it asks for."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._number = 0

    @classmethod
    @asynccontextmanager
    async def connected(cls, address: str, *, credit: int, queue: str = "default") -> AsyncIterator[Self]:
        """Open a stream, introduce the worker and give credit."""
        async with grpc.aio.insecure_channel(address) as channel:
            worker = cls(worker_service_pb2_grpc.WorkerServiceStub(channel).StreamAssignments())
            await worker.say(
                hello=pb.Hello(
                    protocol_version=1,
                    namespace="default",
                    worker="raw",
                    incarnation=secrets.token_hex(16),
                    stream_number=1,
                    queues=[queue],
                    task_types=["work"],
                )
            )
            await worker.say(credit=pb.Credit(delta=credit))
            yield worker

    async def say(self, **event: Any) -> None:
        """Send one message."""
        self._number += 1
        await self._call.write(pb.StreamAssignmentsRequest(number=self._number, **event))

    async def hear(self, event: str) -> Any:
        """Read until there is a message of a kind, and return it."""
        while (message := await self._call.read()) is not grpc.aio.EOF:
            assert isinstance(message, pb.StreamAssignmentsResponse)
            if message.WhichOneof("event") == event:
                return getattr(message, event)
        raise AssertionError(f"the stream ended before {event}: {await self._call.code()}")

    async def assigned(self, count: int) -> list[pb.Assignment]:
        """Read until so many assignments have come."""
        assignments: list[pb.Assignment] = []
        while len(assignments) < count:
            assignments += (await self.hear("assignments")).assignments
        return assignments

    async def beat(self, assignments: list[pb.Assignment], last_assignments: int) -> None:
        """Say that the worker lives and holds these."""
        digest = 0
        for assignment in assignments:
            digest ^= int.from_bytes(assignment.lease_token[:8], "big")
        count = len(assignments)
        await self.say(
            heartbeat=pb.WorkerHeartbeat(last_assignments=last_assignments, lease_count=count, lease_digest=digest)
        )

    async def status(self) -> grpc.StatusCode:
        """Read until the node has ended the stream, and return how."""
        with suppress(grpc.aio.AioRpcError):
            while await self._call.read() is not grpc.aio.EOF:
                pass
        return await self._call.code()
