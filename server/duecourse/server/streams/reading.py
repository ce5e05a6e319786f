"""What a worker says, read item by item: checked, bounded and turned into words of the domain. Pure.

What only a broken library can send raises ProtocolViolation. What a healthy one may send in excess is cut: a failure's
text ends with a mark, a result that is too long is replaced by a note, so that the attempt completes all the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from google.protobuf.duration_pb2 import Duration

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.model.names import is_name
from duecourse.server.core.events import OutcomeKind
from duecourse.server.core.task import Failure
from duecourse.server.streams.errors import ProtocolViolation
from duecourse.v1 import worker_service_pb2 as pb

PROTOCOL_VERSION: Final = 1
DEFAULT_NAMESPACE: Final = "default"
MIN_INCARNATION: Final = 16
MIN_TOKEN_BYTES: Final = 8
MAX_TOKEN_BYTES: Final = 64
MAX_LISTED: Final = 2 * bounds.MAX_CREDIT
CUT_MARK: Final = "... (cut)"
_LONGEST_ATTEMPT: Final = 2 * bounds.MAX_ATTEMPT_TIMEOUT
_DIGEST_BYTES: Final = 16
_KINDS: Final = {
    pb.FAILURE_KIND_RETRYABLE: OutcomeKind.RETRYABLE,
    pb.FAILURE_KIND_NON_RETRYABLE: OutcomeKind.NON_RETRYABLE,
    pb.FAILURE_KIND_TIMED_OUT: OutcomeKind.TIMED_OUT,
    pb.FAILURE_KIND_CANCELLED: OutcomeKind.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Introduction:
    """A worker, as it introduces itself."""

    protocol_version: int
    """The one that both speak."""
    namespace: str
    worker: str
    incarnation: str
    stream_number: int
    queues: frozenset[str]
    task_types: frozenset[str]
    lease_tokens: Sequence[bytes]


def introduction(hello: pb.Hello) -> Introduction:
    """Check Hello."""
    if hello.protocol_version < 1:
        raise ProtocolViolation("Hello: protocol_version from 1 on is wanted")
    namespace = hello.namespace or DEFAULT_NAMESPACE
    if not is_name(namespace) or not is_name(hello.worker) or not is_name(hello.incarnation):
        raise ProtocolViolation("Hello: namespace, worker and incarnation are names")
    if len(hello.incarnation) < MIN_INCARNATION:
        raise ProtocolViolation(f"Hello: an incarnation of {MIN_INCARNATION} bytes or more is wanted")
    if hello.stream_number < 0:
        raise ProtocolViolation("Hello: stream_number counts from 0")
    return Introduction(
        protocol_version=min(hello.protocol_version, PROTOCOL_VERSION),
        namespace=namespace,
        worker=hello.worker,
        incarnation=hello.incarnation,
        stream_number=hello.stream_number,
        queues=_subscribed(hello.queues, "queues", bounds.MAX_SUBSCRIBED_QUEUES),
        task_types=_subscribed(hello.task_types, "task_types", bounds.MAX_SUBSCRIBED_TYPES),
        lease_tokens=tokens(hello.lease_tokens),
    )


def tokens(sent: Sequence[bytes]) -> list[bytes]:
    """Check a list of lease tokens."""
    if len(sent) > MAX_LISTED:
        raise ProtocolViolation(f"at most {MAX_LISTED} leases can be listed")
    return [token(one) for one in sent]


def token(sent: bytes) -> bytes:
    """Check a lease token."""
    if not MIN_TOKEN_BYTES <= len(sent) <= MAX_TOKEN_BYTES:
        raise ProtocolViolation(f"lease tokens have {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} bytes")
    return sent


def task_id(sent: str) -> str:
    """Check the id that comes with a lease token."""
    if not is_name(sent):
        raise ProtocolViolation("what is said of an attempt comes with its task_id")
    return sent


def start_time(reference: pb.AttemptRef, utc: Micros) -> Micros | None:
    """Return when a handler began by our clock; never in the future, never before an attempt can have begun."""
    if not reference.HasField("started_ago"):
        return None
    return utc - _clamped(reference.started_ago, _LONGEST_ATTEMPT)


def retry_after(attempt: pb.FailedAttempt) -> Micros | None:
    """Return the wait that the handler asked for, within its bounds."""
    return _clamped(attempt.retry_after, bounds.MAX_BACKOFF) if attempt.HasField("retry_after") else None


def failure_kind(attempt: pb.FailedAttempt) -> OutcomeKind:
    """Check how a handler ended."""
    kind = _KINDS.get(attempt.kind)
    if kind is None:
        raise ProtocolViolation("Failed: a kind of failure is wanted")
    return kind


def failure(attempt: pb.FailedAttempt) -> Failure:
    """Return what went wrong, cut to its bounds."""
    sent = attempt.failure
    return Failure(
        cut(sent.type, bounds.MAX_FAILURE_TYPE_BYTES, mark=""), cut(sent.message, bounds.MAX_FAILURE_MESSAGE_BYTES)
    )


def progress(reference: pb.AttemptRef) -> str:
    """Return what a handler says of its progress, cut to its bound."""
    return cut(reference.progress, bounds.MAX_PROGRESS_BYTES)


def result(success: pb.Success) -> tuple[bytes, str] | None:
    """Return what the handler returned, with its media type; None if it returned nothing."""
    content = success.result
    content_type = success.content_type
    if not content and not content_type:
        return None
    if len(content) > bounds.MAX_RESULT_BYTES:
        note = f"a result of {len(content)} bytes was left out: at most {bounds.MAX_RESULT_BYTES} are kept {CUT_MARK}"
        return note.encode(), "text/plain"
    if not (
        content_type.isascii() and content_type.isprintable() and len(content_type) <= bounds.MAX_CONTENT_TYPE_BYTES
    ):
        content_type = ""
    return content, content_type


def digest(kind: OutcomeKind, failed: Failure | None = None, returned: tuple[bytes, str] | None = None) -> bytes:
    """Return what tells a repeated outcome from a different one under the same token."""
    hashed = blake2b(kind.value.encode(), digest_size=_DIGEST_BYTES)
    if failed is not None:
        hashed.update(f"\0{failed.type}\0{failed.message}".encode())
    if returned is not None:
        hashed.update(b"\0%b\0%b" % (returned[1].encode(), returned[0]))
    return hashed.digest()


def cut(text: str, most: int, mark: str = CUT_MARK) -> str:
    """Shorten a text to so many bytes, with a mark at its end, and rid it of the character that no store takes."""
    if "\0" in text:
        text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    if len(text) * 4 <= most:
        return text
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    return encoded[: most - len(mark)].decode(errors="ignore") + mark


def _clamped(sent: Duration, longest: Micros) -> Micros:
    micros = sent.seconds * bounds.SECOND + sent.nanos // 1_000
    return min(max(0, micros), longest)


def _subscribed(sent: Iterable[str], what: str, most: int) -> frozenset[str]:
    subscribed = frozenset(sent)
    if not 1 <= len(subscribed) <= most or not all(map(is_name, subscribed)):
        raise ProtocolViolation(f"Hello: 1 to {most} {what} are wanted, all of them names")
    return subscribed
