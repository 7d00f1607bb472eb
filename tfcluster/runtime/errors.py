"""What can be wrong with a task's surroundings, before any training begins.

Errors of the exchange between ranks have a tree of their own beside the collectives.
"""

from __future__ import annotations


class ContextError(ValueError):
    """The environment contradicts itself, or TensorFlow's rules for TF_CONFIG."""


class NoRankError(RuntimeError):
    """A rank was asked for in a task that does not train: a ps or data server."""
