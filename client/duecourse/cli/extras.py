"""What to say when a command needs a part of Duecourse that is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from duecourse.cli import exits


@contextmanager
def needed(extra: str, what_for: str) -> Iterator[None]:
    """Explain an import that fails: which extra brings the missing library."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("duecourse."):
            raise
        line = f"this {what_for}, for which {error.name} is missing: {how_to_get(extra)}"
        raise typer.Exit(exits.fail(line)) from None


def how_to_get(extra: str) -> str:
    """Say how extras, separated by commas, are installed: whoever has a clone gets them from there."""
    return f"pip install 'duecourse[{extra}]', or in a clone pip install '.[{extra}]'"
