"""Plain data in files: what a rank gets and returns, without pickle.

A file is a zip archive: ``data.json`` has the structure, and each NumPy array is a
member in NumPy's own format. Reading one executes nothing. Ranks run this module from a
copy, with Python and, for arrays, NumPy alone: it must import nothing else.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import zipfile
from collections.abc import Callable
from typing import Any

PLAIN = (
    "None, bool, int, float, str, bytes, list, tuple, dict and NumPy arrays, and "
    "lists, tuples and dicts of these"
)
_DATA = "data.json"
_TAG = "\0"


class NotPlainError(TypeError):
    """A value that cannot be sent. The message names its path: ``args[0]['model']``."""


def write(path: str, value: object, name: str) -> None:
    """Write ``value`` to a private file, which appears once it is complete.

    Messages call the value ``name``. Arrays keep dtype and shape. Raises NotPlainError
    for a value that is not plain, or OSError.
    """
    arrays: list[Any] = []
    tree = _encoded(value, name, arrays, [])
    beside = f"{path}.new"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w") as members:
        members.writestr(_DATA, json.dumps(tree))
        for number, array in enumerate(arrays):
            with members.open(f"{number}.npy", "w", force_zip64=True) as member:
                _numpy().lib.format.write_array(member, array, allow_pickle=False)
    os.replace(beside, path)  # noqa: PTH105 - nothing else needs pathlib


def check(value: object, name: str) -> None:
    """Raise NotPlainError if ``value``, called ``name``, cannot be written."""
    _encoded(value, name, [], [])


def read(path: str) -> Any:
    """The value in a file. Raises OSError, or ValueError if the file is damaged."""
    try:
        with zipfile.ZipFile(path) as members:
            tree = json.loads(members.read(_DATA))
            return _decoded(tree, lambda number: _array(members, number))
    except (zipfile.BadZipFile, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _array(members: zipfile.ZipFile, number: int) -> Any:
    data = io.BytesIO(members.read(f"{number}.npy"))
    return _numpy().lib.format.read_array(data, allow_pickle=False)


def _numpy() -> Any:
    import numpy.lib.format  # imported here: many values contain no arrays

    return numpy


def _encoded(value: Any, path: str, arrays: list[Any], above: list[int]) -> Any:
    """The value as JSON; other types become a dictionary with the key NUL."""
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return value
    if kind is str:
        return _text(value, path)
    if kind is bytes:
        return {_TAG: "bytes", "of": base64.b64encode(value).decode()}
    if kind in (list, tuple, dict):
        if id(value) in above:
            raise NotPlainError(f"{path} contains itself")
        above.append(id(value))
        found = _container(value, path, arrays, above)
        above.pop()
        return found
    numpy = sys.modules.get("numpy")
    if numpy is not None and (
        kind is numpy.ndarray or isinstance(value, numpy.generic)
    ):
        if value.dtype.hasobject:
            raise NotPlainError(f"{path} is a NumPy array of objects")
        arrays.append(numpy.asarray(value))
        shape = "array" if kind is numpy.ndarray else "scalar"
        return {_TAG: shape, "of": len(arrays) - 1}
    raise NotPlainError(f"{path} is {_named(kind)}; {_advice(value)}")


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise NotPlainError(f"{path} is no valid text: {error.reason}") from None
    return value


def _container(value: Any, path: str, arrays: list[Any], above: list[int]) -> Any:
    if type(value) is dict:
        items = [(key, item, f"{path}[{_key(key)}]") for key, item in value.items()]
        if all(type(key) is str and key != _TAG for key, _, _ in items):
            return {
                _text(key, f"a key of {path}"): _encoded(item, place, arrays, above)
                for key, item, place in items
            }
        pairs = [
            [
                _encoded(key, f"a key of {path}", arrays, above),
                _encoded(item, place, arrays, above),
            ]
            for key, item, place in items
        ]
        return {_TAG: "dict", "of": pairs}
    found = [
        _encoded(item, f"{path}[{number}]", arrays, above)
        for number, item in enumerate(value)
    ]
    return found if type(value) is list else {_TAG: "tuple", "of": found}


def _key(key: object) -> str:
    shown = repr(key)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def _named(kind: type) -> str:
    """``a Sequential (keras.models)``, ``an object``."""
    article = "an" if kind.__name__[:1].lower() in "aeiou" else "a"
    home = "" if kind.__module__ == "builtins" else f" ({kind.__module__})"
    return f"{article} {kind.__name__}{home}"


def _advice(value: object) -> str:
    if callable(getattr(value, "get_weights", None)):
        return "send its get_weights(), or save it and send the path of the file"
    if callable(getattr(value, "numpy", None)):
        return "send its numpy()"
    return f"what can be sent: {PLAIN}"


def _decoded(tree: Any, array: Callable[[int], Any]) -> Any:
    if isinstance(tree, list):
        return [_decoded(item, array) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(_TAG)
    if kind is None:
        return {key: _decoded(item, array) for key, item in tree.items()}
    of = tree["of"]
    if kind == "tuple":
        return tuple(_decoded(item, array) for item in of)
    if kind == "dict":
        return {_decoded(key, array): _decoded(item, array) for key, item in of}
    if kind == "bytes":
        return base64.b64decode(of)
    found = array(of)
    return found if kind == "array" else found[()]
