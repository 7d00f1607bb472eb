"""Imports paramiko, and not what paramiko would import in vain.

That is ``invoke``, with half of the standard library in its wake, for a ``Match exec``
of ssh_config; those files are read here without paramiko, which does without it.
"""

from __future__ import annotations

import sys

_MISSING = "invoke" not in sys.modules
if _MISSING:
    sys.modules["invoke"] = None  # type: ignore[assignment] # as importlib has it

import paramiko  # noqa: E402, F401 - only now, and for whoever imports it next

if _MISSING:
    del sys.modules["invoke"]
