"""A light replacement for dataclasses, for a program that must start fast.

Type checkers see the real dataclasses. Importing that module would take longer than the
rest of the agent's start, on every host of a launch, because it inspects source code
and compiles methods. The replacement does neither: ``frozen`` is enforced only by the
type checker, and ``slots`` has no effect.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field

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

    def dataclass(cls=None, /, *, eq=True, frozen=False, slots=False):
        if cls is None:
            return lambda cls: dataclass(cls, eq=eq, frozen=frozen)
        names = cls.__match_args__ = tuple(cls.__annotations__)
        own = vars(cls)
        cls._defaults = {name: own[name] for name in names if name in own}
        cls.__init__, cls.__repr__ = _init, _repr
        if eq:
            cls.__eq__, cls.__hash__ = _eq, _hash if frozen else None
        return cls

    # Shared by all classes: functions of their own would take long to create.

    def _init(self, *values, **named):
        names, fields = self.__match_args__, vars(self)
        fields.update(zip(names, values, strict=False))
        fields.update(named)
        if len(fields) < len(names):
            for name, value in self._defaults.items():
                if name not in fields:
                    made = isinstance(value, _Made)
                    fields[name] = value.factory() if made else value
        if fields.keys() != {*names} or len(values) + len(named) > len(names):
            name = type(self).__name__
            raise TypeError(f"{name}({', '.join(names)}), not {fields}")

    def _repr(self):
        words = (f"{name}={getattr(self, name)!r}" for name in self.__match_args__)
        return f"{type(self).__name__}({', '.join(words)})"

    def _eq(self, other):
        same = other.__class__ is self.__class__
        return vars(self) == vars(other) if same else NotImplemented

    def _hash(self):
        return hash(tuple(map(vars(self).get, self.__match_args__)))

    class Struct:
        def __init_subclass__(cls):
            inherited = cls.__base__.__annotations__
            cls.__annotations__ = {**inherited, **cls.__annotations__}
            dataclass(cls, frozen=True)
