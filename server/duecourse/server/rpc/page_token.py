"""Page tokens: where a listing goes on, bound to what is listed.

A token is opaque to clients: URL-safe base64 of a version byte, a digest over the namespace, the filters and the id to
go on after, and that id. One that was altered, or that belongs to another listing, is refused. It grants nothing (the
namespace is the request's, not the token's), so the digest needs no key and every node accepts every node's tokens.
"""

import base64
import binascii
from hashlib import blake2b
from typing import Final

from duecourse.model.names import is_name
from duecourse.server.core.errors import InvalidField
from duecourse.server.storage import TaskQuery

_VERSION: Final = b"\x01"
_DIGEST_BYTES: Final = 12
_MAX_LENGTH: Final = 512
_PROBLEM: Final = "a token that this listing has answered, with the same filters, is wanted"


def make(query: TaskQuery, after: str) -> str:
    """Return the token for the page after an id."""
    return base64.urlsafe_b64encode(_VERSION + _digest(query, after) + after.encode()).rstrip(b"=").decode()


def read(token: str, query: TaskQuery) -> str:
    """Return the id to go on after. Raises InvalidField if the token was not made for this listing."""
    if len(token) > _MAX_LENGTH or not token.isascii():
        raise InvalidField("page_token", _PROBLEM)
    try:
        decoded = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        after = decoded[1 + _DIGEST_BYTES :].decode()
    except (binascii.Error, UnicodeDecodeError):
        raise InvalidField("page_token", _PROBLEM) from None
    if not is_name(after) or decoded[: 1 + _DIGEST_BYTES] != _VERSION + _digest(query, after):
        raise InvalidField("page_token", _PROBLEM)
    return after


def _digest(query: TaskQuery, after: str) -> bytes:
    filters = (
        query.namespace,
        query.queue,
        sorted(state.value for state in query.states),
        query.run_at_from,
        query.run_at_before,
        after,
    )
    return blake2b(repr(filters).encode(), digest_size=_DIGEST_BYTES, person=b"duecourse page").digest()
