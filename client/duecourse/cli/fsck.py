"""`duecourse store fsck`: checks a whole store, shows how far it has come, and tells what is wrong."""

import asyncio
import sys
from typing import TYPE_CHECKING, Final

import typer

from duecourse.cli import dsn, exits, extras, output
from duecourse.cli.connection import Json
from duecourse.cli.dsn import Dsn, DsnFile
from duecourse.model import bounds
from duecourse.model.instants import Micros
from duecourse.timing.clock import SystemClock

if TYPE_CHECKING:
    from duecourse.server.storage.fsck import Report
    from duecourse.server.storage.soundness import Finding

EPILOG: Final = (
    "Exit codes: 0 the store is sound; 1 something is wrong with it, or it is none that this version reads; 2 the"
    " command line is wrong; 3 the store cannot be reached, or not to its end: try again; 130 interrupted."
)
_TOLD_EVERY: Final = 5 * bounds.SECOND


def fsck(postgres_dsn: Dsn = None, dsn_file: DsnFile = None, as_json: Json = False) -> None:
    """Check a whole store: every shard, task and attempt. Changes nothing, and may run beside live nodes.

    Checked is that the shards cover every slot once and are of one
    coordination; that every task is in the shard of its id and under its lane,
    decodes, has a state that fits its times and its lease, no attempt of a term
    that its shard never had, all its attempts, and its queue, and is found by
    the due index; and that no attempt is left of a task that is gone. Postgres'
    other indexes are for pg_amcheck.

    Each finding is a line, or a JSON object with --json: rule, shard,
    namespace, task, and what is wrong.
    """
    text = dsn.read(postgres_dsn, dsn_file)
    with extras.needed("server", "checks stores"):
        from duecourse.server.storage import fsck as checking
    progress = _Progress()
    with dsn.failures_told(text):
        report = asyncio.run(checking.check(text, progress.show))
    progress.clear()
    if as_json:
        _say_json(report)
    else:
        _say(report)
    if not report.is_sound:
        what = ", ".join(f"{count} {rule.value}" for rule, count in sorted(report.broken.items()))
        raise typer.Exit(exits.fail(f"the store is not sound: {what}"))


class _Progress:
    """Tells on standard error how much has been read."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._is_live = sys.stderr.isatty()
        self._due: Micros = self._clock.elapsed() + _TOLD_EVERY

    def show(self, report: "Report") -> None:
        """Tell it, on one line of a terminal or now and then."""
        line = (
            f"{report.tasks:,} tasks and {report.attempts:,} earlier attempts read, {report.broken.total():,} findings"
        )
        if self._is_live:
            sys.stderr.write(f"\r{line}")
            sys.stderr.flush()
        elif self._clock.elapsed() >= self._due:
            self._due = self._clock.elapsed() + _TOLD_EVERY
            output.tell(line)

    def clear(self) -> None:
        """Take the line back."""
        if self._is_live:
            sys.stderr.write("\r\x1b[K")


def _say(report: "Report") -> None:
    if report.findings:
        output.say_table(
            ("rule", "shard", "namespace", "task", "what is wrong"),
            [
                (
                    finding.rule.value,
                    "" if finding.shard is None else str(finding.shard),
                    finding.key.namespace if finding.key else "",
                    finding.key.task_id if finding.key else "",
                    finding.detail,
                )
                for finding in report.findings
            ],
        )
    hidden = report.broken.total() - len(report.findings)
    if hidden:
        output.tell(f"and {hidden:,} more findings")
    verdict = "the store is sound" if report.is_sound else "the store is not sound"
    aside = f"; {report.set_aside:,} tasks were set aside before: they are FAILED, record corrupt"
    output.tell(
        f"{verdict}: read {report.shards:,} shards, {report.tasks:,} tasks, {report.attempts:,} earlier attempts"
        f"{aside if report.set_aside else ''}"
    )


def _say_json(report: "Report") -> None:
    for finding in report.findings:
        output.say_json(_as_object(finding))
    output.say_json(
        {
            "is_sound": report.is_sound,
            "shards": report.shards,
            "tasks": report.tasks,
            "attempts": report.attempts,
            "set_aside": report.set_aside,
            "broken": {rule.value: count for rule, count in sorted(report.broken.items())},
        }
    )


def _as_object(finding: "Finding") -> dict[str, str | int | None]:
    return {
        "rule": finding.rule.value,
        "shard": finding.shard,
        "namespace": finding.key.namespace if finding.key else None,
        "task_id": finding.key.task_id if finding.key else None,
        "detail": finding.detail,
    }
