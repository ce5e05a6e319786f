"""The worker streams of this node: opens them, finds them for the loop, and watches over them.

All calls are made in the loop's thread and return at once. What concerns a stream that has ended is dropped, as its
worker will ask again on its next one; only assignments come back, since nobody else knows of them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.effects import Assignment, StopReason, Verdict
from duecourse.server.core.errors import Draining, Overloaded
from duecourse.server.core.lease import Holder, Lease
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.leadership import ClusterView
from duecourse.server.streams import Port, wire
from duecourse.server.streams.errors import StreamEnded
from duecourse.server.streams.worker_stream import Surroundings, WorkerStream
from duecourse.server.telemetry.metrics import Metrics

STREAMS: Final = "worker_streams"


class Hub:
    """See the module's docstring."""

    def __init__(
        self, port: Port, view: ClusterView, metrics: Metrics, *, node_id: str, heartbeat: Micros, max_streams: int
    ) -> None:
        self.wants_demands = False
        """Whether workers have credit on other nodes that they could move here."""
        self._port = port
        self._view = view
        self._metrics = metrics
        self._node_id = node_id
        self._heartbeat = heartbeat
        self._max_streams = max_streams
        self._around = Surroundings(port, metrics, node_id, heartbeat, self._join, self._left, self._cluster)
        self._streams: dict[int, WorkerStream] = {}
        self._workers: dict[tuple[str, str, str], WorkerStream] = {}
        self._last_id = 0
        self._last_tick: Micros | None = None
        self._is_draining = False
        self._nodes: Sequence[tuple[str, str]] = ()
        self._nodes_message: wire.Response | None = None
        view.subscribe(self._cluster_changed)
        self._cluster_changed()

    @property
    def streams(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    def open(self, wake: Callable[[], None]) -> WorkerStream:
        """Begin a stream; `wake` is called when it has something to send or has ended. Raises Overloaded, Draining."""
        if self._is_draining:
            raise Draining
        if len(self._streams) >= self._max_streams:
            self._metrics.admission_refusals[STREAMS] += 1
            raise Overloaded(STREAMS)
        self._last_id += 1
        stream = WorkerStream(self._around, self._last_id, self._port.elapsed(), wake)
        self._streams[self._last_id] = stream
        self._metrics.worker_streams = len(self._streams)
        return stream

    def last_read(self, holder: Holder) -> int:
        """Return the number of the last message read from a worker, for a grant that is made now."""
        stream = self._streams.get(holder.stream_id)
        return 0 if stream is None else stream.last_read

    def assign(self, assignments: Iterable[Assignment]) -> list[Lease]:
        """Send leases that are durable to their holders; returns those that surely will not leave the node."""
        unsent = []
        streams = self._streams
        for assignment in assignments:
            lease = assignment.lease
            holder = lease.holder
            stream = None if holder is None else streams.get(holder.stream_id)
            if stream is None or not stream.assign(assignment):
                unsent.append(lease)
        return unsent

    def verdicts(self, verdicts: Iterable[tuple[Holder, bytes, Verdict]]) -> None:
        """Tell workers what became of outcomes."""
        streams = self._streams
        for holder, token, verdict in verdicts:
            stream = streams.get(holder.stream_id)
            if stream is not None:
                stream.verdict(token, verdict)

    def stops(self, stops: Iterable[tuple[Holder, bytes, StopReason]]) -> None:
        """Ask workers to stop attempts."""
        tokens: dict[tuple[int, StopReason], list[bytes]] = {}
        for holder, token, reason in stops:
            tokens.setdefault((holder.stream_id, reason), []).append(token)
        for (stream_id, reason), of_stream in tokens.items():
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.stop(of_stream, reason)

    def lost(self, lost: Iterable[tuple[Holder, bytes]]) -> None:
        """Tell workers that leases are no longer theirs."""
        tokens: dict[int, list[bytes]] = {}
        for holder, token in lost:
            tokens.setdefault(holder.stream_id, []).append(token)
        for stream_id, of_stream in tokens.items():
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.lose(of_stream)

    def adopted(self, adopted: Iterable[tuple[Holder, bytes]]) -> None:
        """Expect leases of workers that have listed them."""
        for holder, token in adopted:
            stream = self._streams.get(holder.stream_id)
            if stream is not None:
                stream.adopted(token)

    def terms_started(self, terms: Sequence[tuple[ShardId, Epoch]]) -> None:
        """Tell every worker of terms that have begun and are loaded."""
        for stream in self._streams.values():
            stream.announce(terms)

    def term_ended(self, shard: ShardId, epoch: Epoch) -> None:
        """Tell every worker of a term that is over."""
        for stream in self._streams.values():
            stream.end_term(shard, epoch)

    def demands(self, demands: Iterable[tuple[Holder, int]]) -> None:
        """Tell workers how many tasks wait here for their credit."""
        for holder, waiting in demands:
            stream = self._streams.get(holder.stream_id)
            if stream is not None:
                stream.demand(waiting)

    def check_began(self) -> None:
        """Note that the node now asks the store whether its terms stand. One such check runs at a time."""
        for stream in self._streams.values():
            stream.check_began()

    def check_succeeded(self) -> None:
        """Note that every term that the node leads stood after the last check began."""
        for stream in self._streams.values():
            stream.check_succeeded()

    def tick(self, now: Micros) -> None:
        """Send heartbeats and end dead streams; to be called several times a heartbeat interval."""
        # A loop that did not run has heard nobody: that is not the workers' silence.
        allowed = min(bounds.LOOP_GAP, self._heartbeat // 2)
        gap = 0 if self._last_tick is None else max(0, now - self._last_tick - allowed)
        self._last_tick = now
        for stream in list(self._streams.values()):
            if gap:
                stream.excuse(gap)
            stream.tick(now)

    def drain(self) -> None:
        """Take no more streams, and tell every worker that the node drains."""
        self._is_draining = True
        for stream in self._streams.values():
            stream.drain()

    def close(self) -> None:
        """End all streams."""
        self._is_draining = True
        for stream in list(self._streams.values()):
            stream.end(Draining())

    def _join(self, stream: WorkerStream) -> None:
        assert stream.identity is not None
        older = self._workers.get(stream.identity)
        if older is not None:
            if older.stream_number >= stream.stream_number:
                raise StreamEnded("a newer stream of this worker is open", self._node_id)
            older.end(StreamEnded("a newer stream of this worker has replaced it", self._node_id))
        self._workers[stream.identity] = stream

    def _cluster(self) -> wire.Response | None:
        return self._nodes_message

    def _cluster_changed(self) -> None:
        """Tell every worker which nodes there are, if that is not what was told before."""
        nodes = [(member.node_id, member.address) for member in self._view.members() if member.address]
        self.wants_demands = len(nodes) > 1
        if not nodes or nodes == self._nodes:
            return
        self._nodes = nodes
        self._nodes_message = message = wire.cluster_changed(nodes)
        for stream in self._streams.values():
            stream.tell_nodes(message)

    def _left(self, stream: WorkerStream) -> None:
        self._streams.pop(stream.stream_id, None)
        if stream.identity is not None and self._workers.get(stream.identity) is stream:
            del self._workers[stream.identity]
        self._metrics.worker_streams = len(self._streams)
