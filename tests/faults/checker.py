"""Checks the three histories of a cluster (`histories.py` tells their format) against what it promises.

    python -m faults.checker FOLDER [--healed]

prints every violation and ends with exit code 1 if there is one, with 2 if nothing was recorded there. It needs nothing
but Python: not Duecourse, whose faults it would share. `--healed` says that all faults were over and everything had
come to rest when the histories ended, so that whatever was due must have run.

    S1   an acknowledged submission is in the store until it has ended; one that was refused is not
    S2   an id names one task: it is created once, and every answer tells the same uid
    S3   no handler starts before the task's run_at, none of a later attempt before its due time
    S4   a task has one lease at a time, each token is granted once, and each grant is started at most once
    S6   epochs of a shard grow, and none is given out twice
    S7   no grant under an epoch that is not the shard's latest, no start of an attempt that the store does not know
    S8   after PREVENTED no handler of that attempt, or of a later one, has run
    S9   a cancellation tells the truth, and a task that is asked to be cancelled is not tried again
    S11  attempts are counted before they start, never exceed the maximum; what costs nothing has not started
    S12  what has ended stays as it is
    S13  an outcome is recorded only for the attempt that is out, and only as its handler ended
    L1   everything that was due has run to its end (with --healed)
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from faults import histories
from faults.histories import HELD, TERMINAL, WAITING, Operation, Term, Transition, WorkerEvent


class Violation(NamedTuple):
    """A promise that was broken."""

    invariant: str
    subject: str
    """A task's id, or a shard."""
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}  {self.subject}: {self.what}"


@dataclass(slots=True)
class TaskStory:
    """All that is known of one task."""

    task_id: str
    submissions: list[Operation] = field(default_factory=list)
    cancellations: list[Operation] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    events: list[WorkerEvent] = field(default_factory=list)

    @property
    def starts(self) -> list[WorkerEvent]:
        """The starts of its handlers."""
        return [event for event in self.events if event.kind == "start"]

    @property
    def grants(self) -> list[Transition]:
        """What gave it to workers."""
        return [transition for transition in self.transitions if transition.is_grant]

    @property
    def last_state(self) -> str | None:
        """How it stands at the end; None if it is not, or no more, stored."""
        last = self.transitions[-1].new if self.transitions else None
        return last.state if last is not None else None

    def outcome_of(self, fencing_token: int) -> str | None:
        """Return how a granted attempt ended, by the store."""
        for transition in self.transitions:
            new = transition.new
            if new is not None and new.fencing_token == fencing_token and new.outcome is not None:
                return new.outcome
        return None


def check(recorded: histories.Histories, *, is_healed: bool) -> list[Violation]:
    """Return every violation in what was recorded."""
    stories: dict[str, TaskStory] = {}

    def story_of(task_id: str) -> TaskStory:
        return stories.setdefault(task_id, TaskStory(task_id))

    for operation in recorded.operations:
        story = story_of(operation.task_id)
        (story.submissions if operation.operation == "submit" else story.cancellations).append(operation)
    for transition in recorded.transitions:
        story_of(transition.task_id).transitions.append(transition)
    for event in recorded.events:
        story_of(event.task_id).events.append(event)
    found = [*_terms(recorded)]
    for story in stories.values():
        for invariant, rule in _RULES:
            found += [Violation(invariant, story.task_id, what) for what in rule(story)]
        if is_healed:
            found += [Violation("L1", story.task_id, what) for what in _ended(story)]
    return found


def _durable(story: TaskStory) -> Iterator[str]:
    is_created = any(transition.old is None for transition in story.transitions)
    outcomes = {submission.outcome for submission in story.submissions}
    if "ok" in outcomes and not is_created:
        yield "was acknowledged and never stored"
    if is_created and outcomes == {"fail"}:
        yield "was refused and is stored all the same"
    for transition in story.transitions:
        if transition.new is None and transition.old is not None and transition.old.state not in TERMINAL:
            yield f"was deleted while {transition.old.state}"
        first = min((one.returned for one in story.submissions if one.outcome == "ok" and one.returned), default=None)
        if transition.old is None and first is not None and transition.wall > first:
            yield "was acknowledged before it was stored"


