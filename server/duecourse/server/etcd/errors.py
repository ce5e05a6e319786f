"""What can go wrong with etcd.

EtcdError
├── EtcdUnavailable     no answer; a write was surely not applied
├── EtcdUnknown         the answer of a write was lost: it may have been applied, or may yet be
├── EtcdRefused         answered with a refusal; a write was surely not applied
│   ├── LeaseNotFound   there is no such lease
│   └── Compacted       what was asked for is no longer kept: re-read
├── ForeignCluster      another cluster answered than before
└── StreamBroken        a stream ended, or fell silent
"""


class EtcdError(Exception):
    """Something went wrong with etcd; see the module's docstring."""


class EtcdUnavailable(EtcdError):
    """No member answered. A read has no answer; a write was surely not applied."""


class EtcdUnknown(EtcdError):
    """A write was sent and its answer was lost. Whether it was applied, or still will be, only a read can tell."""


class EtcdRefused(EtcdError):
    """etcd refused, and has not applied it."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"etcd refused: {code}: {details}")
        self.code = code
        self.details = details

    @property
    def is_about_login(self) -> bool:
        """Whether the login has expired, or is older than a change of what users may do."""
        return self.code == "UNAUTHENTICATED" or "auth store is old" in self.details


class LeaseNotFound(EtcdRefused):
    """The lease has expired, was revoked, or never was. This is authoritative."""


class Compacted(EtcdRefused):
    """The revision is no longer kept."""


class ForeignCluster(EtcdError):
    """The endpoints lead to another cluster than the one that answered first."""

    def __init__(self, expected: int, found: int) -> None:
        super().__init__(
            f"etcd cluster {found:x} answers where {expected:x} did: the endpoints belong to different clusters, or"
            " etcd was made anew from a backup. Check the endpoints; if it was restored, restart the node"
        )
        self.expected = expected
        self.found = found


class StreamBroken(EtcdError):
    """A stream is over; open another. `silent` if its member did not answer in time, rather than ending it."""

    def __init__(self, reason: str, *, silent: bool = False) -> None:
        super().__init__(reason)
        self.silent = silent
