"""How a worker's credit is shared out over its streams, so that their sum never exceeds what it can take.

Free credit goes first to streams where work waits (`demand`), as much as waits there, then to all that have least out,
up to an equal share; among equals to the one that waited longest. Where work waits and no credit is out, it is moved
there from streams where none waits. When nothing waits anywhere, credit stays where it is: once a second it is only
made even, if a stream has none or less than half of an equal share and there is enough for all.

Credit that was withdrawn counts as out until the node has answered. A node that does not tell what waits there is taken
to have work once a second, if it has no credit: so a single slot goes round such nodes.

Task types that run in threads are limited on each stream to its share of the threads, at least one; where work waits,
to as many as there are for all such streams. That is a courtesy, so that no node sends what must wait here; the threads
themselves are guarded where attempts start.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros

DEMAND_LASTS: Final = 8 * bounds.SECOND
"""A node repeats every few seconds that work waits there; what it does not repeat is forgotten."""
_NEVER: Final[Micros] = 1 << 62


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
    demand: int = 0
    """How many tasks wait there for lack of credit, by the node's last word: a hint."""
    demand_until: Micros = 0
    """When that word is forgotten."""
    tells_demand: bool = False
    """The node is one that tells what waits there."""
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
        untold = max(0, min(count, self.unsent))
        self.out -= untold
        self.withdrawing = count - untold
        self.unsent -= count

    def returned(self, count: int) -> None:
        """Take in the answer to a withdrawal: `count` was unused, the rest has become assignments."""
        self.out -= min(count, self.withdrawing, self.out)
        self.withdrawing = 0
        if not self.is_open:
            self.withdraw(self.out)

    def tells(self) -> None:
        """Take in that the node is one that tells what waits there: what was supposed instead is forgotten."""
        if not self.tells_demand:
            self.tells_demand = True
            self.demand = 0

    def wants(self, count: int, now: Micros) -> None:
        """Take in how many tasks wait there."""
        self.tells()
        if self.is_open:
            self.demand = max(0, count)
            self.demand_until = now + DEMAND_LASTS

    def close(self) -> None:
        """Take back all, and give no more: the node drains."""
        self.is_open = False
        self.demand = 0
        self.withdraw(self.out)

    def void(self) -> None:
        """Forget all that is out: the stream has ended, or Goodbye is said."""
        self.out = self.unsent = self.withdrawing = self.demand = 0
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
    """Give all of `free` to the open accounts: first to those where work waits, as much as waits there."""
    takers = [account for account in accounts if account.is_open and not account.withdrawing]
    wanting = [account for account in takers if account.demand]
    if wanting:
        wanted = sum(max(0, account.demand - account.out) for account in wanting)
        _raise_lowest(min(free, wanted), wanting)
        free -= min(free, wanted)
    _raise_lowest(free, takers)


def move(accounts: Sequence[Account], *, patiently: bool = True) -> None:
    """Take credit from where no work waits, for those where work waits and none is out.

    `patiently`: what is under way back is counted on.
    """
    wanted = sum(account.demand for account in accounts if not account.out)
    if patiently:
        wanted -= sum(account.withdrawing for account in accounts)
    givers = [account for account in accounts if account.out and not account.demand and not account.withdrawing]
    if wanted <= 0 or not givers:
        return
    left = max(0, sum(account.out for account in givers) - wanted)
    # From the lowest on, so that what those have not is left to the others, alike.
    givers.sort(key=lambda account: account.out)
    for index, account in enumerate(givers):
        kept = min(account.out, left // (len(givers) - index))
        left -= kept
        if kept < account.out:
            account.withdraw(account.out - kept)


def rebalance(accounts: Sequence[Account]) -> None:
    """Do what is to be done once a second: see the module's docstring."""
    takers = [account for account in accounts if account.is_open]
    calm = [account for account in takers if not account.demand or not account.tells_demand]
    for account in takers:
        if not account.tells_demand:
            account.demand = 0 if account.out else 1
            account.demand_until = _NEVER
    share = sum(account.out for account in calm) // max(1, len(calm))
    if share and any(account.out * 2 < share or not account.out for account in calm):
        for account in calm:
            if account.out > share:
                account.withdraw(account.out - share)
    move(accounts, patiently=False)


def forget_demand(accounts: Iterable[Account], now: Micros) -> None:
    """Forget what was not repeated."""
    for account in accounts:
        if account.demand and now >= account.demand_until:
            account.demand = 0


def _raise_lowest(free: int, takers: list[Account]) -> None:
    """Give all of `free`, raising the lowest accounts to one level."""
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