def _single(story: TaskStory) -> Iterator[str]:
    answered = [submission for submission in story.submissions if submission.outcome == "ok"]
    if len({submission.uid for submission in answered}) > 1:
        yield "answers name several uids"
    if sum(bool(submission.created) for submission in answered) > 1:
        yield "was created more than once by its answers"
    if sum(transition.old is None for transition in story.transitions) > 1:
        yield "was created more than once in the store"


def _punctual(story: TaskStory) -> Iterator[str]:
    asked = [submission.run_at for submission in story.submissions if submission.run_at is not None]
    run_at = min(asked, default=None)
    due = {grant.new.fencing_token: grant.old.due_time for grant in story.grants if grant.new and grant.old}
    for start in story.starts:
        if run_at is not None and start.wall < run_at:
            yield f"attempt {start.attempt} started {run_at - start.wall} us before run_at"
        due_time = due.get(start.fencing_token)
        if due_time is not None and start.wall < due_time:
            yield f"attempt {start.attempt} started {due_time - start.wall} us before its due time"


def _exclusive(story: TaskStory) -> Iterator[str]:
    tokens = Counter(grant.new.token for grant in story.grants if grant.new)
    for token, count in tokens.items():
        if count > 1:
            yield f"token {token} was granted {count} times"
    for grant in story.grants:
        if grant.old is not None and grant.old.state in HELD:
            yield f"was granted at {grant.number} while attempt {grant.old.attempt} was out"
    fencing_tokens = [grant.new.fencing_token or 0 for grant in story.grants if grant.new]
    if any(later <= earlier for earlier, later in pairwise(fencing_tokens)):
        yield f"fencing tokens do not grow: {fencing_tokens}"
    for fencing_token, count in Counter(start.fencing_token for start in story.starts).items():
        if count > 1:
            yield f"the attempt with fencing token {fencing_token} was started {count} times"


def _known(story: TaskStory) -> Iterator[str]:
    granted = {grant.new.fencing_token: grant for grant in story.grants if grant.new}
    for start in story.starts:
        grant = granted.get(start.fencing_token)
        if grant is None or grant.new is None:
            yield f"attempt {start.attempt} of {start.worker} started without a grant"
        elif grant.new.attempt != start.attempt:
            yield f"attempt {grant.new.attempt} was started as {start.attempt}"
        elif start.wall < grant.wall:
            yield f"attempt {start.attempt} started before it was granted"
        elif any(event.worker != start.worker for event in story.events if event.fencing_token == start.fencing_token):
            yield f"attempt {start.attempt} was seen by several workers"


def _prevented(story: TaskStory) -> Iterator[str]:
    for cancellation in story.cancellations:
        if cancellation.result != "prevented":
            continue
        ends = [one for one in story.transitions if one.new and one.new.state == "cancelled"]
        if not ends:
            yield "PREVENTED was answered and it is not cancelled"
            continue
        old, new = ends[0].old, ends[0].new
        if old is not None and new is not None and old.state in HELD and new.outcome != "returned":
            yield f"PREVENTED was answered for attempt {new.attempt}, which ended {new.outcome}"
        returned = cancellation.returned
        if returned is not None and any(start.wall > returned for start in story.starts):
            yield "a handler started after PREVENTED"


def _honest(story: TaskStory) -> Iterator[str]:
    for transition in story.transitions:
        old, new = transition.old, transition.new
        if old and new and old.cancel_requested and old.state in HELD and new.state in WAITING:
            yield f"is tried again at {transition.number} though it is asked to be cancelled"
    last = story.last_state
    for cancellation in story.cancellations:
        if cancellation.result == "requested" and last in ("failed", "pending", "retry_wait"):
            yield f"REQUESTED was answered, and it is {last}"
        if cancellation.result == "already_finished" and cancellation.state != last:
            yield f"ALREADY_FINISHED told {cancellation.state}, and it is {last}"


