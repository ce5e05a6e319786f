"""How a command ends: what each exit code means, and the line that tells a person what to do next."""

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from duecourse.cli import output

if TYPE_CHECKING:
    from duecourse.client import DuecourseError


class ExitCode(IntEnum):
    """Exit codes of all commands."""

    DONE = 0
    REFUSED = 1
    USAGE = 2
    UNAVAILABLE = 3
    UNCERTAIN = 4
    FAULT = 5


EPILOG: Final = (
    "Exit codes: 0 done; 1 refused, or something did not work; 2 the command line is wrong; 3 unavailable: nothing was"
    " done, try again; 4 no answer: it may or may not have been done, repeat it with the same id; 5 the server broke;"
    " 130 interrupted."
)


def of(failure: "DuecourseError") -> ExitCode:
    """Choose the exit code for what came of a call."""
    from duecourse import client

    match failure:
        case client.Unavailable():
            return ExitCode.UNAVAILABLE
        case client.OutcomeUncertain():
            return ExitCode.UNCERTAIN if failure.is_of_change else ExitCode.UNAVAILABLE
        case client.ServerFault():
            return ExitCode.FAULT
        case _:
            return ExitCode.REFUSED


def explain(failure: "DuecourseError", address: str) -> str:
    """Say in one line what happened and what to do next."""
    from duecourse import client

    what = failure.message
    match failure:
        case client.Overloaded():
            return f"{what}: the node has too much to do; try again in a moment"
        case client.Unavailable(reason=""):
            why = what.rpartition("last error: ")[2]
            return f"cannot reach a node at {address} ({why}): start one with `duecourse dev`, or give its --address"
        case client.Unavailable(reason="STORE_UNAVAILABLE"):
            return f"{what}: nothing was done; see whether Postgres runs, and try again"
        case client.Unavailable():
            return f"{what}: nothing was done; try again"
        case client.OutcomeUncertain() if not failure.is_of_change:
            return f"{what}: try again"
        case client.OutcomeUncertain():
            same = f" with --id {failure.task_id}" if failure.task_id else ""
            where = "; see whether Postgres runs" if failure.reason == "STORE_UNAVAILABLE" else ""
            return f"{what}: it may or may not have been done{where}; repeating it{same} is safe and tells"
        case client.ServerFault():
            error_id = failure.metadata.get("error_id")
            where = f"error {error_id} in the node's log" if error_id else "the node's log"
            return f"the server failed: {what}; see {where}"
        case client.TaskNotFound():
            return f"{what}: check the id and --namespace"
        case client.TaskExists():
            return f"{what}: choose another --id"
        case client.Refused(reason="NODE_NOT_FOUND"):
            return f"{what}: `duecourse cluster status` lists those that there are"
        case _ if failure.field and failure.field not in what:
            return f"{failure.field}: {what}"
        case _:
            return what


def fail(line: str, code: ExitCode = ExitCode.REFUSED) -> ExitCode:
    """Tell that a command failed, and return the code that it ends with."""
    output.tell(f"error: {line}")
    return code
