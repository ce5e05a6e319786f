"""What another node, or the transport to it, says becomes one of three: told on, not there, or uncertain."""

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from duecourse.server.core import errors
from duecourse.server.rpc import relay
from duecourse.server.rpc.status import DOMAIN, Relayed
from duecourse.v1 import error_reason_pb2, task_service_pb2

Code = grpc.StatusCode


def a_status(code: Code, message: str = "", reason: str = "", domain: str = DOMAIN) -> aio.AioRpcError:
    trailers = aio.Metadata()
    if reason:
        packed = any_pb2.Any()
        packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata={"k": "v"}))
        told = status_pb2.Status(code=code.value[0], message=message, details=[packed])
        trailers.add("grpc-status-details-bin", told.SerializeToString())
    return aio.AioRpcError(code, aio.Metadata(), trailers, message)


@pytest.mark.parametrize(
    ("failed", "kind"),
    [
        (a_status(Code.UNAVAILABLE, "failed to connect to all addresses; last error: x"), relay.NotThere),
        (a_status(Code.UNAVAILABLE, "Socket closed"), errors.OutcomeUncertain),
        (a_status(Code.UNAVAILABLE, "Stream removed (ping timeout)"), errors.OutcomeUncertain),
        (a_status(Code.DEADLINE_EXCEEDED), errors.OutcomeUncertain),
        (a_status(Code.CANCELLED), errors.OutcomeUncertain),
        (a_status(Code.UNKNOWN), errors.OutcomeUncertain),
        (a_status(Code.INTERNAL), errors.OutcomeUncertain),
        (a_status(Code.UNIMPLEMENTED), relay.NotThere),
        (a_status(Code.UNAVAILABLE, reason="NO_LEADER"), relay.NotThere),
        (a_status(Code.UNAVAILABLE, reason="NOT_SHARD_LEADER"), relay.NotThere),
        (a_status(Code.UNAVAILABLE, reason="DRAINING"), relay.NotThere),
        (a_status(Code.UNAVAILABLE, reason="OUTCOME_UNCERTAIN"), errors.OutcomeUncertain),
        (a_status(Code.DEADLINE_EXCEEDED, reason="OUTCOME_UNCERTAIN"), errors.OutcomeUncertain),
        (a_status(Code.UNAVAILABLE, reason="STORE_UNAVAILABLE"), Relayed),
        (a_status(Code.RESOURCE_EXHAUSTED, reason="OVERLOADED"), Relayed),
        (a_status(Code.FAILED_PRECONDITION, reason="A_REASON_OF_TOMORROW"), Relayed),
        (a_status(Code.UNAVAILABLE, reason="NO_LEADER", domain="elsewhere.example"), errors.OutcomeUncertain),
    ],
)
def test_a_status_is_read_by_what_it_says_of_the_request(failed: aio.AioRpcError, kind: type) -> None:
    assert type(relay.of_call(failed)) is kind


def test_a_reason_of_a_newer_version_keeps_its_code_and_metadata() -> None:
    error = relay.of_call(a_status(Code.FAILED_PRECONDITION, "no", "A_REASON_OF_TOMORROW"))
    assert isinstance(error, Relayed)
    assert (error.refusal.code, error.refusal.message) == (Code.FAILED_PRECONDITION, "no")
    assert error.refusal.metadata == {"k": "v"}


def test_an_item_is_known_by_its_callers_path() -> None:
    item = task_service_pb2.ItemError(
        code=3,
        reason=error_reason_pb2.ERROR_REASON_INVALID_FIELD,
        message="tasks[0].delay: no",
        field="tasks[0].delay",
    )
    error = relay.of_item(item, "tasks[0]", "tasks[17]")
    assert isinstance(error, Relayed)
    assert (error.refusal.field_path, error.refusal.message) == ("tasks[17].delay", "tasks[17].delay: no")
    assert error.refusal.retry_after is None
