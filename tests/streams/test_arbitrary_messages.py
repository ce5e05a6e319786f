"""Whatever a worker sends, the machine answers, ends the stream, or ignores it: it never raises and stays bounded."""

from hypothesis import given, settings
from hypothesis import strategies as st
from streams.node_side import Node, a_hello

from duecourse.server.core.effects import Verdict
from duecourse.server.core.errors import DomainError
from duecourse.v1 import task_pb2
from duecourse.v1 import worker_service_pb2 as pb

_numbers = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1))
_small = st.one_of(st.integers(-3, 3), st.integers(-(2**31), 2**31 - 1))
_texts = st.one_of(st.sampled_from(["a", "b", "send", "..", ""]), st.text(max_size=20))
_tokens = st.one_of(st.sampled_from([b"a" * 16, b"b" * 16, b"", b"x" * 65]), st.binary(max_size=20))
_durations = st.builds(lambda seconds, nanos: {"seconds": seconds, "nanos": nanos}, _numbers, _small)
_references = st.builds(
    lambda token, task_id, ago, progress: pb.AttemptRef(
        lease_token=token, task_id=task_id, started_ago=ago, progress=progress
    ),
    _tokens,
    _texts,
    st.none() | _durations,
    _texts,
)
_events = st.one_of(
    st.builds(lambda d, t: {"credit": pb.Credit(delta=d, task_type_deltas=t)}, _small, st.dictionaries(_texts, _small)),
    st.builds(lambda a: {"started": pb.Started(attempts=a)}, st.lists(_references, max_size=3)),
    st.builds(
        lambda a: {"succeeded": pb.Succeeded(attempts=a)},
        st.lists(
            st.builds(lambda r, b, c: pb.Success(attempt=r, result=b, content_type=c), _references, _tokens, _texts),
            max_size=3,
        ),
    ),
    st.builds(
        lambda a: {"failed": pb.Failed(attempts=a)},
        st.lists(
            st.builds(
                lambda r, kind, text, after: pb.FailedAttempt(
                    attempt=r, kind=kind, failure=task_pb2.Failure(type=text, message=text), retry_after=after
                ),
                _references,
                st.integers(0, 6),
                _texts,
                st.none() | _durations,
            ),
            max_size=3,
        ),
    ),
    st.builds(lambda a: {"returned": pb.Returned(attempts=a)}, st.lists(_references, max_size=3)),
    st.builds(
        lambda n, c, d: {"heartbeat": pb.WorkerHeartbeat(last_assignments=n, lease_count=c, lease_digest=d)},
        _numbers,
        _small,
        st.integers(0, 2**64 - 1),
    ),
    st.builds(
        lambda a, n, held: {"leases_held": pb.LeasesHeld(answers=a, last_assignments=n, leases=held)},
        _numbers,
        _numbers,
        st.lists(
            st.builds(
                lambda t, i, s: pb.HeldLease(lease_token=t, task_id=i, started=s), _tokens, _texts, st.booleans()
            ),
            max_size=3,
        ),
    ),
    st.just({"goodbye": pb.Goodbye()}),
    st.just({"hello": a_hello()}),
    st.just({}),
)


@settings(max_examples=300)
@given(st.lists(_events, max_size=12), st.booleans())
def test_no_sequence_of_events_raises(events: list[dict[str, object]], is_introduced: bool) -> None:
    node = Node()
    worker = node.connect() if is_introduced else node.open()
    for event in events:
        if is_introduced and not worker.stream.is_ended and node.port.subscribed:
            node.assign(worker, "a")
        worker.say(**event)
        for end in node.port.ends:
            node.hub.verdicts([(end.holder, end.lease_token, Verdict.UNKNOWN_TOKEN)])
        node.port.events.clear()
        node.hub.tick(node.port.now)
        worker.hear()
    error = worker.stream.error
    assert error is None or isinstance(error, DomainError)
    assert node.hub.streams == (0 if worker.stream.is_ended else 1)
    assert (not node.port.subscribed) or not worker.stream.is_ended


@settings(max_examples=300)
@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_that_parse_raise(data: bytes, is_introduced: bool) -> None:
    node = Node()
    worker = node.connect() if is_introduced else node.open()
    message = pb.StreamAssignmentsRequest()
    try:
        message.ParseFromString(data)
    except Exception:
        return
    message.number = worker.number + 1
    worker.stream.receive(message, 0)
    worker.hear()
    assert worker.stream.error is None or isinstance(worker.stream.error, DomainError)
