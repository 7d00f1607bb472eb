"""Loads the configuration of a command, and shows its warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfcluster import config
from tfcluster.config import Loaded
from tfcluster.console.output import say
from tfcluster.console.sanitise import sanitise
from tfcluster.plan.model import Description


def described(loaded: Loaded) -> Description:
    """What was loaded, once the user has seen the warnings."""
    for problem in loaded.warnings:
        say(sanitise(str(problem)))
    return loaded.description


def load_file(
    path: str,
    environ: Mapping[str, str],
    *,
    overrides: Sequence[str],
    passed: Sequence[str],
    name: str | None = None,
    arguments: Sequence[str] = (),
) -> Description:
    return described(
        config.load(
            path,
            overrides=overrides,
            name=name,
            arguments=arguments,
            environ=environ,
            passed=passed,
        )
    )
