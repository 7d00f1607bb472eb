"""``launch`` and ``attach``: from arguments to a run."""

from __future__ import annotations

import json
import os
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfcluster import config as configuration
from tfcluster.api import launcher_child
from tfcluster.api.run_handle import Run
from tfcluster.base.errors import ConfigError, Problem
from tfcluster.plan.model import Description

IMPORTING = "TFCLUSTER_IMPORTING_MAIN"
"""Set while a rank imports the script that called ``run``."""
_CALLER = 4
"""How many frames above us the program is that calls ``launch`` or ``run``."""


def launch(
    config: str | os.PathLike[str] | None = None,
    *,
    command: str | Sequence[str] | None = None,
    workers: int | None = None,
    ps: int | None = None,
    hosts: str | Sequence[str] | None = None,
    backend: str | None = None,
    name: str | None = None,
    arguments: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    detach: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Run:
    """Start a run, as ``tfcluster launch`` does, and return once it has begun.

    Args:
        config: A cluster.yaml.
        command: Instead of a file: what ``workers`` workers run. A text is split into
            words as a shell would split it; no shell runs it.
        workers: The number of workers; with a file, it replaces the file's.
        ps: The number of parameter servers; with a file, it replaces the file's.
        hosts: For ``command``: SSH hosts, like ``["node1:4", "node2:4"]``.
        backend: ``local``, ``ssh``, ``slurm`` or another scheduler.
        name: The run's name; only one active run can have it.
        arguments: Words that are appended to the file's command.
        settings: Values that replace those of the file, by dotted keys, as ``--set``
            does: ``{"tasks.worker": 4, "env.LR": "1e-3"}``. None removes a key.
        detach: The run continues after this process ends. Otherwise it is stopped.
        environ: The environment of the launcher; default: this process's environment.

    Raises:
        TfclusterError: What the command line would report: ConfigError with all
            problems of the configuration, ActiveRunError, StartError and others. Then
            nothing is left running. A later failure is in the run's outcome.
    """
    return begin(
        config,
        command=command,
        workers=workers,
        ps=ps,
        hosts=hosts,
        backend=backend,
        name=name,
        arguments=arguments,
        settings=settings,
        detach=detach,
        environ=environ,
    )


def begin(
    config: str | os.PathLike[str] | None = None,
    *,
    detach: bool,
    environ: Mapping[str, str] | None,
    scratch: Path | None = None,
    usual_name: str | None = None,
    **options: Any,
) -> Run:
    """See ``launch``. The launcher removes ``scratch`` if we die before it ends.

    ``usual_name`` is the name of a run without ``name``; other runs may have it, too.
    """
    _refuse_misfits({"config": config, "environ": environ, **options})
    environ = dict(os.environ if environ is None else environ)
    _refuse_recursion(environ)
    description = _described(config, environ, **options)
    if usual_name is not None and not description.named:
        description = replace(description, name=configuration.as_name(usual_name))
    run, child = launcher_child.start(
        description, environ, detach=detach, scratch=scratch
    )
    return Run(run, environ, child)


def attach(run: str | None = None, *, environ: Mapping[str, str] | None = None) -> Run:
    """The run with an id, a unique prefix of an id, or a name; default: the newest run.

    The run may be over, and it does not matter who launched it. Raises ConfigError if
    there is no such run.
    """
    return Run(run, environ)


def _described(
    config: str | os.PathLike[str] | None,
    environ: Mapping[str, str],
    *,
    command: str | Sequence[str] | None,
    workers: int | None,
    ps: int | None,
    hosts: str | Sequence[str] | None,
    backend: str | None,
    name: str | None,
    arguments: Sequence[str],
    settings: Mapping[str, Any] | None,
) -> Description:
    wanted = dict(settings or {})
    if backend:
        wanted["backend"] = backend
    overrides, problems = _overrides(wanted)
    try:
        if config is not None:
            counts = {"tasks.worker": workers, "tasks.ps": ps}
            overrides += [f"{key}={n}" for key, n in counts.items() if n is not None]
            loaded = configuration.load(
                config,
                overrides=overrides,
                name=name,
                arguments=arguments,
                environ=environ,
            )
        else:
            loaded = configuration.from_command(
                shlex.split(command)
                if isinstance(command, str)
                else list(map(str, command or ())),
                count=workers or 0,
                ps=ps or 0,
                hosts=hosts
                if hosts is None or isinstance(hosts, str)
                else ",".join(hosts),
                overrides=overrides,
                name=name,
                environ=environ,
                cwd=_folder(),
            )
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    for problem in loaded.warnings:
        warnings.warn(str(problem), stacklevel=_CALLER)
    return loaded.description


def _folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        what = "no longer exists"
        hint = "os.chdir() to one that does"
        problem = Problem("the current directory", what, hint)
        raise ConfigError([problem]) from None


def _refuse_recursion(environ: Mapping[str, str]) -> None:
    """Refuse a launch by a rank, which imports the script of a function."""
    script = os.environ.get(IMPORTING) or environ.get(IMPORTING)
    if script:
        what = "a rank that imports this script would launch again"
        hint = 'put the launch under `if __name__ == "__main__":`'
        raise ConfigError([Problem(script, what, hint)])


_SETTING = "a number, a text, a list or a dictionary"


def _refuse_misfits(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if arguments have wrong types or do not fit together.

    The values of settings are checked later, together with the configuration.
    """
    problems = _misused(options)
    for name, (is_good, what) in _TYPES.items():
        value = options.get(name)
        if value is not None and not is_good(value):
            problems.append(Problem(name, f"must be {what}; found {_shown(value)}"))
    if problems:
        raise ConfigError(problems)


def _overrides(settings: Mapping[str, Any]) -> tuple[list[str], list[Problem]]:
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


def _misused(options: Mapping[str, Any]) -> list[Problem]:
    config, command = options.get("config"), options.get("command")
    problems = []
    if (config is None) == (command is None):
        what = (
            "both a file and a command" if config is not None else "nothing to launch"
        )
        hint = 'launch("cluster.yaml"), or launch(command=["python", "train.py"], ...)'
        problems.append(Problem("launch", what, hint))
    elif config is None and options.get("workers") is None:
        hint = 'launch(command=["python", "train.py"], workers=4)'
        problems.append(Problem("workers", "is missing: how many run it?", hint))
    if config is not None and options.get("hosts") is not None:
        hint = 'settings={"hosts": ["node1", "node2"]}'
        problems.append(Problem("hosts", "is for a command, not for a file", hint))
    if config is None and options.get("arguments"):
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


def _has_names(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value))


_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "config": (lambda v: isinstance(v, str | os.PathLike), "a path"),
    "command": (_is_command, "a list of words, or a text whose quotes match"),
    "hosts": (
        lambda v: _is_text(v) or (_is_list(v) and all(map(_is_text, v))),
        "a text, or a list of texts",
    ),
    "backend": (_is_text, "a text"),
    "name": (_is_text, "a text"),
    "arguments": (_is_list, "a list of words"),
    "settings": (_has_names, "a dictionary whose keys are texts"),
    "environ": (
        lambda v: _has_names(v) and all(map(_is_text, v.values())),
        "a dictionary of texts",
    ),
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
