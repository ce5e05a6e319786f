"""Which nodes there are, and at which addresses a worker keeps streams to them: one to each node, never two.

A worker begins with addresses that it was given, its seeds, and learns from each node of all others (ClusterChanged).
One node can have several addresses: a seed may be a name that leads to it, or to any of several. Only Welcome tells
which node is at the other end, or the refusal of a second stream, so that:

- An address is wanted unless its node is served by a stream at another address. A seed of which it is not known where
  it leads is always wanted.
- A node is one that any node we have a stream to lists: the list of one that is cut off from the others adds no more
  than futile dials. While we have no stream at all, the nodes that were listed last count.
- Streams to a node are numbered, the higher one wins. Only at the address that the cluster knows a node by does a
  stream have the node's next number. Any other may lead elsewhere than before, so that a stream says 0 and never ends
  one that works; a refusal names the node, and if no other stream to it is ours, the next one there has its number.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from duecourse.v1 import worker_service_pb2 as pb
from duecourse.worker.node_stream import NodeStream

UNKNOWN: Final = 0
"""The number of a stream to whichever node is at an address."""
_HOST_AND_PORT: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
"""What a node may be known by. gRPC takes more for an address, and with some of it the process hangs at its end."""


class Reach:
    """See the module's docstring. `streams` are the open ones by address."""

    def __init__(self, streams: Mapping[str, NodeStream]) -> None:
        self.members: dict[str, str] = {}
        """The cluster's nodes: their addresses by name. Empty as long as no node has told."""
        self._streams = streams
        self._lists: dict[int, dict[str, str]] = {}
        """By the serial of a stream: what its node has listed, the latest last."""
        self._leads_to: dict[str, str] = {}
        """By address: the node that was last found there."""
        self._refused: dict[str, str] = {}
        """By address: the node that refused the last stream there, for another one of ours."""
        self._numbers: dict[str, int] = {}
        """By node: the highest number of a stream to it."""

    def number(self, address: str) -> int:
        """Return the number of the next stream that is opened at an address."""
        node_id = self._refused.get(address) or self._listed_at(address)
        if not node_id and not self.members:
            node_id = self._leads_to.get(address, "")
        if not node_id or self._is_served_elsewhere(node_id, address):
            return UNKNOWN
        number = self._numbers[node_id] = self._numbers.get(node_id, UNKNOWN) + 1
        return number

    def welcomed(self, stream: NodeStream, node_id: str) -> NodeStream | None:
        """Note which node is at the other end of a stream; return an older stream to it, which the node has ended."""
        stream.node_id = node_id
        if not node_id:
            return None
        self._leads_to[stream.address] = node_id
        self._refused.pop(stream.address, None)
        self._numbers[node_id] = max(self._numbers.get(node_id, UNKNOWN), stream.number)
        return next((one for one in self._streams.values() if one.node_id == node_id and one is not stream), None)

    def met(self, address: str, node_id: str) -> None:
        """Note that a node at an address has refused a stream, since we have another one to it or had until now."""
        self._leads_to[address] = self._refused[address] = node_id

    def listed(self, stream: NodeStream, nodes: Iterable[pb.WorkerNode]) -> None:
        """Take in a node's list of all nodes."""
        self._lists.pop(stream.serial, None)
        self._lists[stream.serial] = {node.node_id: node.address for node in nodes if node.node_id and node.address}
        self._merge()

    def closed(self, stream: NodeStream) -> None:
        """Forget the list of a stream that has ended, unless it is the last one."""
        if self._lists.pop(stream.serial, None) is not None and self._lists:
            self._merge()

    def node_at(self, address: str) -> str:
        """Return the name of the node at an address, as far as is known; else nothing."""
        return self._leads_to.get(address) or self._listed_at(address)

    def stream_at(self, address: str) -> NodeStream | None:
        """Return the stream to the node at an address, under whichever address it is reached."""
        stream = self._streams.get(address)
        if stream is None:
            # The cluster's word on an address counts more than what was found there once.
            stream = self._serving(self._listed_at(address) or self._leads_to.get(address, ""))
        return stream

    def wanted(self, seeds: Iterable[str]) -> list[str]:
        """Return the addresses at which there should be a stream."""
        wanted = {
            address: None
            for node_id, address in self.members.items()
            if _HOST_AND_PORT.fullmatch(address) and not self._is_served_elsewhere(node_id, address)
        }
        for seed in seeds:
            if not self._is_served_elsewhere(self._leads_to.get(seed, ""), seed):
                wanted[seed] = None
        return list(wanted)

    def missing(self) -> list[str]:
        """Return the names of nodes that there is no stream to."""
        return [node_id for node_id in self.members if self._serving(node_id) is None]

    def _listed_at(self, address: str) -> str:
        return next((node_id for node_id, at in self.members.items() if at == address), "")

    def _is_served_elsewhere(self, node_id: str, address: str) -> bool:
        stream = self._serving(node_id)
        return stream is not None and stream.address != address

    def _serving(self, node_id: str) -> NodeStream | None:
        if not node_id:
            return None
        return next((one for one in self._streams.values() if one.is_serving and one.node_id == node_id), None)

    def _merge(self) -> None:
        self.members = {node_id: address for nodes in self._lists.values() for node_id, address in nodes.items()}
