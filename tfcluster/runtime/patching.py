"""Monkeypatching: wraps functions of classes and modules.

The wrappers do nothing in a program that distributes its training by itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from tfcluster.runtime.scripts import self_distributed

Around = Callable[..., Any]


def wrap(owner: Any, name: str, around: Around) -> None:
    """Make ``owner.name(*args)`` call ``around(original, *args)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if self_distributed.claimed():
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)


def replace_everywhere(name: str, old: Any, new: Any) -> None:
    """Replace ``old`` in all of Keras' modules: it exports a function in several."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "keras" and vars(module).get(name) is old:
            setattr(module, name, new)


def defining_class(cls: type, name: str) -> type:
    """The class, ``cls`` or a base of it, that defines ``name``."""
    return next(base for base in cls.__mro__ if name in vars(base))
