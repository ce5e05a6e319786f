"""How long a task waits before its next attempt. Pure arithmetic that no policy can make overflow."""

import math
from hashlib import blake2b

from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.server.core.task import Policy


def backoff(policy: Policy, failures: int, uid: bytes, attempt: int) -> Micros:
    """Return the wait after the `failures`-th failure of a round (from 1), with the attempt's share of jitter.

    The wait is `initial * multiplier^(failures - 1)`, at most `max_backoff`, then drawn from `± jitter` of itself. The
    draw is a hash of the task's uid and the attempt, so that the core needs no randomness and a replay draws the same.
    """
    wait = float(policy.max_backoff)
    growth = (failures - 1) * math.log(policy.multiplier)
    if growth < math.log(policy.max_backoff / policy.initial_backoff):
        wait = policy.initial_backoff * math.exp(growth)
    draw = int.from_bytes(blake2b(uid + attempt.to_bytes(8, "big"), digest_size=8).digest(), "big") / 2**63 - 1
    return max(bounds.MIN_BACKOFF, round(wait * (1 + policy.jitter * draw)))


def return_backoff(returns_in_row: int) -> Micros:
    """Return the wait after the latest of `returns_in_row` attempts in a row that were handed back unstarted."""
    excess = returns_in_row - bounds.RETURNS_BEFORE_BACKOFF
    if excess < 0:
        return 0
    return min(bounds.MAX_RETURN_BACKOFF, bounds.FIRST_RETURN_BACKOFF << min(excess, 32))
