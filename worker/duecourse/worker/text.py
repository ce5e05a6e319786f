"""Text cut to a bound in bytes."""


def cut(text: str, limit: int) -> str:
    """Return `text`, or as much of it as fits into `limit` bytes of UTF-8 with a mark of the cut.

    What has no UTF-8 form (lone surrogates) is escaped.
    """
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= limit:
        return encoded.decode()
    return encoded[: limit - 3].decode("utf-8", "ignore") + "…"
