"""What ``ps`` and ``top`` show for a process of ours, in place of a Python command.

The kernel reads a command line out of the memory of the process itself, so a process
changes what others see by writing there (proc(5): /proc/pid/cmdline, /proc/pid/mem and
the fields arg_start and arg_end of /proc/pid/stat). Standard library only.
"""

from __future__ import annotations

import os

_ARG_START, _ARG_END = 47, 48
"""Fields of /proc/self/stat, counted from 0."""
_COMM_BYTES = 15
"""The kernel cuts a process's short name there (PR_SET_NAME)."""


def set_title(title: str, short: str) -> None:
    """Show ``title`` as the command line, and ``short`` as the name of the command.

    ``title`` is cut to the length of the present command line. Nothing changes where
    /proc is missing or does not permit it: a title is never worth an error.
    """
    try:
        _write_command_line(title)
        with open("/proc/self/comm", "wb") as comm:  # noqa: PTH123 - the agent starts with it
            comm.write(os.fsencode(short)[:_COMM_BYTES])
    except (OSError, ValueError, IndexError):
        return


def _write_command_line(title: str) -> None:
    with open("/proc/self/stat", "rb") as stat:  # noqa: PTH123 - the agent starts with it
        # The second field is a name in parentheses that may have any character.
        rest = stat.read().rpartition(b")")[2].split()
    start, end = (int(rest[field - 2]) for field in (_ARG_START, _ARG_END))
    room = end - start
    # The last byte stays NUL: otherwise the kernel goes on into the environment.
    text = os.fsencode(title)[: room - 1].ljust(room, b"\0")
    memory = os.open("/proc/self/mem", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(memory, text, start)
    finally:
        os.close(memory)
