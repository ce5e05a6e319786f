"""The alphabet of ids and names: what a client may call its things."""

import re
from typing import Final

from duecourse.model import bounds

ALPHABET: Final = "A-Z a-z 0-9 . _ : / @ + = , -"
_NAME: Final = re.compile(rf"[A-Za-z0-9._:/@+=,\-]{{1,{bounds.MAX_NAME_BYTES}}}", re.ASCII)
_matches = _NAME.fullmatch


def is_name(text: str) -> bool:
    """Tell whether `text` is a well-formed id or name."""
    return _matches(text) is not None and text not in (".", "..")
