"""A light replacement for dataclasses, for programs that must start fast.

Type checkers see the real dataclasses, which would take longer to import and to make
than the rest of the agent's start. Here, all classes share their methods, and only the
type checker enforces ``slots`` and ``kw_only``.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
    from typing import Any

    from typing_extensions import dataclass_transform

    @dataclass_transform(frozen_default=True)
    class Struct:
        """A class whose subclasses are frozen dataclasses, without a decorator."""

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
        own, names = vars(cls), tuple(cls.__annotations__)
        methods = {"__init__": _init, "__repr__": _repr}
        if eq:
            methods |= {"__eq__": _eq, "__hash__": _hash if frozen else None}
        if frozen:
            methods |= {"__setattr__": _refuse, "__delattr__": _refuse}
        for name, method in methods.items():
            if name not in own or name == "__hash__":
                setattr(cls, name, method)
        inherited = getattr(cls, "_defaults", {})
        defaults = {name: own[name] for name in names if name in own}
        cls._defaults = {**inherited, **defaults}
        cls.__match_args__ = () if kw_only else names
        cls.__light_fields__ = {name: name not in cls._defaults for name in names}
        cls.__dataclass_fields__ = _RealFields()
        return cls

    def _init(self, *values, **named):
        names, fields = self.__light_fields__, vars(self)
        fields.update(zip(names, values, strict=False))
        fields.update(named)
        if len(fields) < len(names):
            for name, value in self._defaults.items():
                if name not in fields:
                    is_made = isinstance(value, _Made)
                    fields[name] = value.factory() if is_made else value
        if fields.keys() != names.keys() or len(values) + len(named) > len(names):
            name = type(self).__name__
            raise TypeError(f"{name}({', '.join(names)}), not {fields}")

    def _repr(self):
        words = (f"{name}={getattr(self, name)!r}" for name in self.__light_fields__)
        return f"{type(self).__name__}({', '.join(words)})"

    def _values(value):
        # Not all of vars(): a class may keep more there, such as a cached property.
        return [*map(vars(value).__getitem__, value.__light_fields__)]

    def _eq(self, other):
        same = other.__class__ is self.__class__
        return _values(self) == _values(other) if same else NotImplemented

    def _hash(self):
        return hash(tuple(_values(self)))

    def _refuse(self, name, *value):
        raise AttributeError(f"cannot assign to field {name!r}")

    class _RealFields:
        """The fields for functions of the real module, which few programs call."""

        def __get__(self, value, cls):
            from dataclasses import make_dataclass

            real = make_dataclass(cls.__name__, cls.__light_fields__)
            return real.__dataclass_fields__

    def replace(value, /, **changes):
        return type(value)(**(as_dict(value) | changes))

    class Struct:
        def __init_subclass__(cls):
            inherited = cls.__base__.__annotations__
            cls.__annotations__ = {**inherited, **cls.__annotations__}
            dataclass(cls, frozen=True)


def fields(kind: object) -> dict[str, bool] | None:
    """The fields of a class, and whether each is required; None: not of this kind."""
    return getattr(kind, "__light_fields__", None)


def as_dict(value: Any) -> dict[str, Any]:
    """The fields of an object, and their values as they are."""
    return {name: getattr(value, name) for name in type(value).__light_fields__}
