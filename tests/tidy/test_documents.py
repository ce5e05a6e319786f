"""The documents say what the code does: bounds, settings, metrics, errors."""

import re
from pathlib import Path

from duecourse.model import bounds
from duecourse.server import config_listing
from duecourse.server.telemetry import metrics
from duecourse.v1 import error_reason_pb2

ROOT = Path(__file__).resolve().parents[2]
SEMANTICS = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
UNITS = {"MILLISECOND", "SECOND", "MINUTE", "HOUR", "DAY"}


def bounds_in_code() -> dict[str, float]:
    return {name: value for name, value in vars(bounds).items() if name.isupper() and name not in UNITS}


def rows_of(document: str, first_column: str) -> list[list[str]]:
    """Return the cells of the tables whose first cell is a word in backticks under the given heading."""
    tables = re.findall(rf"^\| {first_column} \|.*\n\|[-| :]+\|\n((?:\|.*\n)+)", document, re.M)
    assert tables, first_column
    return [[cell.strip() for cell in row.strip("|").split("|")] for table in tables for row in table.splitlines()]


def test_every_bound_is_listed_with_its_value() -> None:
    listed = {row[0].strip("`"): row[1] for row in rows_of(SEMANTICS, "bound")}
    assert {name: _number(text) for name, text in listed.items()} == bounds_in_code()


def _number(text: str) -> float:
    """Read `512 KiB`, `24 h`, `1,000` or `0.2` as the code counts it."""
    number, _, unit = text.partition(" ")
    factors = {"": 1, "ms": 1_000, "s": 1_000_000, "min": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}
    factors |= {"bytes": 1, "KiB": 1024, "MiB": 1024 * 1024}
    return float(number.replace(",", "")) * factors[unit]


def test_every_setting_is_listed_with_its_default_and_range() -> None:
    listed = {row[0].strip("`"): row[1:3] for row in rows_of(OPERATIONS, "setting")}
    expected = {
        setting.variable: [
            f"`{setting.default}`" if setting.default else "",
            setting.range or "/".join(setting.choices),
        ]
        for setting in config_listing.describe()
        if not setting.is_hidden
    }
    assert listed == expected


def test_every_metric_is_listed_with_its_kind_and_labels() -> None:
    listed = {row[0].strip("`"): row[1:3] for row in rows_of(OPERATIONS, "metric")}
    expected = {
        family.name + ("_total" if family.kind == "counter" else ""): [family.kind, ", ".join(family.labels)]
        for family in metrics.FAMILIES
    }
    expected["duecourse_node_info"] = ["info", "node_id, version"]
    assert listed == expected


def test_every_event_that_an_operator_should_see_is_listed() -> None:
    listed = {row[0].strip("`"): row[1] for row in rows_of(OPERATIONS, "event")}
    logged = {
        event: "error" if level == "exception" else level
        for path in (ROOT / "server").rglob("*.py")
        for level, event in re.findall(
            r'log\.(warning|error|exception|critical)\(\s*"(\w+)"', path.read_text(encoding="utf-8")
        )
    }
    assert {event: level for event, level in logged.items() if listed.get(event) != level} == {}


def test_every_error_reason_is_listed() -> None:
    listed = {row[0].strip("`") for row in rows_of(SEMANTICS, "reason")}
    names = {name.removeprefix("ERROR_REASON_") for name, number in error_reason_pb2.ErrorReason.items() if number}
    assert listed == names


def test_the_server_uses_every_error_reason() -> None:
    """A reason that no server sends is a promise to clients that nobody keeps."""
    rpc = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "server/duecourse/server/rpc").glob("*.py"))
    names = {name for name, number in error_reason_pb2.ErrorReason.items() if number}
    assert {name for name in names if name not in rpc} == set()


def test_every_metric_is_counted_somewhere() -> None:
    server = ROOT / "server" / "duecourse" / "server"
    code = "".join(path.read_text(encoding="utf-8") for path in server.rglob("*.py") if path.parent.name != "telemetry")
    attributes = {name for name in vars(metrics.Metrics()) if not name.startswith("_")} - {"node_id", "version"}
    attributes -= {"lateness", "retry_lateness", "early_starts", "commits", "commit_rows", "commit_seconds"}
    attributes |= {"observe_lateness", "observe_commit"}
    assert {name for name in attributes if not re.search(rf"\.{name}\b", code)} == set()
