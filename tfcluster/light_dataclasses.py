"""A light replacement for dataclasses, for programs that must start fast.

Type checkers see the real dataclasses. These would take longer to import and to make
than the rest of the agent's start, and half of that of a launch, because they inspect
source code and compile methods. The replacement does neither. ``slots`` and ``kw_only``
are enforced only by the type checker, and a class has no other one among its bases.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
    from typing import Any
else:

    class _Made:
        """A default that a factory creates for each object."""

        def __init__(self, factory):
            self.factory = factory

    def field(*, default_factory):
        return _Made(default_factory)

    def dataclass(cls=None, /, *, eq=True, frozen=False, slots=False, kw_only=False):
        if cls is None:
            return lambda cls: dataclass(cls, eq=eq, frozen=frozen, kw_only=kw_only)
        names = tuple(cls.__annotations__)
        defaults = {name: vars(cls)[name] for name in names if name in vars(cls)}

        def __init__(self, *values, **named):
            fields = vars(self)
            fields.update(zip(names, values, strict=False))
            fields.update(named)
            if len(fields) < len(names):
                for name, value in defaults.items():
                    if name not in fields:
                        made = isinstance(value, _Made)
                        fields[name] = value.factory() if made else value
            if fields.keys() != wanted or len(values) + len(named) > len(names):
                raise TypeError(f"{cls.__name__}({', '.join(names)}), not {fields}")

        def __repr__(self):
            words = (f"{name}={getattr(self, name)!r}" for name in names)
            return f"{cls.__name__}({', '.join(words)})"

        def __eq__(self, other):
            if other.__class__ is not self.__class__:
                return NotImplemented
            return [getattr(self, n) for n in names] == [
                getattr(other, n) for n in names
            ]

        def __hash__(self):
            fields = vars(self)
            return hash(tuple([fields[name] for name in names]))

        wanted = frozenset(names)
        methods = {"__init__": __init__, "__repr__": __repr__}
        if eq:
            methods |= {"__eq__": __eq__, "__hash__": __hash__ if frozen else None}
        if frozen:
            methods |= {"__setattr__": _refuse, "__delattr__": _refuse}
        for name, method in methods.items():
            if name not in vars(cls) or name == "__hash__":
                setattr(cls, name, method)
        cls.__match_args__ = () if kw_only else names
        cls.__light_fields__ = {name: name not in defaults for name in names}
        cls.__dataclass_fields__ = _RealFields()
        return cls

    class _RealFields:
        """The fields for functions of the real module, which few programs call."""

        def __get__(self, value, cls):
            from dataclasses import make_dataclass

            return make_dataclass(
                cls.__name__, cls.__light_fields__
            ).__dataclass_fields__

    def _refuse(self, name, *value):
        raise AttributeError(f"cannot assign to field {name!r}")

    def replace(value, /, **changes):
        fields = vars(value)
        kept = {name: fields[name] for name in type(value).__light_fields__}
        return type(value)(**(kept | changes))


def fields(kind: object) -> dict[str, bool] | None:
    """The fields of a class, and whether each is required; None: not of this kind."""
    return getattr(kind, "__light_fields__", None)


def as_dict(value: Any) -> dict[str, Any]:
    """The fields of an object, and their values as they are."""
    return {name: getattr(value, name) for name in type(value).__light_fields__}
