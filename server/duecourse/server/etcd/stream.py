"""One stream to etcd, with one way for it to end: `StreamBroken`.

gRPC has several: a status, `EOF`, `InvalidStateError` from writing to a stream that has ended, and silence.
"""

import asyncio
from typing import Generic, cast

from google.protobuf.message import Message
from grpc import aio

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.etcd.endpoints import Answer
from duecourse.server.etcd.errors import StreamBroken


class Stream(Generic[Answer]):
    """Sends and receives messages, each within a time."""

    def __init__(self, call: aio.StreamStreamCall[Message, Answer]) -> None:
        self._call = call

    async def send(self, message: Message, within: Micros) -> None:
        """Send a message. Raises StreamBroken."""
        try:
            async with asyncio.timeout(within / bounds.SECOND):
                await self._call.write(message)
        except TimeoutError:
            raise StreamBroken("nothing could be sent in time", silent=True) from None
        except asyncio.InvalidStateError:
            raise StreamBroken("the stream has ended") from None
        except aio.AioRpcError as error:
            raise broken(error) from None

    async def receive(self, within: Micros) -> Answer:
        """Wait for the next message. Raises StreamBroken."""
        try:
            async with asyncio.timeout(within / bounds.SECOND):
                message = await self._call.read()
        except TimeoutError:
            raise StreamBroken("nothing came in time", silent=True) from None
        except asyncio.InvalidStateError:
            raise StreamBroken("the stream has ended") from None
        except aio.AioRpcError as error:
            raise broken(error) from None
        if message is aio.EOF:
            raise StreamBroken("the stream was ended")
        return cast(Answer, message)

    def cancel(self) -> None:
        """End it."""
        self._call.cancel()


def broken(error: aio.AioRpcError) -> StreamBroken:
    """Say why a stream is over."""
    return StreamBroken(f"{error.code().name}: {error.details()}")
