"""Who leads which shard, as far as this worker was told: each shard's highest epoch and the stream to its leader."""

from dataclasses import dataclass

from duecourse.model.instants import Micros
from duecourse.worker.attempt import Attempt
from duecourse.worker.node_stream import NodeStream


@dataclass(slots=True)
class _Term:
    epoch: int
    stream: NodeStream | None
    """To the leader, while it is connected."""


class Terms:
    """The highest epochs, which are never forgotten, and what leaders have renewed."""

    def __init__(self) -> None:
        self._terms: dict[int, _Term] = {}

    def learn(self, shard: int, epoch: int, stream: NodeStream) -> None:
        """Remember that the node of `stream` leads a shard; no higher epoch is known."""
        term = self._terms.setdefault(shard, _Term(epoch, stream))
        term.epoch, term.stream = epoch, stream

    def ended(self, shard: int, epoch: int) -> None:
        """Note that a term of a shard is over, as are those before it."""
        term = self._terms.setdefault(shard, _Term(epoch, None))
        if term.epoch <= epoch:
            term.epoch, term.stream = epoch, None

    def highest(self, shard: int) -> int:
        """Return the highest epoch known of a shard, 0 for none."""
        term = self._terms.get(shard)
        return 0 if term is None else term.epoch

    def leader(self, shard: int) -> NodeStream | None:
        """Return the stream to a shard's leader, if it is connected."""
        term = self._terms.get(shard)
        return None if term is None else term.stream

    def closed(self, stream: NodeStream) -> None:
        """Forget a stream that has ended, but none of the epochs."""
        for term in self._terms.values():
            if term.stream is stream:
                term.stream = None

    def counts_from(self, attempt: Attempt) -> Micros:
        """Tell when a lease's time began, by its assignment and by what the shard's leader has renewed since."""
        term = self._terms.get(attempt.shard)
        renewed = None if term is None or term.stream is None else term.stream.renewed_at(attempt.token)
        return attempt.counts_from if renewed is None else max(attempt.counts_from, renewed)
