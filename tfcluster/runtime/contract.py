"""Private names of a library that the runtime uses, and attributes that it replaces.

A ``PrivateName`` is a name that the library does not promise to keep. ``check`` looks
for all names, and raises one error that lists the missing ones. A ``Patch`` is an
attribute of the library that the runtime replaces. ``Table.install`` wraps each
attribute once, and calls its handlers in the order of their ``HandlerPlace``, in
whatever order they are installed. This module depends on no library.
"""

from __future__ import annotations

import enum
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

from tfcluster.base import versions
from tfcluster.runtime.errors import CollectiveError

_T = TypeVar("_T")
Around = Callable[..., Any]
"""A handler: ``handler(original, *args, **kwargs)`` is called for the original."""

How = Literal[
    "attribute",
    "inherited",
    "function",
    "property",
    "object",
    "object's dict",
]
"""How an attribute is replaced.

attribute        on the target itself
inherited        on the class, the target or a base of it, that defines it
function         in the target, a module, and in all of its package that has it
property         its getter is wrapped
object           on one object of that class
object's dict    the same, bypassing a ``__setattr__`` that would track it
"""

_TITLES = {"keras": "Keras", "tensorflow": "TensorFlow"}
_WRAPPED = "_tfcluster_wrapped"


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A private name, which may change in any release of the library."""

    where: str
    """The dotted name of a module, a class or a function."""
    name: str
    """An attribute of ``where``; or, if ``where`` is a function, a name or a string in
    its code; or "" for ``where`` itself."""
    why: str
    """What needs the name."""
    overridden_in: str = ""
    """The module below ``tfcluster.runtime`` with a class that overrides the name."""
    optional: bool = False
    """Whether some versions lack the name, and do well without what needs it."""

    @property
    def path(self) -> str:
        """The dotted name."""
        return f"{self.where}.{self.name}" if self.name else self.where

    def is_there(self) -> bool:
        """Whether the imported library has this name; True if it need not.

        An attribute that a method sets on its object is found as a name in the method's
        code.
        """
        if self.optional:
            return True
        try:
            owner = resolve(self.where)
        except AttributeError:
            return False
        if not self.name or hasattr(owner, self.name):
            return True
        return any(
            self.name in _words_of(function) for function in _functions_of(self.where)
        )


def names(where: str, why: str, *names_there: str) -> tuple[PrivateName, ...]:
    """Names in one place, for one purpose."""
    return tuple(PrivateName(where, name, why) for name in names_there)


class HandlerPlace(enum.IntEnum):
    """Where a handler stands among those of one attribute.

    The outermost handler comes first: it is called first, and calls the next one.
    """

    RECORD = enum.auto()
    """What ``tfcluster verify`` records."""
    STRATEGY = enum.auto()
    """How the ranks train together, and what only the chief does."""
    SERVICE = enum.auto()
    """Variables on ps tasks, batches from data tasks, exchanges in graphs."""
    LAST = enum.auto()
    """Whatever the program does, with or without the others."""


@dataclass(frozen=True)
class Patch:
    """An attribute of a library that the runtime replaces."""

    target: str
    """The dotted name of a module or class."""
    attribute: str
    why: str
    """What needs the patch."""
    how: How = "attribute"
    optional: bool = False
    """Whether some versions lack the attribute, and do well without the patch."""

    @property
    def path(self) -> str:
        """As of a ``PrivateName``."""
        return f"{self.target}.{self.attribute}"

    def is_there(self) -> bool:
        """Whether the attribute exists; True if it need not exist."""
        if self.optional or self.how in ("object", "object's dict"):
            return True
        try:
            return hasattr(self.owner(), self.attribute)
        except AttributeError:
            return False

    def owner(self) -> Any:
        """The object on which to set the attribute. Raises AttributeError."""
        target = resolve(self.target)
        if self.how in ("inherited", "property"):
            return defining_class(target, self.attribute)
        return target


class _Installed(NamedTuple):
    """A handler of an attribute."""

    place: HandlerPlace
    function: Around
    stands_aside: Callable[[], bool]


@dataclass
class _WrappedAttribute:
    """A wrapped attribute of a module or class."""

    owner: Any
    original: Any
    """The library's own function."""
    call: Any
    """All handlers around the original."""
    handlers: dict[str, _Installed] = field(default_factory=dict)
    """Handlers by their names."""

    def add(self, handler: _Installed) -> None:
        self.handlers[_name_of(handler.function)] = handler
        call = self.original
        for one in sorted(self.handlers.values(), key=_place_of, reverse=True):
            call = _with(one.function, call, one.stands_aside)
        self.call = call

    def wrapper(self) -> Any:
        """The function that replaces the attribute."""

        @functools.wraps(self.original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self.call(*args, **kwargs)

        setattr(wrapper, _WRAPPED, self)
        return wrapper


class Table:
    """All patches of some libraries. Raises ValueError for two patches of an attribute.

    While ``stands_aside()`` is true, because the program distributes its training by
    itself, only handlers that are installed with ``always`` are called.
    """

    def __init__(
        self, patches: Iterable[Patch], stands_aside: Callable[[], bool]
    ) -> None:
        self.patches = tuple(patches)
        self._stands_aside = stands_aside
        paths = [(patch.path, patch.how) for patch in self.patches]
        if len({*paths}) != len(paths):
            raise ValueError("a table has one patch for each attribute")

    def install(
        self,
        handlers: Mapping[Patch, Around],
        place: HandlerPlace = HandlerPlace.STRATEGY,
        *,
        always: bool = False,
    ) -> None:
        """Wrap the attributes with handlers at this place.

        A handler replaces an earlier one of the same function. Raises LookupError for a
        patch of another table, and AttributeError if the library has no such attribute.
        """
        aside = _never if always else self._stands_aside
        for patch, handler in handlers.items():
            if patch not in self.patches:
                raise LookupError(f"{patch.path} is in another table")
            if patch.optional and not replace(patch, optional=False).is_there():
                continue
            _wrapped(patch.owner(), patch).add(_Installed(place, handler, aside))

    def replace(self, patch: Patch, one: Any, value: Any) -> None:
        """Set the attribute of one object of the patch's class.

        Raises LookupError if the patch is in another table or not for one object.
        """
        if patch not in self.patches:
            raise LookupError(f"{patch.path} is in another table")
        if patch.how == "object":
            setattr(one, patch.attribute, value)
        elif patch.how == "object's dict":
            vars(one)[patch.attribute] = value
        else:
            raise LookupError(f"{patch.path} is not of one object")

    def restore(self, patch: Patch, one: Any) -> None:
        """Undo ``replace``: the object has its class's attribute again.

        Does nothing if the object already has it.
        """
        vars(one).pop(patch.attribute, None)


def _wrapped(owner: Any, patch: Patch) -> _WrappedAttribute:
    """The attribute of the owner, which is wrapped unless it is already."""
    original = getattr(owner, patch.attribute)
    if patch.how == "property":
        original = original.fget
    earlier = getattr(original, _WRAPPED, None)
    if isinstance(earlier, _WrappedAttribute) and earlier.owner is owner:
        return earlier
    attribute = _WrappedAttribute(owner, original, original)
    wrapper = attribute.wrapper()
    setattr(
        owner,
        patch.attribute,
        property(wrapper) if patch.how == "property" else wrapper,
    )
    if patch.how == "function":
        _replace_everywhere(patch, original, wrapper)
    return attribute


def original_of(patch: Patch) -> Any:
    """The library's own function, wrapped or not. Raises AttributeError."""
    value = getattr(patch.owner(), patch.attribute)
    wrapped = getattr(value, _WRAPPED, None)
    return wrapped.original if isinstance(wrapped, _WrappedAttribute) else value


def mark(one: Any, name: str, value: Any) -> None:
    """Set one of our own attributes, ``tfcluster_...``, on an object of a library.

    Raises ValueError for a name without our prefix.
    """
    if not name.lstrip("_").startswith("tfcluster_"):
        raise ValueError(f"{name} is no name of ours")
    if hasattr(one, "__dict__") and not isinstance(one, type):
        # Not setattr: Keras tracks attributes that are set on its objects.
        vars(one)[name] = value
    else:
        setattr(one, name, value)


def check(names: Iterable[PrivateName | Patch], *, optional: bool = True) -> None:
    """Raise one CollectiveError that lists all names that the libraries lack.

    With ``optional``, the program runs without them if tfcluster leaves it alone.
    """
    lacking = [name for name in names if not name.is_there()]
    if not lacking:
        return
    packages = {name.path.partition(".")[0]: None for name in lacking}
    lines = [
        "tfcluster needs names that the installed libraries lack: "
        + "; ".join(map(_versions_of, packages))
    ]
    lines += [f"  {name.path}: needed for {name.why}" for name in lacking]
    pins = " ".join(f"'{versions.requirement(package)}'" for package in packages)
    way_out = (
        ". With runtime: {strategy: none} the program runs without hooks, and is not "
        "distributed"
    )
    lines.append(
        f"Install versions that are known to work (pip install {pins}), or a newer "
        f"tfcluster{way_out if optional else ''}"
    )
    raise CollectiveError("\n".join(lines))


def resolve(path: str) -> Any:
    """The object with a dotted name. Raises AttributeError if there is none."""
    package, *parts = path.split(".")
    name = package
    value: Any = _imported(package)
    for part in parts:
        name = f"{name}.{part}"
        # Attributes first: the module tensorflow.distribute is not tf.distribute.
        if isinstance(value, ModuleType) and not hasattr(value, part):
            value = _imported(name)
        else:
            value = getattr(value, part)
    return value


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise AttributeError(f"there is no {name}") from error


def defining_class(cls: type, name: str) -> type:
    """The class, ``cls`` or a base of it, that has ``name`` in its own body.

    Raises AttributeError if there is none.
    """
    for base in cls.__mro__:
        if name in vars(base):
            return base
    raise AttributeError(f"{cls.__name__} has no {name}")


def _name_of(handler: Around) -> str:
    """The name of a handler."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return f"{handler.__module__}.{handler.__qualname__}"


def _place_of(handler: _Installed) -> HandlerPlace:
    return handler.place


def _never() -> bool:
    return False


def _with(handler: Around, inner: Any, stands_aside: Callable[[], bool]) -> Any:
    """``inner`` with the handler, which is not called while ``stands_aside()``."""

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        if stands_aside():
            return inner(*args, **kwargs)
        return handler(inner, *args, **kwargs)

    return call


def _replace_everywhere(patch: Patch, original: Any, wrapper: Any) -> None:
    """Replace a function in all modules of its library that have imported it."""
    package = patch.target.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != package or not hasattr(module, "__dict__"):
            continue
        if vars(module).get(patch.attribute) is original:
            setattr(module, patch.attribute, wrapper)


def _functions_of(path: str) -> Iterator[FunctionType]:
    """A function, or a method and the methods that it overrides."""
    owner, name = resolve(path.rpartition(".")[0]), path.rpartition(".")[2]
    for kind in getattr(owner, "__mro__", (owner,)):
        function = vars(kind).get(name)
        if isinstance(function, FunctionType):
            yield function


def _words_of(function: FunctionType) -> set[str]:
    """All names and strings in the code of a function and its inner functions."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    words: set[str] = set()
    waiting: list[CodeType] = [function.__code__]
    while waiting:
        code = waiting.pop()
        words.update(code.co_names)
        words.update(
            constant for constant in code.co_consts if isinstance(constant, str)
        )
        waiting += [
            constant for constant in code.co_consts if isinstance(constant, CodeType)
        ]
    return words


def _versions_of(package: str) -> str:
    title = _TITLES.get(package, package)
    version = versions.imported(package) or "(of unknown version)"
    return f"{title} {version} is installed, {versions.supported_range(package)} work"
