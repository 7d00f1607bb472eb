"""Finds commands for ``python`` that cannot work. Pure."""

from __future__ import annotations

import json
import re
from pathlib import PurePath

from tfcluster.model import Interpreter

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
