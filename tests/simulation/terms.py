"""What must hold of terms: who leads a shard in which epoch, and that only its current fence writes."""

from collections.abc import Mapping
from typing import NamedTuple

from simulation.history import History
from simulation.loop import Process

from duecourse.model.instants import Micros
from duecourse.server.core.fence import Fence
from duecourse.server.core.task import Epoch, ShardId
from duecourse.server.leadership import RAISES_PER_CLAIM
from duecourse.server.storage import Raised, RaiseRefused, ShardRow


class Term(NamedTuple):
    """A shard's latest term, as the store's writes told it."""

    fence: Fence
    holder: Process
    began_at: Micros


class Terms:
    """See the module's docstring."""

    def __init__(self, history: History) -> None:
        self.changes_of_leader = 0
        """How often another process than before began a term of a shard."""
        self._history = history
        self._latest: dict[ShardId, Term] = {}
        self._highest: dict[ShardId, Epoch] = {}
        """That was ever given: workers refuse what comes under a lower one, whatever the store has forgotten."""
        self._begun: dict[tuple[ShardId, Epoch], Process] = {}
        """Who began which term."""

    def latest(self, shard: ShardId) -> Term | None:
        """Return the latest term of a shard; None: it has had none."""
        return self._latest.get(shard)

    def is_current(self, fence: Fence) -> bool:
        """Tell whether a fence is that of its shard's latest term."""
        term = self._latest.get(fence.shard)
        return term is not None and term.fence == fence

    def raised(self, process: Process, answers: Mapping[ShardId, Raised | RaiseRefused]) -> None:
        """Check that epochs grow."""
        history = self._history
        for shard, answer in answers.items():
            if isinstance(answer, RaiseRefused):
                history.coverage["store raise refused"] += 1
                continue
            history.coverage["store raised"] += 1
            epoch = answer.fence.epoch
            before = self._latest.get(shard)
            highest = self._highest.get(shard)
            if highest is not None and epoch <= highest:
                if self._resumes(process, before, epoch):
                    history.coverage["term resumed"] += 1
                else:
                    history.fail("S6", f"epoch {epoch} of shard {shard} after {highest}")
            self._highest[shard] = max(epoch, highest or epoch)
            self._begun[shard, epoch] = process
            self._latest[shard] = Term(answer.fence, process, history.now)
            for record in history.records.values():
                if record.task.shard == shard:
                    record.listed.clear()
            if shard in history.shards_behind:
                history.shards_behind.remove(shard)
                history.behind_until = history.now
            if history.is_traced:
                history.note(process.name, f"leads shard {shard} in epoch {epoch}")
            self.changes_of_leader += before is not None and before.holder is not process
        history.strike("raised", process)

    def _resumes(self, process: Process, before: Term | None, epoch: Epoch) -> bool:
        """Tell whether a node goes on by the claim of its own term, which a store that fell back shows as the latest.

        Without news from etcd, it cannot know of terms that were forgotten. No epoch may come twice for that.
        """
        if before is None:
            return False
        shard, latest = before.fence.shard, before.fence.epoch
        is_its_own = self._begun.get((shard, latest)) is process
        is_its_claim = epoch > latest and epoch // RAISES_PER_CLAIM == latest // RAISES_PER_CLAIM
        return is_its_own and is_its_claim and (shard, epoch) not in self._begun

    def wrote(self, process: Process, fence: Fence, verb: str) -> None:
        """Check that what the store has applied came under the current fence."""
        if not self.is_current(fence):
            self._history.fail("S5", f"{process} {verb} {fence}, while {self.latest(fence.shard)} stands")

    def bound_by_force(self) -> None:
        """Let nobody hold any shard, after an operator has bound the store anew."""
        for shard, term in self._latest.items():
            self._latest[shard] = term._replace(fence=Fence(shard, term.fence.epoch, b""))

    def fell_back(self, rows: Mapping[ShardId, ShardRow]) -> None:
        """Go on from the fences that the store still holds."""
        for shard, row in rows.items():
            if shard in self._latest:
                fence = Fence(shard, row.epoch, row.holder)
                self._latest[shard] = self._latest[shard]._replace(fence=fence)

    def superseded(self, process: Process) -> None:
        """Check that a node that gave up because of another one was right."""
        since = process.began_at
        if not any(term.holder is not process and term.began_at >= since for term in self._latest.values()):
            self._history.fail("L4", f"{process} gave up, though nobody has taken a shard from it")
