"""The file that ``$PE_HOSTFILE`` names: who gave how many slots. Pure."""

from __future__ import annotations

import re

from tfcluster.errors import StartError

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
"""A host's name; what begins with ``-`` would be an option of qrsh."""


def slots_by_host(text: str) -> dict[str, int]:
    """Slots by host, in the file's order, under exactly the names that it uses.

    A line is ``HOST SLOTS [QUEUE@HOST [PROCESSORS]]`` (sge_pe(5)): the queue and the
    processors (``UNDEFINED`` or ``0,1:0,2``) are not needed here, and some variants
    leave them out. A host with slots in several queues has a line for each, so slots
    are summed. Raises StartError for what is no such file.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        name, count = words[0], words[1] if len(words) > 1 else ""
        if not _NAME.fullmatch(name) or not count.isascii() or not count.isdecimal():
            raise StartError(
                f"PE_HOSTFILE, line {number}: {line[:80]!r} is not HOST SLOTS ..."
            )
        slots[name] = slots.get(name, 0) + int(count)
    granted = {name: count for name, count in slots.items() if count}
    if not granted:
        raise StartError("PE_HOSTFILE names no host with a slot")
    return granted
