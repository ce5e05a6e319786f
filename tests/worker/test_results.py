"""What a handler's end becomes."""

import asyncio
import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duecourse.model import bounds
from duecourse.worker import results
from duecourse.worker.attempt import Failed, FailureKind, StopReason, Success
from duecourse.worker.errors import NonRetryable, RetryAfter
from duecourse.worker.text import cut


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Success(b"", "")),
        (b"\x00\xff", Success(b"\x00\xff", "application/octet-stream")),
        ("grüß", Success("grüß".encode(), "text/plain; charset=utf-8")),
        ({"a": [1, None, "ü"]}, Success('{"a":[1,null,"ü"]}'.encode(), "application/json")),
        (0, Success(b"0", "application/json")),
        ("", Success(b"", "text/plain; charset=utf-8")),
    ],
)
def test_values_are_encoded_with_their_content_type(value: object, expected: Success) -> None:
    assert results.of_value(value) == expected


@pytest.mark.parametrize("value", [object(), {1, 2}, math.nan, {"a": b"bytes"}])
def test_what_has_no_json_form_is_not_worth_a_retry(value: object) -> None:
    outcome = results.of_value(value)
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.type) == (FailureKind.NON_RETRYABLE, "ResultNotEncodable")


def test_a_result_at_the_bound_is_kept_and_a_larger_one_refused_by_name() -> None:
    assert isinstance(results.of_value(bytes(bounds.MAX_RESULT_BYTES)), Success)
    outcome = results.of_value(bytes(bounds.MAX_RESULT_BYTES + 1))
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.type) == (FailureKind.NON_RETRYABLE, "ResultTooLarge")
    assert "131073" in outcome.message


def test_exceptions_are_retryable_with_their_name_and_text() -> None:
    assert results.of_error(ValueError("no"), None) == Failed(FailureKind.RETRYABLE, "ValueError", "no")
    assert results.of_error(SystemExit(3), None) == Failed(FailureKind.RETRYABLE, "SystemExit", "3")


def test_handlers_say_what_is_not_worth_a_retry_and_when_to_try_again() -> None:
    assert results.of_error(NonRetryable("gone"), None).kind is FailureKind.NON_RETRYABLE
    outcome = results.of_error(RetryAfter(timedelta(seconds=1.5), "busy"), None)
    assert (outcome.kind, outcome.retry_after, outcome.message) == (FailureKind.RETRYABLE, 1_500_000, "busy")


@pytest.mark.parametrize("delay", [timedelta(seconds=-1), timedelta(days=2)])
def test_a_delay_out_of_bounds_is_refused_where_it_is_made(delay: timedelta) -> None:
    with pytest.raises(ValueError, match="between 0 and 24 hours"):
        RetryAfter(delay)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (StopReason.CANCELLED, FailureKind.CANCELLED),
        (StopReason.TIMED_OUT, FailureKind.TIMED_OUT),
        (StopReason.LEASE_LOST, FailureKind.RETRYABLE),
        (StopReason.SHUTDOWN, FailureKind.RETRYABLE),
    ],
)
def test_what_was_asked_to_stop_has_stopped_for_that_reason(reason: StopReason, kind: FailureKind) -> None:
    stopped = results.of_error(asyncio.CancelledError(), reason)
    assert (stopped.kind, stopped.type) == (kind, "Stopped")
    failed = results.of_error(OSError("while closing"), reason)
    assert (failed.kind, failed.type) == (kind, "OSError")
    assert results.of_error(NonRetryable("gone"), reason).kind is FailureKind.NON_RETRYABLE


def test_an_exception_that_does_not_print_is_an_outcome_too() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("broken")

    outcome = results.of_error(Broken(), None)
    assert outcome.type.endswith("Broken")
    assert outcome.message == "(its text raised RuntimeError)"


@given(st.text(st.characters()), st.integers(8, 50))
def test_texts_are_cut_to_bytes_that_any_peer_can_read(text: str, limit: int) -> None:
    short = cut(text, limit)
    assert len(short.encode()) <= limit
    encoded = text.encode("utf-8", "backslashreplace")
    assert short == encoded.decode() or (short.endswith("…") and encoded.startswith(short[:-1].encode()))


def test_failures_are_cut_to_their_bounds() -> None:
    outcome = results.of_error(ValueError("ü" * 10_000), None)
    assert len(outcome.message.encode()) <= bounds.MAX_FAILURE_MESSAGE_BYTES
    assert outcome.message.endswith("…")
