"""What a worker says of itself, and how much it takes."""

from dataclasses import dataclass
from typing import Final

# So that one LeasesHeld that lists all of it, and the outcomes that wait beside it, fits into a request.
MAX_CAPACITY: Final = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a worker says of itself."""

    namespace: str
    worker: str
    incarnation: str
    queues: tuple[str, ...]
    task_types: tuple[str, ...]
    library: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How much a worker takes."""

    slots: int
    """Handlers that may run at once."""
    prefetch: int = 0
    """Attempts that may wait here for a slot."""
    threads: int = 0
    """Of the slots, how many may run handlers of `threaded` task types."""
    threaded: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.slots < 1 or self.prefetch < 0 or self.total > MAX_CAPACITY:
            raise ValueError(f"slots must be at least 1, prefetch at least 0, and both together at most {MAX_CAPACITY}")
        if self.threaded and self.threads < 1:
            raise ValueError("threads must be at least 1")

    @property
    def total(self) -> int:
        """Attempts that may be here or on their way at once."""
        return self.slots + self.prefetch

    @property
    def limited(self) -> frozenset[str]:
        """The task types that have credit of their own."""
        return self.threaded if self.threads < self.total else frozenset()
