"""Finds the environment variables that a program's source sets. Pure.

The source is read before the program's first line runs, so that a task which needs a
fresh interpreter for these variables gets it before the program has done anything.
Variables that are set in other ways are noticed when they are set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_IMPORT = re.compile(r"^(?:import|from) (?:tensorflow|keras|tf_keras)\b", re.MULTILINE)
_SETTING = re.compile(
    r"^[^#\n]*(?:environ(?P<always>\[)|environ\.setdefault\(|putenv\()"
    r"""\s*["'](?P<name>\w+)["']\s*(?:\]\s*=(?!=)|,)\s*(?:["'](?P<value>.*?)["'])?""",
    re.MULTILINE,
)


def variables_set(source: str, environ: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that ``source`` may set before its first import of TensorFlow.

    A value is None if it is not a literal. Variables that ``environ`` has count only if
    they are certainly set.
    """
    end = _IMPORT.search(source)
    head = source[: end.start()] if end else source
    return {
        setting["name"]: setting["value"]
        for setting in _SETTING.finditer(head)
        if setting["always"] or setting["name"] not in environ
    }
