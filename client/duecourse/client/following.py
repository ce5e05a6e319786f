"""Keeps a client's picture of its cluster up to date, by asking one node after the other to tell what changes.

What was told last is kept when a node ends its word: it is a hint, and calls that find it wrong take another way. A
node that leaves a call without an answer is not listened to any longer. Nodes of a version that tells nothing are asked
again now and then: they may be upgraded meanwhile.
"""

import asyncio
import random
from typing import Final, Never

import grpc

from duecourse.client.routing import Router
from duecourse.model import bounds
from duecourse.timing import backoff
from duecourse.timing.clock import Clock
from duecourse.v1 import cluster_service_pb2

_FIRST_WAIT: Final = 100 * bounds.MILLISECOND
_LONGEST_WAIT: Final = 5 * bounds.SECOND
_UNTIL_UPGRADED: Final = bounds.MINUTE


async def follow(router: Router, clock: Clock, source: random.Random) -> Never:
    """Follow the cluster for ever."""
    waits = backoff.delays(_FIRST_WAIT, _LONGEST_WAIT, source)
    address = router.pick().address
    while True:
        wait = 0
        route = router.to(address)
        route.calls += 1
        telling = route.cluster.WatchCluster(cluster_service_pb2.WatchClusterRequest())
        route.telling = telling
        try:
            async for picture in telling:
                waits = backoff.delays(_FIRST_WAIT, _LONGEST_WAIT, source)
                await router.learn(picture)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                wait = _UNTIL_UPGRADED
        except asyncio.InvalidStateError:
            # What gRPC raises where a stream has ended while it was read.
            pass
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The node was asked for something else, and did not answer.
        finally:
            route.telling = None
            route.calls -= 1
        await clock.sleep(max(wait, next(waits)))
        address = router.after(address)
