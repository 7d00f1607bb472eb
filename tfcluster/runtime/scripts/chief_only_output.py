"""What a program prints by itself, printed by the chief alone.

``runtime.chief_only`` names it.
"""

from __future__ import annotations

import builtins
import functools
import sys
from typing import Any

from tfcluster.runtime.context import Context


def silence_print(context: Context) -> None:
    """Have ``print`` say nothing on other ranks; to a file it still writes.

    Errors, warnings and what the logging module writes are said by all.
    """
    if context.is_chief or "print" not in context.options.chief_only:
        return
    original = builtins.print

    @functools.wraps(original)
    def silent(*values: Any, file: Any = None, **kwargs: Any) -> None:
        if file not in (None, sys.stdout, sys.stderr):
            original(*values, file=file, **kwargs)

    builtins.print = silent
