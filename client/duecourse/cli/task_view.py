"""How a task is shown: as JSON for programs, as pairs and rows for people."""

import base64
import json
from datetime import datetime, timedelta
from typing import Any

from duecourse.cli import values
from duecourse.client import Attempt, Task, TaskState
from duecourse.model import durations

COLUMNS = ("task id", "state", "type", "queue", "run at", "due", "tried")
ATTEMPT_COLUMNS = ("attempt", "round", "outcome", "worker", "leased", "started", "ended", "progress", "failure")
_USUAL_QUEUE = "default"
_MOST_SHOWN_BYTES = 2_000
_MOMENT = timedelta(seconds=2)


def row(task: Task) -> tuple[str, ...]:
    """Show a task on one line, for programs."""
    return (
        task.task_id,
        task.state,
        task.task_type,
        task.queue,
        values.write_instant(task.run_at),
        values.write_instant(task.due_time),
        str(task.attempt_count),
    )


def short_row(task: Task) -> tuple[str, ...]:
    """Show a task on one line of a terminal, to the second, without its queue or due time where they are the usual."""
    task_id, state, task_type, queue, _, _, attempts = row(task)
    due = values.write_second(task.due_time) if task.due_time != task.run_at else ""
    queue = queue if queue != _USUAL_QUEUE else ""
    return (task_id, state, task_type, queue, values.write_second(task.run_at), due, attempts)


def pairs(task: Task) -> list[tuple[str, str]]:
    """Show a task whole, but its attempts; what is empty or at its default has no value."""
    return [
        ("task id", task.task_id),
        ("uid", task.uid.hex()),
        ("namespace", task.namespace),
        ("state", task.state),
        ("failure reason", task.failure_reason or ""),
        ("cancel requested", "yes" if task.cancel_requested else ""),
        ("type", task.task_type),
        ("queue", task.queue),
        ("priority", str(task.priority) if task.priority else ""),
        ("fairness key", task.fairness_key),
        ("run at", values.write_instant(task.run_at)),
        ("due", values.write_instant(task.due_time)),
        ("created", values.write_instant(task.create_time)),
        ("ended", values.write_instant(task.end_time)),
        ("attempts", _attempts(task)),
        ("round", str(task.round) if task.round > 1 else ""),
        ("attempt timeout", _duration(task.attempt_timeout) or ""),
        ("start deadline", values.write_instant(task.start_deadline)),
        ("completion deadline", values.write_instant(task.completion_deadline)),
        ("on lost attempt", task.on_lost_attempt),
        ("labels", _texts(task.labels)),
        ("headers", _texts(task.headers)),
        ("revision", str(task.revision)),
        ("payload", _content(task.payload, task.content_type)),
        ("result", _content(task.result, task.result_content_type)),
    ]


def attempt_row(attempt: Attempt) -> tuple[str, ...]:
    """Show an attempt on one line."""
    return (
        str(attempt.number),
        str(attempt.round),
        attempt.outcome or "open",
        attempt.worker,
        values.write_instant(attempt.lease_time),
        values.write_instant(attempt.start_time),
        values.write_instant(attempt.end_time),
        attempt.progress,
        f"{attempt.failure.type}: {attempt.failure.message}" if attempt.failure else "",
    )


def short_attempt_row(attempt: Attempt) -> tuple[str, ...]:
    """Show an attempt on one line of a terminal: when it was leased to the second, and what followed from there."""
    number, round_number, outcome, worker, _, _, _, progress, failure = attempt_row(attempt)
    return (
        number,
        round_number if attempt.round > 1 else "",
        outcome,
        worker,
        values.write_second(attempt.lease_time),
        _after(attempt.lease_time, attempt.start_time),
        _after(attempt.lease_time, attempt.end_time),
        progress,
        failure,
    )


def has_failures_unseen(task: Task) -> bool:
    """Tell whether a task's attempts, which were not asked for, say why it is where it is."""
    return task.attempts is None and task.attempt_count > 0 and task.state in (TaskState.FAILED, TaskState.RETRY_WAIT)


def overdue(task: Task, now: datetime) -> timedelta:
    """Return for how long a task has been due without being leased; zero below a moment, or if it is not to run."""
    if task.state not in (TaskState.PENDING, TaskState.RETRY_WAIT) or task.due_time is None:
        return timedelta()
    late = now - task.due_time
    return late if late >= _MOMENT else timedelta()


