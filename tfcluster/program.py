"""What a command runs: a Python program that the runtime can be put around, or not.

Pure text work on argv lists; knows nothing of tasks or hosts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
# python(1): flags may be joined (-uB); the last letter of a word may take a value,
# which is the rest of the word or the next one.
_OPTION = re.compile(
    r"-(?P<flags>[bBdEhiIOPqRsSuvVx?]*)(?:(?P<valued>[mcWX])(?P<value>.*))?", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Program:
    """A command taken apart.

    ``program`` has the arguments of ``tfcluster.runtime.task.bootstrap run``. It is
    empty where the command is not a Python program: then it is executed as it is.
    """

    argv: tuple[str, ...]
    python: str | None = None
    options: tuple[str, ...] = ()
    program: tuple[str, ...] = ()

    @property
    def script(self) -> str | None:
        """The script's path as given, where the program is one."""
        first = self.program[0] if self.program else "-"
        return None if first in ("-m", "-c", "-") else first

    @property
    def injectable(self) -> bool:
        """The runtime can be put around it."""
        return bool(self.program)

    @property
    def forkable(self) -> bool:
        """A warm interpreter can run it: no options change how the interpreter is."""
        return self.injectable and set(self.options) <= {"-u"}


def parse(command: Sequence[str], python: str) -> Program:
    """Take a command apart; a leading ``python`` or ``python3`` means ``python``."""
    head, rest = command[0], list(command[1:])
    if not _PYTHON.fullmatch(PurePath(head).name):
        return Program(argv=tuple(command))
    interpreter = python if head in ("python", "python3") else head
    opaque = Program(argv=(interpreter, *rest), python=interpreter)
    options: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "-m", "-c"):
        option = _OPTION.fullmatch(rest.pop(0))
        if option is None:
            return opaque
        flags, valued, value = option.group("flags", "valued", "value")
        if flags:
            options.append(f"-{flags}")
        if valued is None:
            continue
        if not value and not rest:
            return opaque
        words = [f"-{valued}", value or rest.pop(0)]
        if valued in "mc":
            rest[:0] = words
            break
        options += words
    if not rest or rest[0] == "-" or (rest[0] in ("-m", "-c") and len(rest) < 2):
        return opaque
    return Program(opaque.argv, interpreter, tuple(options), tuple(rest))
