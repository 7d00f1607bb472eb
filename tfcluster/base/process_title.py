"""Sets what ``ps`` and ``top`` show for our processes, instead of a Python command.

The kernel reads a command line from the process's own memory, so writing there changes
what others see (proc(5): /proc/pid/cmdline and the fields arg_start and arg_end).
"""

from __future__ import annotations

import os

_ARG_START, _ARG_END = 47, 48
"""Fields of /proc/self/stat, counted from 0."""
_COMM_BYTES = 15
"""The kernel truncates a process's short name to this length (PR_SET_NAME)."""


def set_title(title: str, short: str) -> None:
    """Show ``title`` (cut to the old length) and ``short`` in ``ps``, if possible."""
    try:
        _write_command_line(title)
        with open("/proc/self/comm", "wb") as comm:  # noqa: PTH123 - the agent starts with it
            comm.write(os.fsencode(short)[:_COMM_BYTES])
    except (OSError, ValueError, IndexError):
        return


def _write_command_line(title: str) -> None:
    with open("/proc/self/stat", "rb") as stat:  # noqa: PTH123 - the agent starts with it
        # The second field is a name in parentheses that may contain any character.
        rest = stat.read().rpartition(b")")[2].split()
    start, end = (int(rest[field - 2]) for field in (_ARG_START, _ARG_END))
    room = end - start
    # The last byte stays NUL: otherwise the kernel reads on into the environment.
    text = os.fsencode(title)[: room - 1].ljust(room, b"\0")
    memory = os.open("/proc/self/mem", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(memory, text, start)
    finally:
        os.close(memory)
