"""Tasks as JSON objects: how they are written in files that are submitted, and on the command line by its flags.

An object has the fields of `duecourse.client.NewTask`. Instants are ISO 8601 with their zone, durations are written
`250ms`, `5s`, `1m30s` or as a number of seconds, the payload is any JSON value, or bytes as `payload_base64`.
"""

import base64
import binascii
import difflib
import json
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from duecourse.cli import values
from duecourse.client import NewTask, OnLostAttempt, RetryPolicy
from duecourse.model import durations


class BadTask(Exception):
    """An object is not a task; the message names the field and says what is wanted."""


def parse(line: bytes, defaults: Mapping[str, Any]) -> NewTask:
    """Read a task from a line; `defaults` holds fields for when the line has none. Raises BadTask."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadTask(f"not JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadTask("not a JSON object")
    if defaults:
        when = _TIMES & given.keys()
        given = {name: value for name, value in defaults.items() if not (when and name in _TIMES)} | given
    return build(given)


def build(fields: Mapping[str, Any]) -> NewTask:
    """Make a task of an object's fields. Raises BadTask."""
    read: dict[str, Any] = {}
    for name, value in fields.items():
        reader = _READERS.get(name)
        if reader is None:
            raise BadTask(_unknown(name, _READERS))
        try:
            read[name] = reader(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise BadTask(f"{name}: {error}") from None
    if "task_type" not in read:
        raise BadTask("task_type is missing: which handler is to run it?")
    if sum(name in read for name in _TIMES) > 1:
        raise BadTask("give one of run_at, delay and now")
    if "payload_base64" in read:
        if "payload" in read:
            raise BadTask("give payload or payload_base64, not both")
        read["payload"] = read.pop("payload_base64")
    if "max_attempts" in read:
        if "retry_policy" in read:
            raise BadTask("give max_attempts or retry_policy, not both")
        read["retry_policy"] = RetryPolicy(max_attempts=read.pop("max_attempts"))
    read.pop("now", None)
    return NewTask(**read)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("text is wanted")
    return value


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("a whole number is wanted")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError("a number is wanted")
    return value


def _instant(value: Any) -> datetime:
    return values.instant(_text(value))


def _duration(value: Any) -> timedelta:
    if isinstance(value, str):
        return timedelta(microseconds=durations.parse(value))
    return timedelta(seconds=_number(value))


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise TypeError("an object with texts is wanted")
    return value


def _base64(value: Any) -> bytes:
    try:
        return base64.b64decode(_text(value), validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None


def _now(value: Any) -> bool:
    if value is not True:
        raise ValueError("true is wanted")
    return True


def _policy(value: Any) -> RetryPolicy:
    if not isinstance(value, dict):
        raise TypeError("an object is wanted")
    read = {}
    for name, part in value.items():
        if name not in _POLICY_READERS:
            raise ValueError(_unknown(name, _POLICY_READERS))
        read[name] = _POLICY_READERS[name](part)
    return RetryPolicy(**read)


def _on_lost_attempt(value: Any) -> OnLostAttempt:
    try:
        return OnLostAttempt(value)
    except ValueError:
        raise ValueError(f"one of {', '.join(OnLostAttempt)} is wanted") from None


def _unknown(name: str, known: Mapping[str, object]) -> str:
    similar = difflib.get_close_matches(name, known, n=1)
    return f"there is no field {name!r}" + (f"; is {similar[0]} meant?" if similar else "")


_TIMES: Final = frozenset(("run_at", "delay", "now"))
_POLICY_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "max_attempts": _integer,
    "initial_backoff": _duration,
    "multiplier": _number,
    "max_backoff": _duration,
    "jitter": _number,
}
_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "task_type": _text,
    "payload": lambda value: value,
    "payload_base64": _base64,
    "content_type": _text,
    "headers": _texts,
    "run_at": _instant,
    "delay": _duration,
    "now": _now,
    "queue": _text,
    "task_id": _text,
    "priority": _integer,
    "fairness_key": _text,
    "retry_policy": _policy,
    "max_attempts": _integer,
    "attempt_timeout": _duration,
    "start_deadline": _instant,
    "completion_deadline": _instant,
    "on_lost_attempt": _on_lost_attempt,
    "labels": _texts,
}
