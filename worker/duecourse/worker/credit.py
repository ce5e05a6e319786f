"""How a worker's credit is shared out over its streams, so that their sum never exceeds what it can take.

Free credit goes to the streams that have least out, up to an equal share, and among equals to the one that waited
longest. A stream that has more than its share while another is in need is asked to give some back; with less credit
than streams it goes round. Credit that was withdrawn counts as out until the node has answered.

Task types that run in threads are limited on each stream to its share of the threads, at least one. That is a courtesy,
so that no node sends what must wait here; the threads themselves are guarded where attempts start.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Account:
    """The credit of one stream."""

    out: int = 0
    """What the node may still use, with what is about to be told it and what was withdrawn without an answer yet."""
    unsent: int = 0
    """The change that the next Credit message tells."""
    withdrawing: int = 0
    """What was withdrawn and not answered yet."""
    is_open: bool = False
    """It may be given credit: the node serves and does not drain."""
    turn: int = 0
    """When it was last given credit, in turns."""
    limited: dict[str, int] = field(default_factory=dict)
    """What the node may still use of limited task types."""
    limited_unsent: dict[str, int] = field(default_factory=dict)
    """The changes of these that the next Credit message tells."""

    def give(self, count: int) -> None:
        """Put `count` more out."""
        self.out += count
        self.unsent += count

    def use(self, task_type: str) -> bool:
        """Take in that an assignment came; tell whether there was credit for it."""
        if task_type in self.limited:
            self.limited[task_type] -= 1
        if not self.out:
            return False
        self.out -= 1
        return True

    def withdraw(self, count: int) -> None:
        """Take back up to `count`: at once what the node was not told yet, the rest when it answers."""
        if self.withdrawing:
            return
        count = min(count, self.out)
        untold = min(count, self.unsent)
        self.out -= untold
        self.withdrawing = count - untold
        self.unsent -= count

    def returned(self, count: int) -> None:
        """Take in the answer to a withdrawal: `count` was unused, the rest has become assignments."""
        self.out -= min(count, self.withdrawing, self.out)
        self.withdrawing = 0

    def void(self) -> None:
        """Forget all that is out: the stream has ended, or Goodbye is said."""
        self.out = self.unsent = self.withdrawing = 0
        self.limited.clear()
        self.limited_unsent.clear()
        self.is_open = False

    def limit(self, task_type: str, share: int, held: int) -> None:
        """Put more of a limited task type out, up to `share` with the `held` ones that came from this node."""
        missing = share - held - self.limited.get(task_type, 0)
        if missing > 0 or task_type not in self.limited:
            self.limited[task_type] = self.limited.get(task_type, 0) + max(0, missing)
            self.limited_unsent[task_type] = self.limited_unsent.get(task_type, 0) + max(0, missing)


def distribute(free: int, accounts: Iterable[Account]) -> None:
    """Give all of `free` to the open accounts, raising the lowest ones to one level."""
    takers = [account for account in accounts if account.is_open and not account.withdrawing]
    takers.sort(key=lambda account: (account.out, account.turn))
    total = free
    count = 0
    for account in takers:
        if account.out * count >= total:
            break  # The level stays below this one and all that follow.
        total += account.out
        count += 1
    turn = 1 + max((account.turn for account in takers), default=0)
    for index, account in enumerate(takers[:count]):
        level = -(-total // (count - index))
        total -= level
        if level > account.out:
            account.give(level - account.out)
            account.turn = turn


def rebalance(accounts: Sequence[Account]) -> None:
    """Withdraw all from nodes that drain, and what exceeds an equal share while a stream has less than half of one."""
    for account in accounts:
        if not account.is_open:
            account.withdraw(account.out)
    takers = [account for account in accounts if account.is_open]
    share = sum(account.out for account in takers) // max(1, len(takers))
    if any(account.out * 2 < share or not account.out for account in takers):
        for account in takers:
            if account.out > share:
                account.withdraw(account.out - share)
