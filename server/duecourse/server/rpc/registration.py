"""How services are put on the server: from their descriptors, with a parser that does not raise.

gRPC answers UNKNOWN, and logs a traceback, for a message that does not decode. Here such a message becomes `Malformed`,
which the guard of a call or of a stream refuses like any other bad input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

_MAKERS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that does not decode."""

    problem: str


def handler_of(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """Return the handler that serves all methods of a service by the servicer's methods of the same names."""
    methods = {}
    for method in service.methods:
        make = _MAKERS[method.client_streaming, method.server_streaming]
        methods[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=_lenient(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _lenient(message: type[Message]) -> Callable[[bytes], Message | Malformed]:
    def parse(data: bytes) -> Message | Malformed:
        try:
            return message.FromString(data)
        except DecodeError:
            return Malformed(f"it does not decode as {message.DESCRIPTOR.full_name}")

    return parse
