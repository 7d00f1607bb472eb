"""Checks patterns of files: none may lead out of its folder. Pure."""

from __future__ import annotations


def pattern_problem(pattern: str) -> str | None:
    """What is wrong with a pattern of results, as the end of a sentence; or None."""
    if pattern.startswith(("/", "~")):
        return "is not below the workdir"
    parts = pattern.removesuffix("/").split("/")
    if ".." in parts:
        return "leads out of the workdir"
    if "\0" in pattern or any(part in ("", ".") for part in parts):
        return "matches nothing"
    return None
