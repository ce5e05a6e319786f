"""Settings told to people: for `duecourse server --help`, for the documents, and for the log of a start."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import AfterValidator, SecretStr
from pydantic.fields import FieldInfo

from duecourse.model import durations
from duecourse.server.config import ENVIRONMENT_PREFIX, DurationRange, Settings

_KINDS: Final[dict[object, str]] = {
    bool: "boolean",
    int: "integer",
    str: "text",
    Path: "file",
    SecretStr: "secret",
    tuple[str, ...]: "list",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What there is to know about one setting."""

    name: str
    flag: str | None
    """None: it is secret, so no flag."""
    variable: str
    kind: str
    """`duration`, `integer`, `boolean`, `text`, `file`, `secret`, `list` or `choice`."""
    choices: tuple[str, ...]
    """What a `choice` chooses from."""
    range: str
    """The bounds of durations and integers, as text; empty for others."""
    default: str
    """As one would write it; empty for none, or one that is made at every start."""
    description: str
    is_hidden: bool
    """For tests: not to be shown in the help."""


def describe() -> tuple[Setting, ...]:
    """Describe every setting, in the order in which they are shown."""
    return tuple(_describe(name, field) for name, field in Settings.model_fields.items())


def redacted(settings: Settings) -> dict[str, str]:
    """Write all settings as text, of secrets only whether they are set, for the log of a start."""
    return {setting.name: _write(getattr(settings, setting.name), setting.kind) for setting in describe()}


def _describe(name: str, field: FieldInfo) -> Setting:
    kind, choices = _kind_of(field)
    extra = field.json_schema_extra
    return Setting(
        name=name,
        flag=None if kind == "secret" else "--" + name.replace("_", "-"),
        variable=ENVIRONMENT_PREFIX + name.upper(),
        kind=kind,
        choices=choices,
        range=_range_of(field, kind),
        default="" if field.default_factory is not None else _write(field.default, kind),
        description=field.description or "",
        is_hidden=isinstance(extra, dict) and bool(extra.get("hidden")),
    )


def _kind_of(field: FieldInfo) -> tuple[str, tuple[str, ...]]:
    if _duration_range(field) is not None:
        return "duration", ()
    annotation = _without_none(field.annotation)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return "choice", tuple(word.value for word in annotation)
    return _KINDS[annotation], ()


def _without_none(annotation: Any) -> Any:
    if NoneType not in get_args(annotation):
        return annotation
    [kept] = (part for part in get_args(annotation) if part is not NoneType)
    return get_args(kept)[0] if get_origin(kept) is Annotated else kept


def _duration_range(field: FieldInfo) -> DurationRange | None:
    for mark in field.metadata:
        if isinstance(mark, AfterValidator) and isinstance(mark.func, DurationRange):
            return mark.func
    return None


def _range_of(field: FieldInfo, kind: str) -> str:
    if (duration_range := _duration_range(field)) is not None:
        return str(duration_range)
    if kind != "integer":
        return ""
    lowest = next(mark.ge for mark in field.metadata if hasattr(mark, "ge"))
    highest = next(mark.le for mark in field.metadata if hasattr(mark, "le"))
    return f"{lowest:,} to {highest:,}"


def _write(value: object, kind: str) -> str:
    match value:
        case None:
            return ""
        case SecretStr():
            return "(set)"
        case bool():
            return str(value).lower()
        case int() if kind == "duration":
            return durations.write(value)
        case tuple():
            return ",".join(value)
        case _:
            return str(value)
