"""The command ``explain``: what the division of a program among ranks would do."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfcluster.base.errors import ConfigError, ExitCode, Problem
from tfcluster.base.isolated_import import module_argv
from tfcluster.base.vocabulary import FORMAT_VERSION
from tfcluster.commands import verify_trial
from tfcluster.console.display import Display
from tfcluster.console.output import put, say, say_progress
from tfcluster.console.sanitise import sanitise
from tfcluster.console.views import answers
from tfcluster.launcher.launch import check
from tfcluster.plan.compose import TaskSpec
from tfcluster.plan.model import Description

_MODULE = "tfcluster.runtime.task.explain_program"
_STDERR = 2
_EXAMPLE = "`tfcluster explain -n 4 -- python train.py`"


def explain(
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    count: int | None,
    overrides: Sequence[str],
    passed: Sequence[str],
    as_json: bool,
    display: Display,
) -> int:
    """Run the program in one process until a step is over, and print what was seen.

    Returns the program's exit code if it fails, and 1 if no function ran.
    """
    if not words:
        raise ConfigError([Problem("explain", "nothing to explain", _EXAMPLE)])
    description = verify_trial.described(
        words, environ, count=count, overrides=overrides, passed=passed
    )
    _refuse(description)
    ranks = verify_trial.size_of(description)
    ready = check(verify_trial.alone(description), environ)
    (spec,) = ready.prepared.specs
    if not spec.arguments or not spec.python:
        problem = "explain can only look into a command that begins with python"
        raise ConfigError([Problem(description.source, problem, _EXAMPLE)])
    own = {**environ, **description.env, **ready.secrets}
    say_progress("running the program until it has trained one step", display)
    code, answer = _run(spec, ranks, own)
    if answer is None:
        say(f"error: the program failed by itself ({_end(code)}): nothing to explain")
        return code if code > 0 else 128 - code
    if as_json:
        put(json.dumps({"schema": FORMAT_VERSION, **answer}, indent=2) + "\n")
    elif answer["functions"]:
        lines = answers.explanation_lines(answer, brief=display.quiet)
        put("".join(f"{sanitise(line)}\n" for line in lines))
    if not answer["functions"]:
        say("error: nothing to divide: no tf.function ran")
        return ExitCode.TASK_FAILED
    return ExitCode.OK


def _refuse(description: Description) -> None:
    where = description.source
    if verify_trial.size_of(description) < 2:
        alone = "one rank divides nothing"
        raise ConfigError([Problem(where, alone, "-n 2, or more")])
    if description.prepares_hosts:
        problem = (
            "explain does not run 'setup', nor make the environment of 'requirements'"
        )
        hint = f"activate such an environment, and give the command: {_EXAMPLE}"
        raise ConfigError([Problem(where, problem, hint)])


def _run(
    spec: TaskSpec, ranks: int, environ: Mapping[str, str]
) -> tuple[int, dict[str, Any] | None]:
    """The program's exit code (negative: a signal), and the answer unless it failed."""
    with tempfile.TemporaryDirectory(prefix="tfcluster-explain-") as folder:
        file = Path(folder) / "answer.json"
        _, *program = spec.arguments
        argv = module_argv(
            spec.python,
            _MODULE,
            *(str(file), str(ranks), *program),
            options=spec.program.options,
        )
        process = subprocess.Popen(
            argv, cwd=spec.cwd, env=dict(environ), stdout=_STDERR
        )
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if code != 0 or not file.exists():
            return code or int(ExitCode.TASK_FAILED), None
        return code, json.loads(file.read_text(encoding="utf-8"))


def _end(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name
