"""What every call gets: a deadline, a bound on how many run at once, a count, and a status whatever happens inside.

A client without a deadline gets the server's; one with a very long one is cut short, since nobody should wait for a
node that long. Unexpected errors end as INTERNAL with an id that finds the log entry, never as UNKNOWN.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn, TypeVar

import grpc
from grpc import aio

from duecourse.model import bounds
from duecourse.server.core.errors import InvalidField, OutcomeUncertain, Overloaded
from duecourse.server.rpc import status
from duecourse.server.rpc.registration import Malformed
from duecourse.server.telemetry.metrics import Metrics

MAX_CALLS: Final = 8_192
LONGEST_CALL: Final = bounds.DEFAULT_CALL_DEADLINE + bounds.MAX_CANCEL_WAIT
_CALLS: Final = "calls"

Request = TypeVar("Request")
Response = TypeVar("Response")


class Calls:
    """The calls that are under way."""

    def __init__(self, metrics: Metrics, max_calls: int = MAX_CALLS, *, counted_as: str = "") -> None:
        """Begin with none; `counted_as` goes before the methods' names in the metric."""
        self._counted_as = counted_as
        self._metrics = metrics
        self._max_calls = max_calls
        self._limits: set[asyncio.Timeout] = set()
        self._is_closed = False

    async def answer(
        self,
        method: str,
        context: "aio.ServicerContext[Any, Any]",
        handler: Callable[[Request], Awaitable[Response]],
        request: Request,
    ) -> Response:
        """Have a request answered, or end its call with a status that tells why not."""
        try:
            response = await self._run(context, handler, request)
        except asyncio.CancelledError:
            # The client has gone, or its deadline is over: there is nobody to tell.
            self.count(method, grpc.StatusCode.CANCELLED)
            raise
        except _LimitReached:
            found = status.deadline_exceeded()
        except Exception as error:
            found = status.refusal(error)
        else:
            self.count(method, grpc.StatusCode.OK)
            return response
        await self.refuse(method, context, found)
        raise AssertionError("a refusal raises")

    async def refuse(self, method: str, context: "aio.ServicerContext[Any, Any]", found: status.Refusal) -> NoReturn:
        """End a call with a status, and count it.

        Not to be called from an exception's handler: gRPC's own exception would keep that one, and gRPC keeps its own
        in a cycle.
        """
        self.count(method, found.code)
        await status.abort(context, found)

    def count(self, method: str, code: grpc.StatusCode) -> None:
        """Count a call that ended."""
        self._metrics.rpc_requests[self._counted_as + method, code.name] += 1

    def close(self) -> None:
        """End all calls that are under way, now: the node goes. What became of them is not known."""
        self._is_closed = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now)

    async def _run(
        self,
        context: "aio.ServicerContext[Any, Any]",
        handler: Callable[[Request], Awaitable[Response]],
        request: Request,
    ) -> Response:
        if isinstance(request, Malformed):
            raise InvalidField("request", request.problem)
        if len(self._limits) >= self._max_calls:
            self._metrics.admission_refusals[_CALLS] += 1
            raise Overloaded(_CALLS)
        # The client's own deadline needs no help from here: gRPC cancels the call.
        has_own = context.time_remaining() is not None
        allowed = LONGEST_CALL if has_own else bounds.DEFAULT_CALL_DEADLINE
        limit = asyncio.timeout(allowed / bounds.SECOND)
        try:
            async with limit:
                self._limits.add(limit)
                return await handler(request)
        except TimeoutError:
            if not limit.expired():
                raise
            raise (OutcomeUncertain() if self._is_closed else _LimitReached()) from None
        finally:
            self._limits.discard(limit)


class _LimitReached(Exception):
    """A call took longer than it may."""
