"""How wide the columns of a table are on a screen.

Each is as wide as what it holds, if all of them fit. Otherwise the widest give way first: cells are broken between
words, and only if that is not enough within them. What comes first in a row is copied from here into the next command:
ids of the usual length are not broken.
"""

from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len

_ID: Final = len("01890a5d-ac96-774b-bcce-b302099a8057")
_NARROWEST: Final = 8


def fit(columns: Sequence[Sequence[str]], screen: int) -> list[int]:
    """Return the width of each column, given its cells, so that together they are at most as wide as the screen.

    They are wider if no column can be narrowed any more.
    """
    widths = [max(map(cell_len, cells), default=0) for cells in columns]
    between_words = [max((cell_len(word) for cell in cells for word in cell.split()), default=0) for cells in columns]
    within_words = [min(word, _NARROWEST) for word in between_words]
    for least in (between_words, within_words):
        if widths and widths[0] <= _ID:
            least[0] = widths[0]
        _narrow(widths, least, screen)
    return widths


def _narrow(widths: list[int], least: Sequence[int], screen: int) -> None:
    while sum(widths) > screen:
        wide = [index for index, width in enumerate(widths) if width > least[index]]
        if not wide:
            return
        # Of several the last: what comes last is mostly prose, which bears it best.
        widths[max(wide, key=lambda index: (widths[index], index))] -= 1
