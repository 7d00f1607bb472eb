"""The result of loading a configuration."""

from __future__ import annotations

from tfcluster.errors import Problem
from tfcluster.light_dataclasses import dataclass
from tfcluster.model import Description


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked Description, with warnings for the user."""

    description: Description
    warnings: tuple[Problem, ...] = ()
