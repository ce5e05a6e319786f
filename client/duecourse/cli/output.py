"""What commands show: tables and colours for a terminal, tab-separated lines for a pipe, JSON for programs.

Answers go to standard output, everything else to standard error. Text that others wrote is shown with its control
characters escaped, so that it can neither move the cursor nor fake a line.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def printable(text: str) -> str:
    """Escape what is not to be printed as it is."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def is_terminal() -> bool:
    """Tell whether a person looks at standard output."""
    return sys.stdout.isatty()


def say(line: str) -> None:
    """Show a line of an answer."""
    sys.stdout.write(f"{printable(line)}\n")


def tell(line: str) -> None:
    """Show a line that is not part of an answer."""
    sys.stderr.write(f"{printable(line)}\n")
    sys.stderr.flush()


def flush() -> None:
    """Have what was shown seen at once, also through a pipe."""
    sys.stdout.flush()


def say_json(value: Any) -> None:
    """Show one JSON value on one line."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def say_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Show rows: to a person as a table without empty columns, else one tab-separated line each, without a heading."""
    if not is_terminal():
        for row in rows:
            sys.stdout.write("\t".join(map(printable, row)) + "\n")
        return
    from rich import console

    screen = console.Console()
    screen.print()
    screen.print(table_of(columns, rows))
    screen.print()


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
    """Return rows as a table for a terminal."""
    from rich import box, console, table, text

    from duecourse.cli import column_widths

    columns_of_cells = zip(*(map(printable, row) for row in rows), strict=True)
    kept = [(column, *cells) for column, cells in zip(columns, columns_of_cells, strict=False) if any(cells)]
    screen = console.Console().width
    gaps = len(kept) - 1
    widths = column_widths.fit(kept, screen - gaps)
    padding = 1 if sum(widths) + 2 * gaps <= screen else 0
    shown = table.Table(
        box=box.SIMPLE_HEAD, padding=(0, padding, 0, 0), pad_edge=False, show_edge=False, header_style="bold"
    )
    for (column, *_), width in zip(kept, widths, strict=True):
        shown.add_column(column, overflow="fold", width=width)
    for row in zip(*(cells for _, *cells in kept), strict=True):
        shown.add_row(*(text.Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return shown


def say_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Show names and values, those that have one."""
    if not is_terminal():
        for name, value in pairs:
            if value:
                sys.stdout.write(f"{name}\t{printable(value)}\n")
        return
    from rich import console

    console.Console().print(grid_of(pairs))


def grid_of(pairs: Iterable[tuple[str, str]]) -> "Table":
    """Return names and values, those that have one, for a terminal."""
    from rich import table, text

    shown = table.Table.grid(padding=(0, 2))
    for name, value in pairs:
        if value:
            shown.add_row(text.Text(name, style="bold"), text.Text(printable(value), style=_STYLES.get(value, "")))
    return shown


_STYLES = {
    "succeeded": "green",
    "running": "cyan",
    "leased": "cyan",
    "retry_wait": "yellow",
    "failed": "red",
    "cancelled": "dim",
    "led": "green",
    "loading": "yellow",
    "unled": "red",
    "eligible": "green",
    "no answer": "red",
}