def _counted(story: TaskStory) -> Iterator[str]:
    maximum = max((one.max_attempts or 0 for one in story.submissions), default=0)
    started = {start.fencing_token for start in story.starts}
    for transition in story.transitions:
        new = transition.new
        if new is None:
            continue
        if maximum and new.attempts_used > maximum:
            yield f"attempt {new.attempts_used} of at most {maximum} was granted"
        if maximum and new.failure_reason == "attempts_exhausted" and new.attempts_used < maximum:
            yield f"was given up after {new.attempts_used} of {maximum} attempts"
        if new.outcome == "returned" and new.fencing_token in started:
            yield f"attempt {new.attempt} cost nothing, and its handler had started"
    if maximum and len(started) > maximum:
        yield f"was started {len(started)} times, at most {maximum} were allowed"


def _final(story: TaskStory) -> Iterator[str]:
    for transition in story.transitions:
        old, new = transition.old, transition.new
        if old and new and old.state in TERMINAL and new.round == old.round:
            yield f"changed from {old.state} to {new.state} at {transition.number}"
        if old and new and new.revision != old.revision + 1:
            yield f"revision {old.revision} was followed by {new.revision}"


def _fenced_by_token(story: TaskStory) -> Iterator[str]:
    finishes = {(one.fencing_token, one.outcome) for one in story.events if one.kind == "finish"}
    for transition in story.transitions:
        old, new = transition.old, transition.new
        if new is None or new.outcome is None or (old and old.outcome == new.outcome and old.token == new.token):
            continue
        if old is None or old.state not in HELD or old.token != new.token or old.outcome is not None:
            yield f"{new.outcome} was recorded at {transition.number} for an attempt that was not out"
        elif new.outcome == "succeeded" and (new.fencing_token, "success") not in finishes:
            yield f"attempt {new.attempt} is recorded as succeeded, and no handler said so"


def _ended(story: TaskStory) -> Iterator[str]:
    last = story.last_state
    if last is not None and last not in TERMINAL:
        yield f"is still {last}"
    elif last == "succeeded" and not story.starts:
        yield "has succeeded, and was never started"


def _terms(recorded: histories.Histories) -> Iterator[Violation]:
    terms: defaultdict[int, list[Term]] = defaultdict(list)
    for term in recorded.terms:
        terms[term.shard].append(term)
    for shard, several in terms.items():
        for earlier, later in pairwise(several):
            if later.epoch <= earlier.epoch:
                yield Violation("S6", f"shard {shard}", f"epoch {earlier.epoch} was followed by {later.epoch}")
    for grant in recorded.transitions:
        if not grant.is_grant or grant.new is None:
            continue
        current = max((term.epoch for term in terms[grant.shard] if term.number < grant.number), default=None)
        if current is not None and grant.new.epoch != current:
            what = f"was granted under epoch {grant.new.epoch} of shard {grant.shard}, which was at {current}"
            yield Violation("S7", grant.task_id, what)


_RULES: Final[list[tuple[str, Callable[[TaskStory], Iterator[str]]]]] = [
    ("S1", _durable),
    ("S2", _single),
    ("S3", _punctual),
    ("S4", _exclusive),
    ("S7", _known),
    ("S8", _prevented),
    ("S9", _honest),
    ("S11", _counted),
    ("S12", _final),
    ("S13", _fenced_by_token),
]


def main() -> int:
    """Check a folder from the command line."""
    parser = argparse.ArgumentParser(prog="faults.checker", description="Check the histories of a cluster.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--healed", action="store_true", help="everything had come to rest at the end")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"there is no folder {arguments.folder}")
    recorded = histories.read(arguments.folder)
    if not (recorded.operations or recorded.events or recorded.transitions or recorded.terms):
        # Nothing is not in order: it is a wrong folder, or a harness that did not write.
        parser.error(f"nothing was recorded in {arguments.folder}")
    violations = check(recorded, is_healed=arguments.healed)
    for violation in violations:
        print(violation)
    counts = f"{len(recorded.operations)} calls, {len(recorded.events)} worker events"
    print(f"{counts}, {len(recorded.transitions)} transitions: {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
