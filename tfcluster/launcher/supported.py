"""What can be described and planned, but not launched by this version."""

from __future__ import annotations

from tfcluster.errors import ConfigError, Problem
from tfcluster.model import Description, Strategy

_STRATEGIES = (Strategy.COLLECTIVE, Strategy.NONE)


def require_supported(description: Description) -> None:
    """Raise ConfigError with everything that this version cannot do yet."""
    runtime = description.runtime
    wishes = [
        (
            "runtime.strategy",
            runtime.strategy,
            runtime.strategy in _STRATEGIES,
            "strategy 'collective' or 'none'",
        ),
    ]
    problems = [
        Problem(
            description.origins.get(key, description.source),
            f"{key} '{value}' cannot be launched by this version",
            f"it can launch {alternative}",
        )
        for key, value, supported, alternative in wishes
        if not supported
    ]
    if problems:
        raise ConfigError(problems)
