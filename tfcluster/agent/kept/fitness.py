"""Whether a kept interpreter can stand in for one that would be started now."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from tfcluster.agent.kept.process_attributes import attributes_of, obstacle
from tfcluster.agent.light_dataclasses import dataclass
from tfcluster.agent.spawn import Environment
from tfcluster.import_variables import difference, relative_folder
from tfcluster.wire import Frame

Stamp = list[int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An interpreter that a run needs."""

    argv: Sequence[str]
    env: Environment
    sure: bool = True
    """False if setup lines may still change the environment and what ``argv`` means."""


def misfit(about: Frame, wanted: Wanted) -> str | None:
    """Why the interpreter with the description ``about`` cannot be used, or None."""
    try:
        argv, theirs = list(wanted.argv), list(about["argv"])
        if argv[1:-1] != theirs[1:-1]:
            return "it was started by another copy of tfcluster, or by a changed one"
        if wanted.sure and (reason := _other_start(about, wanted)):
            return reason
        return obstacle(attributes_of(os.getpid()), attributes_of(int(about["pid"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        # It has ended, or another version started it, whose description differs.
        return f"it cannot be examined: {type(error).__name__}: {error}"


def _other_start(about: Frame, wanted: Wanted) -> str | None:
    env = text_environment(wanted.env)
    now, then = program(wanted.argv[0], env), about["program"]
    if now is None:
        return f"there is no program {wanted.argv[0]!r} here"
    if now["path"] != then["path"]:
        return f"it runs {then['path']}, this run uses {now['path']}"
    if now["stamps"] != then["stamps"]:
        return f"{now['path']} has changed since it was started"
    if name := relative_folder(env):
        return f"{name} contains a relative folder"
    return difference(env, about["env"])


def text_environment(env: Environment) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}


def program(word: str, env: Mapping[str, str]) -> dict[str, object] | None:
    """The file that ``word`` executes and its stamps; None if there is no such file."""
    if "/" in word:
        path = word if word.startswith("/") else None
    else:
        folders = env.get("PATH", os.defpath).split(os.pathsep)
        files = (f"{folder}/{word}" for folder in folders if folder.startswith("/"))
        path = next((file for file in files if os.access(file, os.X_OK)), None)
    if path is None or (stamp := _stamp(path)) is None:
        return None
    # With this file, the interpreter belongs to a virtual environment.
    config = os.path.join(os.path.dirname(os.path.dirname(path)), "pyvenv.cfg")
    return {"path": path, "stamps": [stamp, _stamp(config)]}


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]
