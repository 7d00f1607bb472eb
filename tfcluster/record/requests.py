"""Requests from other commands to a run's launcher, as files in the run's folder.

The launcher answers with events in the record, and checks requests that change a run.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tfcluster.base.errors import ResourceError
from tfcluster.protocol.commands import Command, decode
from tfcluster.protocol.frames import ProtocolError, encode
from tfcluster.protocol.wire import parse
from tfcluster.record.files import read_json, replace_json
from tfcluster.record.paths import ELSEWHERE, FOLDER_MODE, RunPaths

_END = ".json"
_MOST = 100
"""How many requests are taken at a time; further requests wait."""


def ask(paths: RunPaths, request: Command) -> str:
    """Leave a request for the launcher; returns its id. Raises ResourceError."""
    number = os.urandom(8).hex()
    try:
        paths.requests.mkdir(FOLDER_MODE, exist_ok=True)
        replace_json(_file(paths, number), parse(encode(request)), durable=False)
    except OSError as error:
        raise ResourceError(
            f"cannot write to {paths.requests}: {error.strerror}", hint=ELSEWHERE
        ) from error
    return number


def withdraw(paths: RunPaths, number: str) -> None:
    """Remove a request that nobody has taken."""
    _file(paths, number).unlink(missing_ok=True)


def pop_requests(paths: RunPaths) -> list[tuple[str, Command]]:
    """Remove and return the waiting requests, with their ids. Never raises."""
    try:
        names = sorted(os.listdir(paths.requests))  # noqa: PTH208 - names suffice
    except OSError:
        return []
    requests = []
    for name in names[:_MOST]:
        if not name.endswith(_END) or name.startswith("."):
            continue
        path = paths.requests / name
        request = read_json(path)
        try:
            path.unlink()
        except OSError:
            continue  # otherwise it would be taken again and again
        with suppress(ProtocolError):
            requests.append((name.removesuffix(_END), decode(request or {})))
    return requests


def _file(paths: RunPaths, number: str) -> Path:
    return paths.requests / f"{number}{_END}"
