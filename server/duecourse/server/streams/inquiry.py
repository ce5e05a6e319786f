"""What the node has asked a worker on one stream, which answers prove what, and how far the worker may count on leases.

- A list of leases proves absence only for a term that had been announced before the request that it answers; for a
  later term an assignment of the term before may still be on its way.
- The node names the last message that it had read before it began a check of its terms which then succeeded. While a
  heartbeat's digest differs from the ledger, nothing was renewed, so no message from that one on is named.
"""

from collections.abc import Iterable

from duecourse.server.core.task import Epoch, ShardId


class Inquiry:
    """See the module's docstring."""

    __slots__ = ("_announced", "_answered", "_checking", "_disagreed_at", "confirmed", "requested")

    def __init__(self) -> None:
        self.requested = 0
        """The number of the last request; 0 is what follows Welcome by itself."""
        self.confirmed = 0
        """The number of the message that heartbeats name."""
        self._answered = 0
        self._announced: dict[ShardId, tuple[Epoch, int]] = {}
        """By shard: the epoch of its latest term that the worker was told of, and the request that told it."""
        self._disagreed_at: int | None = None
        self._checking = 0

    def welcome(self, terms: Iterable[tuple[ShardId, Epoch]]) -> None:
        """Note the terms that Welcome tells."""
        for shard, epoch in terms:
            self._announced[shard] = (epoch, 0)

    def announce(self, terms: Iterable[tuple[ShardId, Epoch]]) -> int:
        """Note terms that are being announced; returns the request's number."""
        self.requested += 1
        for shard, epoch in terms:
            self._announced[shard] = (epoch, self.requested)
        return self.requested

    def ended(self, shard: ShardId, epoch: Epoch) -> None:
        """Note that the worker is told that a term is over."""
        told = self._announced.get(shard)
        if told is not None and told[0] <= epoch:
            del self._announced[shard]

    def is_known_to_lead(self, shard: ShardId) -> bool:
        """Tell whether the worker had heard, when it last listed what it holds, that this node leads a shard."""
        told = self._announced.get(shard)
        return told is not None and told[1] <= self._answered

    def ask(self) -> int | None:
        """Return the number of a new request; None if an answer is awaited already."""
        if self.requested > self._answered:
            return None
        self.requested += 1
        return self.requested

    def answered(self, request: int) -> None:
        """Note that the worker has listed what it holds, in answer to a request."""
        self._answered = max(self._answered, request)

    def proves_absence(self, shard: ShardId, epoch: Epoch, request: int) -> bool:
        """Tell whether what an answer to a request does not list is absent, for a term of a shard."""
        told = self._announced.get(shard)
        return told is not None and told[0] == epoch and told[1] <= request

    def agreed(self) -> None:
        """Note that the worker holds what it should, or has said what it holds."""
        self._disagreed_at = None

    def disagreed(self, number: int) -> None:
        """Note that a message of the worker, a heartbeat, differs from the ledger."""
        if self._disagreed_at is None:
            self._disagreed_at = number

    def check_began(self, last_read: int) -> None:
        """Remember what was read when the node began to check its terms."""
        self._checking = last_read if self._disagreed_at is None else self._disagreed_at - 1

    def check_succeeded(self) -> None:
        """Take in that the terms stood after what had been read then."""
        self.confirmed = self._checking
