"""What loading a configuration gives."""

from __future__ import annotations

from dataclasses import dataclass

from tfcluster.errors import Problem
from tfcluster.model import Description


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked description, with what a person should still be told about it."""

    description: Description
    warnings: tuple[Problem, ...] = ()
