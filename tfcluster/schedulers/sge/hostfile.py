"""Parses the file that ``$PE_HOSTFILE`` names: hosts and their slots. Pure."""

from __future__ import annotations

import re


class HostfileError(ValueError):
    """The text is not a host file; the message says why."""


_MAX_DIGITS = 9
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
"""A host's name; one that begins with ``-`` would be an option of qrsh."""


def slots_by_host(text: str) -> dict[str, int]:
    """Host -> slots, in the file's order, with names exactly as in the file.

    A line is ``HOST SLOTS [QUEUE@HOST [PROCESSORS]]`` (sge_pe(5)): the queue and the
    processors (``UNDEFINED`` or ``0,1:0,2``) are not needed here, and some variants
    leave them out. A host with slots in several queues has a line for each, so slots
    are summed. Raises HostfileError if the text is not such a file.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        shown = f"line {number}: {line[:80]!r}"
        if len(words) < 2:
            raise HostfileError(f"{shown} has too few fields: expected HOST SLOTS")
        name, count = words[:2]
        if not _NAME.fullmatch(name):
            raise HostfileError(f"{shown} does not begin with a host name")
        if not count.isascii() or not count.isdecimal() or len(count) > _MAX_DIGITS:
            raise HostfileError(f"{shown}: the second field is not a number of slots")
        slots[name] = slots.get(name, 0) + int(count)
    granted = {name: count for name, count in slots.items() if count}
    if not granted:
        raise HostfileError("lists no host with slots")
    return granted
