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
            same = other.__class__ is self.__class__
            return vars(self) == vars(other) if same else NotImplemented

        wanted = frozenset(names)
        cls.__init__, cls.__repr__, cls.__match_args__ = __init__, __repr__, names
        if eq:
            cls.__eq__, cls.__hash__ = __eq__, None
            if frozen:
                cls.__hash__ = lambda self: hash(tuple(map(vars(self).get, names)))
        return cls

    class Struct:
        def __init_subclass__(cls):
            cls.__annotations__ = {
                **cls.__base__.__annotations__,
                **cls.__annotations__,
            }
            dataclass(cls, frozen=True)
