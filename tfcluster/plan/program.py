"""Finds out whether a command is a Python program that the runtime can wrap.

Only parses argv lists. Pure; knows nothing about tasks or hosts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from tfcluster.base.light_dataclasses import dataclass
from tfcluster.plan.model import Interpreter

_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
# python(1): flags may be joined (-uB); the last letter of a word may take a value,
# which is the rest of that word or the next word.
_OPTION = re.compile(
    r"-(?P<flags>[bBdEhiIOPqRsSuvVx?]*)(?:(?P<valued>[mcWX])(?P<value>.*))?", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Program:
    """A parsed command."""

    argv: tuple[str, ...]
    python: Interpreter = ()
    """The interpreter; empty if the command is not known to be Python."""
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    """The arguments for ``tfcluster.runtime.task.bootstrap``, such as ``run train.py``.

    Empty if the command is not a Python program, which is executed as it is.
    """

    @property
    def forkable(self) -> bool:
        """Whether a warm interpreter can run it: no option changes the interpreter."""
        return bool(self.arguments) and set(self.options) <= {"-u"}


def parse(command: Sequence[str], python: Interpreter) -> Program:
    """Parse a command; ``python`` replaces a leading ``python`` or ``python3``."""
    head, rest = command[0], list(command[1:])
    if not _PYTHON.fullmatch(PurePath(head).name):
        return Program(argv=tuple(command))
    interpreter = python if head in ("python", "python3") else (head,)
    opaque = Program(argv=(*interpreter, *rest), python=interpreter)
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
    return Program(opaque.argv, interpreter, tuple(options), ("run", *rest))