def wanted_worker(task: Task, overdue: timedelta, *, has_any: bool) -> str:
    """Say what a task that is due waits for."""
    worker = f"type {task.task_type!r} from queue {task.queue!r}"
    due = f"it has been due for {values.write_age(overdue)}"
    if not has_any:
        return f"{due}, but no worker is connected: start one that takes {worker}"
    return f"{due}, but no worker has taken it: is one connected that takes {worker}, and is it not busy?"


def as_json(task: Task) -> dict[str, Any]:
    """Show a task as an object with the API's names; what it does not have is left out."""
    policy = task.retry_policy
    shown: dict[str, Any] = {
        "namespace": task.namespace,
        "task_id": task.task_id,
        "uid": task.uid.hex(),
        "queue": task.queue,
        "task_type": task.task_type,
        "state": task.state,
        "failure_reason": task.failure_reason,
        "cancel_requested": task.cancel_requested,
        "run_at": values.write_instant(task.run_at),
        "due_time": values.write_instant(task.due_time),
        "create_time": values.write_instant(task.create_time),
        "end_time": values.write_instant(task.end_time),
        "priority": task.priority,
        "fairness_key": task.fairness_key,
        "retry_policy": _known(
            {
                "max_attempts": policy.max_attempts,
                "initial_backoff": _duration(policy.initial_backoff),
                "multiplier": policy.multiplier,
                "max_backoff": _duration(policy.max_backoff),
                "jitter": policy.jitter,
            }
        ),
        "attempt_timeout": _duration(task.attempt_timeout),
        "start_deadline": values.write_instant(task.start_deadline),
        "completion_deadline": values.write_instant(task.completion_deadline),
        "on_lost_attempt": task.on_lost_attempt,
        "labels": dict(task.labels),
        "headers": dict(task.headers),
        "content_type": task.content_type,
        "revision": task.revision,
        "round": task.round,
        "attempt_count": task.attempt_count,
        "result_content_type": task.result_content_type,
    }
    _put_content(shown, "payload", task.payload, task.content_type)
    _put_content(shown, "result", task.result, task.result_content_type)
    if task.attempts is not None:
        shown["attempts"] = [_attempt_as_json(attempt) for attempt in task.attempts]
    return _known(shown)


def _attempt_as_json(attempt: Attempt) -> dict[str, Any]:
    return _known(
        {
            "number": attempt.number,
            "round": attempt.round,
            "outcome": attempt.outcome,
            "worker": attempt.worker,
            "incarnation": attempt.incarnation,
            "node": attempt.node,
            "shard": attempt.shard,
            "epoch": attempt.epoch,
            "fencing_token": attempt.fencing_token,
            "lease_time": values.write_instant(attempt.lease_time),
            "start_time": values.write_instant(attempt.start_time),
            "end_time": values.write_instant(attempt.end_time),
            "progress": attempt.progress,
            "failure": attempt.failure and {"type": attempt.failure.type, "message": attempt.failure.message},
        }
    )


def _attempts(task: Task) -> str:
    """Say how many there were of how many; of rounds only if there was more than one."""
    each = " in each round" if task.round > 1 else ""
    return f"{task.attempt_count} (at most {task.retry_policy.max_attempts}{each})"


def _known(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if value is not None and value != ""}


def _put_content(shown: dict[str, Any], name: str, content: bytes | None, content_type: str) -> None:
    """Put JSON as it is, and other bytes as base64."""
    if content is None:
        return
    if content and "json" in content_type:
        try:
            shown[name] = json.loads(content)
        except (ValueError, RecursionError):
            pass
        else:
            return
    shown[f"{name}_base64"] = base64.b64encode(content).decode()


def _content(content: bytes | None, content_type: str) -> str:
    if not content:
        return ""
    try:
        text = content[:_MOST_SHOWN_BYTES].decode()
    except UnicodeDecodeError:
        text = ""
    if not text:
        return f"{len(content)} bytes {content_type}".rstrip()
    return text if len(content) <= _MOST_SHOWN_BYTES else f"{text}... ({len(content)} bytes)"


def _texts(texts: Any) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(texts.items()))


def _after(first: datetime | None, then: datetime | None) -> str:
    return "" if first is None or then is None else f"{(then - first).total_seconds():+.3f}s"


def _duration(duration: timedelta | None) -> str | None:
    return None if duration is None else durations.write(duration // timedelta(microseconds=1))
