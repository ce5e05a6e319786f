"""`duecourse task submit`: one task from its options, or any number from a file of them."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from duecourse.cli import connection, exits, output, values
from duecourse.cli.connection import DEFAULT_ADDRESS, DEFAULT_TIMEOUT, Address, Json, Namespace, Timeout
from duecourse.model import bounds

_TIME = "When"
_HOW = "How it is run"


def submit(
    task_type: Annotated[
        str | None, typer.Option("--type", "-t", metavar="NAME", callback=values.name, help="Which handler runs it.")
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue", "-q", metavar="NAME", callback=values.name, help="Which workers get it. Default: default."
        ),
    ] = None,
    payload: Annotated[
        str | None,
        typer.Option(
            "--payload", "-p", metavar="JSON", help="What the handler gets: JSON, or text with another --content-type."
        ),
    ] = None,
    payload_file: Annotated[
        Path | None,
        typer.Option("--payload-file", help="File whose bytes the handler gets.", exists=True, dir_okay=False),
    ] = None,
    content_type: Annotated[
        str | None,
        typer.Option("--content-type", metavar="TYPE", help="Media type of the payload. JSON for --payload."),
    ] = None,
    task_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            callback=values.name,
            help="The task's id: submitting it again is no second task. Generated if absent.",
        ),
    ] = None,
    run_at: Annotated[
        str | None,
        typer.Option("--run-at", metavar="INSTANT", help="When, such as 2030-01-31T08:00:00Z.", rich_help_panel=_TIME),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(
            "--delay",
            metavar="DURATION",
            help="How far ahead, such as 10s or 24h; a number alone is seconds.",
            rich_help_panel=_TIME,
        ),
    ] = None,
    now: Annotated[
        bool, typer.Option("--now", help="At once. This is also what happens without a time.", rich_help_panel=_TIME)
    ] = False,
    start_deadline: Annotated[
        str | None,
        typer.Option("--start-deadline", metavar="INSTANT", help="Never start it after this.", rich_help_panel=_TIME),
    ] = None,
    completion_deadline: Annotated[
        str | None,
        typer.Option(
            "--completion-deadline", metavar="INSTANT", help="Give up if it is not done by this.", rich_help_panel=_TIME
        ),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            "--priority",
            min=bounds.MIN_PRIORITY,
            max=bounds.MAX_PRIORITY,
            help="Greater is sooner. Default: 0.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    fairness_key: Annotated[
        str | None,
        typer.Option(
            "--fairness-key",
            metavar="NAME",
            callback=values.name,
            help="Whose share of the queue it uses.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    max_attempts: Annotated[
        int | None,
        typer.Option(
            "--max-attempts",
            min=1,
            max=bounds.MAX_MAX_ATTEMPTS,
            help="How often it is tried. Default: 5.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    attempt_timeout: Annotated[
        str | None,
        typer.Option(
            "--attempt-timeout",
            metavar="DURATION",
            help="How long an attempt may take. Default: 10m.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    on_lost_attempt: Annotated[
        str | None,
        typer.Option(
            "--on-lost-attempt",
            metavar="retry|fail",
            help="When a worker is lost in the middle: try again, or fail because the effect must not repeat. Default:"
            " retry.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="KEY=VALUE", help="For people. Repeatable.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="KEY=VALUE", help="Handed to the handler. Repeatable."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            metavar="PATH",
            help="Submit many: a JSON object a line, with fields such as task_type, payload, run_at, delay, task_id;"
            " - is standard input. The other options are for lines that do not say otherwise.",
        ),
    ] = None,
    as_json: Json = False,
    address: Address = DEFAULT_ADDRESS,
    namespace: Namespace = "default",
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> None:
    """Submit a task, or with --file any number of them.

    Prints the task's id, once the task is durable.

    Lines of a file that are refused are told by their numbers, and the exit code is then not 0.
    A line without a task_id that is submitted again becomes a second task.
    """
    fields: dict[str, Any] = {
        "task_type": task_type,
        "queue": queue,
        "content_type": content_type,
        "task_id": task_id,
        "run_at": run_at,
        "delay": delay,
        "now": now or None,
        "start_deadline": start_deadline,
        "completion_deadline": completion_deadline,
        "priority": priority,
        "fairness_key": fairness_key,
        "max_attempts": max_attempts,
        "attempt_timeout": attempt_timeout,
        "on_lost_attempt": on_lost_attempt,
        "labels": values.pairs("--label", label) if label else None,
        "headers": values.pairs("--header", header) if header else None,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if file is not None:
        if payload is not None or payload_file is not None or task_id is not None:
            raise typer.BadParameter("--payload, --payload-file and --id are a single task's", param_hint="--file")
        _submit_file(file, given, as_json, address, namespace, timeout)
        return
    given |= _payload(payload, payload_file, content_type)
    _submit_one(given, as_json, address, namespace, timeout)


def _submit_one(given: dict[str, Any], as_json: bool, address: str, namespace: str, timeout: str) -> None:
    from duecourse.cli import task_text

    payload = given.pop("payload", b"")
    try:
        task = task_text.build(given)
    except task_text.BadTask as error:
        raise typer.Exit(exits.fail(_by_flag(str(error)), exits.ExitCode.USAGE)) from None
    task.payload = payload
    with connection.session(address, namespace, timeout) as session:
        submitted = session.ask(session.client.submit(task))
    if as_json:
        output.say_json(
            {"task_id": submitted.task_id, "uid": submitted.uid.hex(), "created": submitted.created},
        )
        return
    output.say(submitted.task_id)
    if not submitted.created:
        output.tell("the same task had been submitted before")


def _submit_file(file: str, given: dict[str, Any], as_json: bool, address: str, namespace: str, timeout: str) -> None:
    from duecourse.cli import task_files

    if file != "-" and not Path(file).is_file():
        raise typer.BadParameter(f"there is no file {file}", param_hint="--file")
    tally = task_files.Tally(address, as_json)
    with connection.session(address, namespace, timeout) as session:
        task_files.submit(session, sys.stdin.buffer if file == "-" else Path(file), given, tally)
    if tally.code:
        raise typer.Exit(tally.code)


def _payload(text: str | None, file: Path | None, content_type: str | None) -> dict[str, Any]:
    if file is not None:
        if text is not None:
            raise typer.BadParameter("give --payload or --payload-file, not both", param_hint="--payload")
        return {"payload": file.read_bytes()}
    if text is None:
        return {}
    if content_type is not None and "json" not in content_type:
        return {"payload": text.encode(errors="surrogateescape")}
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(
            f"not JSON: {error}. Quote it for your shell, or say --content-type text/plain", param_hint="--payload"
        ) from None
    return {"payload": text.encode(), "content_type": content_type or "application/json"}


def _by_flag(message: str) -> str:
    """Name the flag in place of the field that it fills."""
    field, separator, rest = message.partition(":")
    flag = {"task_type": "type", "task_id": "id"}.get(field, field.replace("_", "-"))
    if message.startswith("task_type is missing"):
        return "--type is missing: which handler is to run it?"
    if not separator or " " in field:
        return message
    return f"--{flag}:{rest}"
