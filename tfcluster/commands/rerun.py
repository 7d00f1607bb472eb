"""The command ``rerun``: launch a run again, with the same configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tfcluster import schedulers
from tfcluster.commands.launch import launch_described
from tfcluster.config.files import folder_problem
from tfcluster.console.display import DEFAULT, Display
from tfcluster.console.output import say
from tfcluster.console.sanitise import sanitise
from tfcluster.errors import ConfigError, Problem
from tfcluster.record.launched import launched
from tfcluster.record.paths import find, state_dir, valid_name


def rerun(
    run: str | None,
    environ: Mapping[str, str],
    display: Display = DEFAULT,
    *,
    name: str | None,
    detach: bool,
) -> int:
    """Launch a run again, as a new run; returns its exit code. Raises TfclusterError.

    Uses the configuration that the run was launched with, not the file as it is now.
    """
    paths = find(state_dir(environ), run)
    description = launched(paths)
    if name is not None:
        if not valid_name(name) or name.startswith((".", "-")):
            hint = "at most 64 letters, digits, '.', '_' and '-'"
            raise ConfigError([Problem("--name", f"{name!r} is not a name", hint)])
        description = replace(description, name=name, named=True)
    local = schedulers.get(description.backend).here
    here = local or description.sync is not None
    if here and (problem := folder_problem(description.workdir)):
        hint = f"{paths.run} ran there"
        raise ConfigError([Problem("workdir", problem, hint)])
    say(sanitise(f"launching {paths.run} again"))
    return launch_described(description, environ, display, detach=detach)
