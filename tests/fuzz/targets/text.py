"""What targets that parse text have in common."""

from __future__ import annotations

from collections.abc import Sequence


def text_of(data: bytes) -> str:
    """As programs of tfcluster decode the output of other programs."""
    return data.decode("utf-8", "backslashreplace")


def bytes_of(*texts: str) -> Sequence[bytes]:
    """Seeds from texts."""
    return [text.encode("utf-8", "surrogatepass") for text in texts]
