"""SQL from the files beside this module: whole migrations, and statements by name.

A file of statements holds blocks that each begin with a line `-- name: <name>`; `{name}` stands for an earlier block,
or for one of another file that is given.
"""

import re
from collections.abc import Mapping
from importlib import resources
from typing import Final

_FOLDER: Final = resources.files("duecourse.server.storage")
_NAME: Final = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_REFERENCE: Final = re.compile(r"\{(\w+)\}")


def statements(file: str, known: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """Return the statements of a file in `sql/`, by name; it may refer to `known` ones."""
    _, *parts = _NAME.split((_FOLDER / "sql" / file).read_text(encoding="utf-8"))
    found = dict(known or {})
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        found[name] = _REFERENCE.sub(lambda reference: found[reference[1]], text.strip())
    return found


def migrations() -> Mapping[str, bytes]:
    """Return the migrations by file name, in order."""
    files = [file for file in (_FOLDER / "migrations").iterdir() if file.name.endswith(".sql")]
    return {file.name: file.read_bytes() for file in sorted(files, key=lambda file: file.name)}
