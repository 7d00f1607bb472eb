"""What a wrapper of the interpreter, such as a container, must leave as it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping

MARK = "TFCLUSTER_RUN"
"""By this variable, processes of a run are found and ended."""


def lost_variables(environ: Mapping[str, str]) -> str | None:
    """Why nothing can run in an environment from which variables were removed."""
    if MARK in environ:
        return None
    return (
        "the command of 'python' removes variables from the environment, "
        f"{MARK} among them: leave out what does that (--cleanenv, --containall, "
        "--clearenv, env -i)"
    )
