"""A name server that knows one name, whose address a test can change: `async with NameServer("127.0.0.1") as names`.

gRPC asks it for the targets that `target` returns. Its answers may be kept for no time at all.
"""

import asyncio
import struct
from types import TracebackType
from typing import Final, Self

NAME: Final = "node.test"

_HOST: Final = "127.0.0.1"
_HEAD: Final = struct.Struct("!6H")
_RECORD: Final = struct.Struct("!3HIH")
_IS_ANSWER: Final = 0x8400
_A: Final = 1
_INTERNET: Final = 1
_THE_NAME_ASKED_FOR: Final = 0xC000 + _HEAD.size


class NameServer(asyncio.DatagramProtocol):
    """See the module's docstring."""

    def __init__(self, leads_to: str) -> None:
        """Begin with the address that the name leads to."""
        self.leads_to = leads_to
        self.asked = 0
        """How often it was asked for the address."""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(_HOST, 0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._transport.close()

    def target(self, port: int) -> str:
        """Return what a client has to be given to find a port by the name."""
        _, own_port = self._transport.get_extra_info("sockname")
        return f"dns://{_HOST}:{own_port}/{NAME}:{port}"

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Answer a question; one for anything but an IPv4 address by saying that there is none."""
        number = int.from_bytes(data[:2], "big")
        end = data.index(b"\0", _HEAD.size) + 5
        question = data[_HEAD.size : end]
        is_known = int.from_bytes(question[-4:-2], "big") == _A
        answer = b""
        if is_known:
            self.asked += 1
            address = bytes(map(int, self.leads_to.split(".")))
            answer = _RECORD.pack(_THE_NAME_ASKED_FOR, _A, _INTERNET, 0, len(address)) + address
        self._transport.sendto(_HEAD.pack(number, _IS_ANSWER, 1, is_known, 0, 0) + question + answer, addr)
