"""Checks the arguments of ``launch``, and turns them into settings. Pure.

The configuration checks their values.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfcluster.errors import Problem

_SETTING = "a number, a text, a list or a dictionary"


def problems(given: Mapping[str, Any]) -> list[Problem]:
    """What has a wrong type or does not fit together; the place of each is an argument.

    If only settings are wrong, nothing is reported here: ``launch`` reports problems of
    settings together with those of the configuration.
    """
    mistyped = [
        Problem(name, f"must be {what}; found {_shown(given[name])}")
        for name, (is_good, what) in _TYPES.items()
        if given.get(name) is not None and not is_good(given[name])
    ]
    found = [*_misused(given), *mistyped]
    if found and _has_names(given.get("settings")):
        found += overrides(given["settings"])[1]
    return found


def words(command: str | Sequence[Any]) -> list[str]:
    """The words of a command that has no ``problems``."""
    if isinstance(command, str):
        return shlex.split(command)
    return [str(word) for word in command]


def overrides(settings: Mapping[str, Any]) -> tuple[list[str], list[Problem]]:
    """``KEY=VALUE`` as for ``--set``: JSON is YAML."""
    texts, problems = [], []
    for key, value in settings.items():
        if "env" in key.split(".")[:-1] and value is not None:
            texts.append(f"{key}={value}")
            continue
        try:
            text = json.dumps(value, ensure_ascii=False, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            problems.append(Problem(f"settings[{key!r}]", str(error), _SETTING))
        else:
            texts.append(f"{key}={text}")
    return texts, problems


def _misused(given: Mapping[str, Any]) -> list[Problem]:
    config, command = given.get("config"), given.get("command")
    problems = []
    if (config is None) == (command is None):
        what = (
            "both a file and a command" if config is not None else "nothing to launch"
        )
        hint = 'launch("cluster.yaml"), or launch(command=["python", "train.py"], ...)'
        problems.append(Problem("launch", what, hint))
    elif config is None and given.get("workers") is None:
        hint = 'launch(command=["python", "train.py"], workers=4)'
        problems.append(Problem("workers", "is missing: how many run it?", hint))
    if config is not None and given.get("hosts") is not None:
        hint = 'settings={"hosts": ["node1", "node2"]}'
        problems.append(Problem("hosts", "is for a command, not for a file", hint))
    if config is None and given.get("arguments"):
        hint = "append them to the command"
        problems.append(Problem("arguments", "are for a file's command", hint))
    return problems


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_command(value: Any) -> bool:
    if not isinstance(value, str):
        return _is_list(value)
    try:
        shlex.split(value)
    except ValueError:
        return False
    return True


def _is_hosts(value: Any) -> bool:
    return _is_text(value) or (_is_list(value) and all(map(_is_text, value)))


def _has_names(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value))


def _is_environment(value: Any) -> bool:
    return _has_names(value) and all(map(_is_text, value.values()))


_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "config": (lambda v: isinstance(v, str | os.PathLike), "a path"),
    "command": (_is_command, "a list of words, or a text whose quotes match"),
    "hosts": (_is_hosts, "a text, or a list of texts"),
    "backend": (_is_text, "a text"),
    "name": (_is_text, "a text"),
    "arguments": (_is_list, "a list of words"),
    "settings": (_has_names, "a dictionary whose keys are texts"),
    "environ": (_is_environment, "a dictionary of texts"),
}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else type(value).__name__


def _plain(value: Any) -> Any:
    """A path as text, a NumPy scalar as a number."""
    if isinstance(value, os.PathLike):
        return os.fsdecode(os.fspath(value))
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no value of a configuration")
