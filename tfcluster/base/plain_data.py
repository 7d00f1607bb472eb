"""Plain data as bytes, without pickle: what a rank gets, returns and sends to others.

The bytes are a zip archive: ``data.json`` has the structure, and each NumPy array is a
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
from functools import partial
from typing import IO, Any

PLAIN = (
    "None, bool, int, float, str, bytes, list, tuple, dict and NumPy arrays, and "
    "lists, tuples and dicts of these"
)
_DATA = "data.json"
_TAG = "\0"
_CONTAINERS = (list, tuple, dict)
_BASES = (bytes, *_CONTAINERS)


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
    with os.fdopen(descriptor, "wb") as file:
        _put(file, tree, arrays)
    os.replace(beside, path)  # noqa: PTH105 - nothing else needs pathlib


def packed(value: object, name: str) -> bytes:
    """The bytes of ``value``; an instance of a subclass counts as its base class.

    Raises NotPlainError.
    """
    arrays: list[Any] = []
    tree = _encoded(value, name, arrays, [], subclasses=True)
    data = io.BytesIO()
    _put(data, tree, arrays)
    return data.getvalue()


def unpacked(data: bytes) -> Any:
    """The value of ``packed``. Raises ValueError if the bytes are damaged."""
    return _got(io.BytesIO(data), "the value")


def check(value: object, name: str) -> None:
    """Raise NotPlainError if ``value``, called ``name``, cannot be written."""
    _encoded(value, name, [], [])


def read(path: str) -> Any:
    """The value in a file. Raises OSError, or ValueError if the file is damaged."""
    return _got(path, path)


def _put(file: IO[bytes], tree: Any, arrays: list[Any]) -> None:
    with zipfile.ZipFile(file, "w") as members:
        members.writestr(_DATA, json.dumps(tree))
        for number, array in enumerate(arrays):
            with members.open(f"{number}.npy", "w", force_zip64=True) as member:
                _numpy().lib.format.write_array(member, array, allow_pickle=False)


def _got(file: str | IO[bytes], name: str) -> Any:
    try:
        with zipfile.ZipFile(file) as members:
            tree = json.loads(members.read(_DATA))
            return _decoded(tree, lambda number: _array(members, number))
    except (zipfile.BadZipFile, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{name} is damaged: {error}") from error


def _array(members: zipfile.ZipFile, number: int) -> Any:
    data = io.BytesIO(members.read(f"{number}.npy"))
    return _numpy().lib.format.read_array(data, allow_pickle=False)


def _numpy() -> Any:
    import numpy.lib.format  # imported here: many values contain no arrays

    return numpy


def _encoded(
    value: Any,
    path: str,
    arrays: list[Any],
    above: list[int],
    *,
    subclasses: bool = False,
) -> Any:
    """The value as JSON; other types become a dictionary with the key NUL."""
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return value
    if kind is str:
        return _text(value, path)
    if subclasses:
        kind = next((base for base in _BASES if isinstance(value, base)), kind)
    if kind is bytes:
        return {_TAG: "bytes", "of": base64.b64encode(value).decode()}
    if kind in _CONTAINERS:
        if id(value) in above:
            raise NotPlainError(f"{path} contains itself")
        above.append(id(value))
        inner = partial(_encoded, arrays=arrays, above=above, subclasses=subclasses)
        found = _container(kind, value, path, inner)
        above.pop()
        return found
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        is_array = isinstance(value, numpy.ndarray)
        if subclasses or not is_array or kind is numpy.ndarray:
            return _noted(numpy.asarray(value), path, arrays, is_array=is_array)
    raise NotPlainError(f"{path} is {_named(kind)}; {_advice(value)}")


def _noted(array: Any, path: str, arrays: list[Any], *, is_array: bool) -> Any:
    # NumPy's format does not know the dtypes of other packages, such as bfloat16.
    if array.dtype.hasobject or (array.dtype.kind == "V" and not array.dtype.names):
        what = "objects" if array.dtype.hasobject else array.dtype.name
        raise NotPlainError(f"{path} is a NumPy array of {what}")
    arrays.append(array)
    return {_TAG: "array" if is_array else "scalar", "of": len(arrays) - 1}


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise NotPlainError(f"{path} is no valid text: {error.reason}") from None
    return value


def _container(
    kind: type, value: Any, path: str, encoded: Callable[[Any, str], Any]
) -> Any:
    if kind is dict:
        items = [(key, item, f"{path}[{_key(key)}]") for key, item in value.items()]
        if all(type(key) is str and key != _TAG for key, _, _ in items):
            return {
                _text(key, f"a key of {path}"): encoded(item, place)
                for key, item, place in items
            }
        pairs = [
            [encoded(key, f"a key of {path}"), encoded(item, place)]
            for key, item, place in items
        ]
        return {_TAG: "dict", "of": pairs}
    found = [encoded(item, f"{path}[{number}]") for number, item in enumerate(value)]
    return found if kind is list else {_TAG: "tuple", "of": found}


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
