"""Declares how the ranks' values of a custom metric are combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tfcluster.runtime import contract

_ATTRIBUTE = "_tfcluster_merge_rules"
_RULES = ("max", "mean", "min", "sum")
_BUILTINS: dict[object, str] = {max: "max", min: "min", sum: "sum"}
_ALL = ""

_C = TypeVar("_C", bound=type)

Rule = Callable[..., Any] | str


def merge_with(rule: Rule | None = None, /, **rules: Rule) -> Callable[[_C], _C]:
    """Declare how the ranks' values of a metric's variables are combined.

    For a metric class of your own whose state is not a sum over rows::

        @tfc.merge_with(max)
        class Largest(keras.metrics.Metric): ...

        @tfc.merge_with(sum, largest=max)
        class Both(keras.metrics.Metric): ...

    Returns a decorator that returns the class. ``rule`` is for all variables, and
    keywords are for the variables of these names. Each is ``max``, ``min``, ``sum``, or
    one of "max", "min", "sum", "mean"; "mean" is weighted by the ranks' rows of the
    last batch. Values are combined entry by entry; shapes and dtypes stay. Without a
    declaration, the runtime tests what an update does. Raises ValueError for another
    rule.
    """
    found = {name: _rule(given) for name, given in rules.items()}
    if rule is not None:
        found[_ALL] = _rule(rule)

    def declare(cls: _C) -> _C:
        contract.mark(cls, _ATTRIBUTE, {**getattr(cls, _ATTRIBUTE, {}), **found})
        return cls

    return declare


def declared_rule(metric: object, variable: str) -> str | None:
    """The rule for a metric's variable of this name; None if there is none."""
    rules: dict[str, str] = getattr(type(metric), _ATTRIBUTE, {})
    return rules.get(variable, rules.get(_ALL))


def _rule(given: Rule) -> str:
    name = given if isinstance(given, str) else _BUILTINS.get(given)
    if name not in _RULES:
        raise ValueError(
            f"merge_with takes max, min, sum, or one of {_RULES}, not {given!r}"
        )
    return str(name)
