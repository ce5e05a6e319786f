"""Tells those who wait for an event or a write that it will not come to pass any more."""

from duecourse.server.core import errors
from duecourse.server.core.effects import Effects
from duecourse.server.core.events import Cancel, Committed, Event, Grant, Submit, WriteRefused
from duecourse.server.core.writes import Insert, Write


def give_up(write: Write, error: errors.DomainError, out: Effects) -> None:
    """Tell those who wait for a write that it did not come to pass."""
    if isinstance(write, Insert):
        out.answers.append((write.origin, error))
    elif isinstance(write.cause, Cancel):
        out.answers.append((write.cause.origin, error))
    elif isinstance(write.cause, Grant):
        out.unmatched.append((write.task.lane, write.cause.holder))


def turn_away(event: Event, error: errors.DomainError, out: Effects) -> None:
    """Tell those who wait for an event that it is not handled any more; what it did before it came is uncertain."""
    match event:
        case Submit():
            out.answers.extend((origin, error) for _, origin in event.submissions)
        case Cancel():
            out.answers.append((event.origin, error))
        case Grant():
            out.unmatched.append((event.task.lane, event.holder))
        case Committed():
            for write in event.writes:
                give_up(write, errors.OutcomeUncertain(), out)
        case WriteRefused():
            give_up(event.write, error, out)
        case _:
            pass
