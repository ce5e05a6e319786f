"""Which leases a worker should hold on one stream, by what the node sent it and heard of it.

In it are the tokens that were listed last of shards that the worker knew the node to lead, or assigned on the stream
since, and for which no outcome was received on it: what the worker's heartbeats count too. A change costs one look-up;
the digest is made when a heartbeat asks for it, which is rare beside changes. Assignments that the worker had not
received when it spoke are left out by their number.
"""

from collections.abc import Collection, Iterable
from typing import Final

from duecourse.server.core.lease import Lease

DIGEST_BYTES: Final = 8


class Ledger:
    """See the module's docstring."""

    __slots__ = ("_concluded", "_held")

    def __init__(self) -> None:
        self._held: dict[bytes, tuple[int, Lease] | None] = {}
        """By token: the number of its Assignments and its lease; None if it was listed."""
        self._concluded: set[bytes] = set()
        """Outcomes received on the stream that are not known to be decided."""

    @property
    def undecided(self) -> int:
        """How many outcomes wait for what becomes of them."""
        return len(self._concluded)

    def assigned(self, lease: Lease) -> None:
        """Note a lease that is being sent to the worker, under its assignment number."""
        self._held[lease.token] = (lease.assignment_number, lease)

    def listed(self, tokens: Iterable[bytes]) -> None:
        """Note that the worker says that it holds leases."""
        for token in tokens:
            if token not in self._concluded:
                self._held.setdefault(token, None)

    def reset(self, listed: Collection[bytes], counted: Iterable[bytes], last_assignments: int) -> None:
        """Start again from all that the worker listed once it had received so many Assignments, and what it counts."""
        before = self._held
        self._held = {token: entry for token, entry in before.items() if entry and entry[0] > last_assignments}
        self._concluded.intersection_update(listed)
        for token in counted:
            if token not in self._concluded:
                self._held[token] = before.get(token)

    def __contains__(self, token: bytes) -> bool:
        """Tell whether a lease is held."""
        return token in self._held

    def lease_of(self, token: bytes) -> Lease | None:
        """Return the lease of a token, if it was assigned on this stream and is held."""
        entry = self._held.get(token)
        return entry[1] if entry else None

    def conclude(self, token: bytes) -> Lease | None:
        """Note that an outcome was received; returns the lease if it was assigned on this stream."""
        self._concluded.add(token)
        entry = self._held.pop(token, None)
        return entry[1] if entry else None

    def sent_after(self, number: int, tokens: Iterable[bytes]) -> set[bytes]:
        """Return those of leases that only Assignments after this one carry to the worker."""
        entries = [(token, self._held.get(token)) for token in tokens]
        return {token for token, entry in entries if entry and entry[0] > number}

    def decided(self, token: bytes) -> None:
        """Note that the worker is told what became of an outcome, and forgets it."""
        self._concluded.discard(token)

    def lost(self, token: bytes) -> None:
        """Note that the worker is told that a lease is no longer its."""
        self._held.pop(token, None)

    def digest(self, last_assignments: int) -> tuple[int, int]:
        """Return how many leases are held, and the exclusive or of their tokens' first bytes."""
        count = 0
        digest = 0
        for token, entry in self._held.items():
            if entry is None or entry[0] <= last_assignments:
                count += 1
                digest ^= int.from_bytes(token[:DIGEST_BYTES], "big")
        return count, digest
