"""Splits a command as a POSIX shell would, and refuses what needs a shell. Pure.

No shell ever runs a command: what only a shell could do is an error here, not a
surprise later.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import PurePath

from tfcluster.plan.model import Interpreter

_WITH_SHELL = 'write ["bash", "-c", "..."]'

_SINGLE = re.compile(r"'[^']*'")
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_OPERATOR = re.compile(r"\|\|?|&&?|;|(?:(?<![0-9])[0-9]+)?[<>]{1,2}&?|`|\$\(|[()]")
_HOME = re.compile(r"(?:(?<=\s)|^)~(?=/|\s|$)")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)=")


class CommandError(ValueError):
    """A command that cannot be split; ``offset`` is the index of the problem."""

    def __init__(self, message: str, hint: str | None, offset: int) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.offset = offset


def split_command(text: str) -> list[str]:
    """The words of ``text``. Raises CommandError for an open quote, if there are no
    words, and for syntax that needs a shell."""
    # A backslash at the end of a line continues it.
    joined = text.replace("\\\n", "")
    try:
        words = shlex.split(joined)
    except ValueError as error:
        blank = _blanked(_QUOTED, joined)
        places = [at for at in (blank.find("'"), blank.find('"')) if at >= 0]
        offset = min(places, default=len(joined) - 1)
        message = "a quote is not closed" if "quot" in str(error) else str(error)
        raise CommandError(message, None, offset) from error
    if not words or not words[0]:
        raise CommandError("the command is empty", None, 0)
    _refuse_shell(joined)
    return words


def _blanked(pattern: re.Pattern[str], text: str) -> str:
    """``text`` with every match replaced by as many underscores."""
    return pattern.sub(lambda match: "_" * len(match[0]), text)


def _refuse_shell(text: str) -> None:
    unquoted = _blanked(_QUOTED, text)
    if assigned := _ASSIGNMENT.match(unquoted):
        hint = f"env: {{{assigned[1]}: ...}}"
        message = f"{assigned[1]}=... before a command needs a shell"
        raise CommandError(message, f"write {hint}", assigned.start(1))
    if operator := _OPERATOR.search(unquoted):
        message = f"{operator[0]!r} needs a shell"
        raise CommandError(
            message,
            f"no shell runs the command: quote it, or {_WITH_SHELL}",
            operator.start(),
        )
    if home := _HOME.search(unquoted):
        message = "'~' is not expanded"
        raise CommandError(message, "write ${HOME}", home.start())
    # As in a shell, a dollar is literal inside single quotes.
    single = _blanked(re.compile(rf"{_SINGLE.pattern}|\\.|\$\$"), text)
    if bare := re.search(r"\$([A-Za-z_][A-Za-z0-9_]*)", single):
        hint = f"write ${{{bare[1]}}}, or {_WITH_SHELL}"
        raise CommandError(f"{bare[0]} is not expanded", hint, bare.start())


_PYTHON = re.compile(r".*python[0-9.]*")
_DAEMONS = ("docker", "podman", "nerdctl")
_ELSEWHERE = ("ssh", "srun", "qrsh", "mpirun", "mpiexec")


def name_problem(name: str) -> tuple[str, str | None] | None:
    """What is wrong with a command given as text, not as a list; None: nothing."""
    words = name.split()
    if len(words) < 2 or "/" in words[-1] or not _PYTHON.fullmatch(words[-1]):
        return None
    return "a command must be a list of words", f"write {json.dumps(words)}"


def wrapper_problem(words: Interpreter) -> tuple[str, str | None] | None:
    """What is wrong with a command of several words, and a hint; None: nothing."""
    program, interpreter = PurePath(words[0]).name, PurePath(words[-1]).name
    if " " in program:
        text = json.dumps([*words[0].split(), *words[1:]])
        return f"{words[0]!r} is several words", f"write {text}"
    if program in _DAEMONS:
        return (
            f"{program} starts Python below a process of its own, where tfcluster "
            "can neither signal nor end it",
            "use apptainer, enroot or bwrap",
        )
    if program in _ELSEWHERE:
        message = f"{program} starts processes itself, which tfcluster does"
        return message, "list hosts under 'hosts', or use 'backend'"
    if not _PYTHON.fullmatch(interpreter):
        message = f"the last word must be the interpreter, not {words[-1]!r}"
        return message, 'like ["nice", "-n5", "python"]'
    if any(word.startswith("~") for word in words):
        return "'~' is not expanded in a command", "write ${HOME}"
    return None
