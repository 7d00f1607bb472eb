"""Runs named checks on every rank; prints their results as JSON on the last line."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping

RANK = int(os.environ.get("TFCLUSTER_RANK", "0"))
SIZE = int(os.environ.get("TFCLUSTER_SIZE", "1"))


def run(namespace: Mapping[str, object]) -> None:
    """Call every ``check_*`` in order. A result is "ok" or the text of an exception."""
    found = {}
    for name, check in list(namespace.items()):
        if name.startswith("check_") and isinstance(check, Callable):  # type: ignore[arg-type]
            found[name.removeprefix("check_")] = outcome(check)  # type: ignore[arg-type]
    print(json.dumps(found))


def outcome(check: Callable[[], object]) -> str:
    try:
        check()
    except BaseException:
        return traceback.format_exc()
    return "ok"
