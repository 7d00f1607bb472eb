"""The environment that a wrapper of Python, such as a container, must keep. Pure."""

from __future__ import annotations

from collections.abc import Mapping

MARK = "TFCLUSTER_RUN"
"""The variable by which processes of a run are found and ended."""


def lost_variables(environ: Mapping[str, str]) -> str | None:
    """Why nothing can run in an environment without its variables; None if it can."""
    if MARK in environ:
        return None
    return (
        "the command of 'python' removes variables from the environment, "
        f"{MARK} among them: leave out what does that (--cleanenv, --containall, "
        "--clearenv, env -i)"
    )
