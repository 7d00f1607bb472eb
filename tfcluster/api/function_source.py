"""Where a rank finds a function: functions are not sent, they are imported again."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tfcluster.errors import ConfigError, Problem

_OWN_MODULE = (
    "put it into a module: a file train.py beside this program, `import train`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSource:
    """How to import a function."""

    name: str
    module: str
    path: tuple[str, ...]
    """The folders to search for modules."""
    script: str | None
    """The file to import, if the function is defined in the program itself."""
    file: str | None
    """The file that defines the module, if it has one."""


def locate(function: Callable[..., Any]) -> FunctionSource:
    """Where to import ``function``. Raises ConfigError if a rank could not do so."""
    name = getattr(function, "__qualname__", None) or type(function).__name__
    home = getattr(function, "__module__", None) or ""
    module = sys.modules.get(home)
    if "<lambda>" in name:
        raise _refused(name, "is a lambda: ranks cannot import it", _OWN_MODULE)
    if "<locals>" in name:
        what = "is defined within a function: ranks cannot import it"
        raise _refused(name, what, "move it to the level of its module")
    if not hasattr(function, "__qualname__"):
        hint = "give a function of a module, and its arguments after it"
        raise _refused(name, "an object of this type is no function", hint)
    if "." in name or not callable(function):
        what = "is not a function of a module: ranks cannot import it"
        raise _refused(name, what, "give a function that is defined at module level")
    if module is not None and getattr(module, name, None) is not function:
        what = f"is not what the name {name} means in {home}: ranks would call that"
        raise _refused(name, what, f"define `def {name}` once, at module level")
    if home == "__main__" and module is not None:
        return _of_program(function, name, module)
    if module is None:
        raise _refused(name, f"its module {home or '?'} is not imported", _OWN_MODULE)
    return _of_module(name, home, getattr(module, "__file__", None))


def _of_module(name: str, module: str, file: str | None) -> FunctionSource:
    path: tuple[str, ...] = ()
    if file is not None:
        place = Path(os.path.abspath(file))  # noqa: PTH100 - resolve() follows links
        package = place.name == "__init__.py"
        depth = module.count(".") + (1 if package else 0)
        path = (str(place.parents[depth]),)
    return FunctionSource(name=name, module=module, path=path, script=None, file=file)


def _of_program(
    function: Callable[..., Any], name: str, module: ModuleType
) -> FunctionSource:
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name:  # python -m PACKAGE.MODULE
        return _of_module(name, spec.name, spec.origin)
    file = getattr(module, "__file__", None)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if file is None or code is None or not _same(code.co_filename, file):
        where = "in a notebook cell or typed in: ranks cannot import it"
        hint = "put it into a module: `%%writefile train.py` in a cell, `import train`"
        raise _refused(name, f"is defined {where}", hint)
    script = os.path.abspath(file)  # noqa: PTH100 - resolve() follows links
    folder = os.path.dirname(script)  # noqa: PTH120 - a text is wanted
    return FunctionSource(
        name=name, module="__main__", path=(folder,), script=script, file=script
    )


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def require_fitting(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise ConfigError if the function cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # written in C
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", str(function))
        hint = f"its arguments are {name}{signature}"
        raise ConfigError([Problem(name, str(error), hint)]) from None


def _refused(name: str, what: str, hint: str) -> ConfigError:
    return ConfigError([Problem(name, what, hint)])
