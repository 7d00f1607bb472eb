"""Lets only the chief print what a program prints.

``runtime.chief_only`` enables this.
"""

from __future__ import annotations

import builtins
import functools
import sys
from typing import Any

from tfcluster.runtime.context import Context


def silence_print(context: Context) -> None:
    """Make ``print`` do nothing on other ranks, except to files.

    All ranks still write errors, warnings and log messages.
    """
    if context.is_chief or "print" not in context.options.chief_only:
        return
    original = builtins.print

    @functools.wraps(original)
    def silent(*values: Any, file: Any = None, **kwargs: Any) -> None:
        if file not in (None, sys.stdout, sys.stderr):
            original(*values, file=file, **kwargs)

    builtins.print = silent
