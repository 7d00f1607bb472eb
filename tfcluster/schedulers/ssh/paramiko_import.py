"""Imports paramiko without ``invoke``, which paramiko imports needlessly.

paramiko uses ``invoke``, which imports half of the standard library, for ``Match exec``
in ssh_config. We parse ssh_config ourselves, and paramiko works without it.
"""

from __future__ import annotations

import sys

_MISSING = "invoke" not in sys.modules
if _MISSING:
    sys.modules["invoke"] = None  # type: ignore[assignment] # makes imports fail

import paramiko as paramiko  # noqa: E402 - after what makes it cheap

if _MISSING:
    del sys.modules["invoke"]
