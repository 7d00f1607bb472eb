"""``launch`` and ``attach``: from arguments to a run."""

from __future__ import annotations

import json
import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfcluster import config as configuration
from tfcluster.api import launcher_child
from tfcluster.api.run_handle import Run, known_run
from tfcluster.errors import ConfigError, Problem
from tfcluster.model import Description

IMPORTING = "TFCLUSTER_IMPORTING_MAIN"
"""Set while a rank imports the script that called ``run``."""
_CALLER = 4
"""How far above us is the program that calls ``launch`` or ``run``."""


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
            words as a shell would; no shell runs it.
        workers: The number of workers; with a file, it replaces the file's.
        ps: The number of parameter servers; with a file, it replaces the file's.
        hosts: For ``command``: SSH hosts, like ``["node1:4", "node2:4"]``.
        backend: ``local``, ``ssh``, ``slurm`` or ``sge``.
        name: The run's name; only one active run can have it.
        arguments: Words that are appended to the file's command.
        settings: Values that replace those of the file, by dotted keys, as ``--set``
            does: ``{"tasks.worker": 4, "env.LR": "1e-3"}``. None removes a key.
        detach: The run goes on after the end of this process. Otherwise it is stopped.
        environ: The environment of the launcher; default: that of this process.

    Raises:
        TfclusterError: What the command line would say: ConfigError with all problems
            of the configuration, ActiveRunError, StartError and others. Nothing is left
            running then. A failure after the beginning is in the run's outcome.
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
    **given: Any,
) -> Run:
    """See ``launch``. The launcher removes ``scratch`` if we die before it ends.

    ``usual_name`` is the name of a run that is given none, which others may have, too.
    """
    known = dict(os.environ if environ is None else environ)
    _refuse_recursion(known)
    description = _described(config, known, **given)
    if usual_name is not None and not description.named:
        from tfcluster.config.pipeline import as_name

        description = replace(description, name=as_name(usual_name))
    run, child = launcher_child.start(
        description, known, detach=detach, scratch=scratch
    )
    return Run(run, known, child)


def attach(run: str | None = None, *, environ: Mapping[str, str] | None = None) -> Run:
    """The run of an id, a unique prefix of one, or a name; default: the newest run.

    It may be over. Who has launched it does not matter. Raises ConfigError if there is
    none.
    """
    known = dict(os.environ if environ is None else environ)
    return Run(known_run(run, known).run, known)


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
    if backend is not None:
        wanted["backend"] = backend
    overrides, problems = _overrides(wanted)
    problems = [
        *_misused(config, command, workers, hosts, arguments),
        *problems,
    ]
    if problems:
        raise ConfigError(problems)
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
        words = shlex.split(command) if isinstance(command, str) else command
        loaded = configuration.from_command(
            [str(word) for word in words or ()],
            count=workers or 0,
            ps=ps or 0,
            hosts=hosts if hosts is None or isinstance(hosts, str) else ",".join(hosts),
            overrides=overrides,
            name=name,
            environ=environ,
            cwd=Path.cwd(),
        )
    for problem in loaded.warnings:
        warnings.warn(str(problem), stacklevel=_CALLER)
    return loaded.description


def _misused(
    config: object,
    command: object,
    workers: int | None,
    hosts: object,
    arguments: Sequence[str],
) -> list[Problem]:
    """What does not fit together; the place of a problem is the argument."""
    problems = []
    if (config is None) == (command is None):
        what = (
            "both a file and a command" if config is not None else "nothing to launch"
        )
        hint = 'launch("cluster.yaml"), or launch(command=["python", "train.py"], ...)'
        problems.append(Problem("launch", what, hint))
    elif config is None and workers is None:
        hint = 'launch(command=["python", "train.py"], workers=4)'
        problems.append(Problem("workers", "is missing: how many run it?", hint))
    if config is not None and hosts is not None:
        hint = 'settings={"hosts": ["node1", "node2"]}'
        problems.append(Problem("hosts", "is for a command, not for a file", hint))
    if config is None and arguments:
        hint = "append them to the command"
        problems.append(Problem("arguments", "are for a file's command", hint))
    return problems


def _overrides(settings: Mapping[str, Any]) -> tuple[list[str], list[Problem]]:
    """``KEY=VALUE`` as for ``--set``: JSON is YAML."""
    texts, problems = [], []
    for key, value in settings.items():
        if "env" in key.split(".")[:-1] and value is not None:
            texts.append(f"{key}={value}")
            continue
        try:
            text = json.dumps(value, ensure_ascii=False, default=_path)
        except (TypeError, ValueError) as error:
            hint = "a number, a text, a list or a dictionary"
            problems.append(Problem(f"settings[{key!r}]", str(error), hint))
        else:
            texts.append(f"{key}={text}")
    return texts, problems


def _path(value: object) -> str:
    if isinstance(value, os.PathLike):
        return os.fsdecode(os.fspath(value))
    raise TypeError(f"{type(value).__name__} is no value of a configuration")


def _refuse_recursion(environ: Mapping[str, str]) -> None:
    """A rank imports the script of a function: the script must not launch then."""
    script = os.environ.get(IMPORTING) or environ.get(IMPORTING)
    if script:
        what = "a rank that imports this script would launch again"
        hint = 'put the launch under `if __name__ == "__main__":`'
        raise ConfigError([Problem(script, what, hint)])
