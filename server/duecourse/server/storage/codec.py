"""What the store keeps as bytes that it does not look into: `duecourse.storage.v1`. And the hash of a lane.

The defaults are the empty string, and equal bytes become one shared `Policy`: hardly any task has one of its own.
Decoding raises `ValueError` for what no version has written.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from duecourse.model import bounds
from duecourse.server.core.task import DEFAULT_POLICY, Answer, Lane, Policy
from duecourse.storage.v1 import record_pb2

LAST_INSTANT: Final = 253_402_300_799_999_999
"""The end of the year 9999: clients know none after it."""
_CACHE_LIMIT: Final = 4_096

_M = TypeVar("_M", bound=Message)

_policies: dict[bytes, Policy] = {b"": DEFAULT_POLICY}
_policy_bytes: dict[Policy, bytes] = {DEFAULT_POLICY: b""}
_lane_hashes: dict[Lane, int] = {}


def lane_hash(lane: Lane) -> int:
    """Return a lane's place in the due index: BLAKE2b of its parts, 64 bits, signed. Stable for ever."""
    known = _lane_hashes.get(lane)
    if known is None:
        if len(_lane_hashes) >= _CACHE_LIMIT:
            _lane_hashes.clear()
        parts = f"{lane.namespace}\0{lane.queue}\0{lane.task_type}\0{lane.priority}\0{lane.fairness_key}"
        digest = blake2b(parts.encode(), digest_size=8).digest()
        known = _lane_hashes[lane] = int.from_bytes(digest, "big", signed=True)
    return known


def policy_to_bytes(policy: Policy) -> bytes:
    """Encode a policy."""
    if policy is DEFAULT_POLICY:
        return b""
    known = _policy_bytes.get(policy)
    if known is None:
        if len(_policy_bytes) >= _CACHE_LIMIT:
            _policy_bytes.clear()
        known = _policy_bytes[policy] = record_pb2.Policy(
            max_attempts=policy.max_attempts,
            initial_backoff=policy.initial_backoff,
            multiplier=policy.multiplier,
            max_backoff=policy.max_backoff,
            jitter=policy.jitter,
            attempt_timeout=policy.attempt_timeout,
            start_deadline=policy.start_deadline,
            completion_deadline=policy.completion_deadline,
            fail_when_lost=policy.fail_when_lost,
        ).SerializeToString(deterministic=True)
    return known


def policy_of(data: bytes) -> Policy:
    """Decode a policy."""
    known = _policies.get(data)
    if known is None:
        if len(_policies) >= _CACHE_LIMIT:
            _policies.clear()
        known = _policies[data] = _decode_policy(data) if data else DEFAULT_POLICY
    return known


def strings_to_bytes(entries: Mapping[str, str]) -> bytes:
    """Encode names with values."""
    return record_pb2.Strings(entries=entries).SerializeToString(deterministic=True) if entries else b""


def strings_of(data: bytes) -> dict[str, str]:
    """Decode names with values."""
    return dict(_parse(record_pb2.Strings, data).entries) if data else {}


def answers_to_bytes(answers: tuple[Answer, ...]) -> bytes:
    """Encode the answers that are kept for repeated requests."""
    if not answers:
        return b""
    message = record_pb2.Answers()
    for answer in answers:
        message.answers.add(
            request_id=answer.request_id,
            fingerprint=answer.fingerprint,
            attempt=answer.attempt,
            was_prevented=answer.was_prevented,
            earlier_attempt_may_run=answer.earlier_attempt_may_run,
        )
    return message.SerializeToString(deterministic=True)


def answers_of(data: bytes) -> tuple[Answer, ...]:
    """Decode the answers that are kept for repeated requests."""
    if not data:
        return ()
    return tuple(
        Answer(
            answer.request_id,
            answer.fingerprint,
            answer.attempt,
            answer.was_prevented,
            answer.earlier_attempt_may_run,
        )
        for answer in _parse(record_pb2.Answers, data).answers
    )


def _decode_policy(data: bytes) -> Policy:
    message = _parse(record_pb2.Policy, data)
    policy = Policy(
        max_attempts=message.max_attempts or DEFAULT_POLICY.max_attempts,
        initial_backoff=message.initial_backoff or DEFAULT_POLICY.initial_backoff,
        multiplier=message.multiplier or DEFAULT_POLICY.multiplier,
        max_backoff=message.max_backoff or DEFAULT_POLICY.max_backoff,
        jitter=message.jitter if message.HasField("jitter") else DEFAULT_POLICY.jitter,
        attempt_timeout=message.attempt_timeout or DEFAULT_POLICY.attempt_timeout,
        start_deadline=message.start_deadline if message.HasField("start_deadline") else None,
        completion_deadline=message.completion_deadline if message.HasField("completion_deadline") else None,
        fail_when_lost=message.fail_when_lost,
    )
    is_sound = (
        1 <= policy.max_attempts <= bounds.MAX_MAX_ATTEMPTS
        and 0 < policy.initial_backoff <= bounds.MAX_BACKOFF
        and 0 < policy.max_backoff <= bounds.MAX_BACKOFF
        and 0 < policy.multiplier <= bounds.MAX_BACKOFF_MULTIPLIER
        and 0 <= policy.jitter <= 1
        and 0 < policy.attempt_timeout <= bounds.MAX_ATTEMPT_TIMEOUT
        and 0 <= (policy.start_deadline or 0) <= LAST_INSTANT
        and 0 <= (policy.completion_deadline or 0) <= LAST_INSTANT
    )
    if not is_sound:
        raise ValueError(f"policy out of range: {policy}")
    return policy


def _parse(kind: type[_M], data: bytes) -> _M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(f"not a {kind.DESCRIPTOR.name}: {error}") from error
    return message
