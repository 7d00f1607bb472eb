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
    """Write ``value``, called ``name``, to a private file. Raises NotPlainError."""
    encoder = _Encoder(value, name)
    beside = f"{path}.new"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        encoder.write(file)
    os.replace(beside, path)  # noqa: PTH105 - nothing else needs pathlib


def packed(value: object, name: str) -> bytes:
    """The bytes of ``value``, subclasses as base classes. Raises NotPlainError."""
    data = io.BytesIO()
    _Encoder(value, name, subclasses=True).write(data)
    return data.getvalue()


def unpacked(data: bytes) -> Any:
    return _decoded(io.BytesIO(data), "the value")


def check(value: object, name: str) -> None:
    """Raise NotPlainError if ``value``, called ``name``, cannot be written."""
    _Encoder(value, name)


def read(path: str) -> Any:
    return _decoded(path, path)


def _numpy() -> Any:
    import numpy.lib.format  # imported here: many values contain no arrays

    return numpy


class _Encoder:
    """A value as JSON, in which other types are dictionaries with the key NUL."""

    def __init__(self, value: object, name: str, *, subclasses: bool = False) -> None:
        self._subclasses = subclasses
        self._arrays: list[Any] = []
        self._above: list[int] = []
        """The containers that contain the current value."""
        self._tree = self._encoded(value, name)

    def write(self, file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w") as members:
            members.writestr(_DATA, json.dumps(self._tree))
            for number, array in enumerate(self._arrays):
                with members.open(f"{number}.npy", "w", force_zip64=True) as member:
                    _numpy().lib.format.write_array(member, array, allow_pickle=False)

    def _encoded(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float):
            return value
        if kind is str:
            return _text(value, path)
        if self._subclasses:
            kind = next((base for base in _BASES if isinstance(value, base)), kind)
        if kind is bytes:
            return {_TAG: "bytes", "of": base64.b64encode(value).decode()}
        if kind in _CONTAINERS:
            if id(value) in self._above:
                raise NotPlainError(f"{path} contains itself")
            self._above.append(id(value))
            tree = self._container(kind, value, path)
            self._above.pop()
            return tree
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            is_array = isinstance(value, numpy.ndarray)
            if self._subclasses or not is_array or kind is numpy.ndarray:
                number = self._add_array(numpy.asarray(value), path)
                return {_TAG: "array" if is_array else "scalar", "of": number}
        raise NotPlainError(f"{path} is {_named(kind)}; {_advice(value)}")

    def _add_array(self, array: Any, path: str) -> int:
        # NumPy's format has no dtypes of other packages, such as bfloat16.
        if array.dtype.hasobject or (array.dtype.kind == "V" and not array.dtype.names):
            what = "objects" if array.dtype.hasobject else array.dtype.name
            raise NotPlainError(f"{path} is a NumPy array of {what}")
        self._arrays.append(array)
        return len(self._arrays) - 1

    def _container(self, kind: type, value: Any, path: str) -> Any:
        if kind is not dict:
            items = [
                self._encoded(item, f"{path}[{number}]")
                for number, item in enumerate(value)
            ]
            return items if kind is list else {_TAG: "tuple", "of": items}
        pairs = [
            [
                self._encoded(key, f"a key of {path}"),
                self._encoded(item, f"{path}[{_key(key)}]"),
            ]
            for key, item in value.items()
        ]
        if all(type(key) is str and key != _TAG for key in value):
            return dict(pairs)
        return {_TAG: "dict", "of": pairs}


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise NotPlainError(f"{path} is no valid text: {error.reason}") from None
    return value


def _key(key: object) -> str:
    shown = repr(key)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def _named(kind: type) -> str:
    article = "an" if kind.__name__[:1].lower() in "aeiou" else "a"
    home = "" if kind.__module__ == "builtins" else f" ({kind.__module__})"
    return f"{article} {kind.__name__}{home}"


def _advice(value: object) -> str:
    if callable(getattr(value, "get_weights", None)):
        return "send its get_weights(), or save it and send the path of the file"
    if callable(getattr(value, "numpy", None)):
        return "send its numpy()"
    return f"what can be sent: {PLAIN}"


def _decoded(file: str | IO[bytes], name: str) -> Any:
    try:
        with zipfile.ZipFile(file) as members:

            def plain(tree: dict[str, Any]) -> Any:
                kind, content = tree.get(_TAG), tree.get("of")
                if kind is None:
                    return tree
                if kind == "tuple":
                    return tuple(content or ())
                if kind == "dict":
                    return dict(content or ())
                if kind == "bytes":
                    return base64.b64decode(content or "")
                data = io.BytesIO(members.read(f"{content}.npy"))
                array = _numpy().lib.format.read_array(data, allow_pickle=False)
                return array if kind == "array" else array[()]

            return json.loads(members.read(_DATA), object_hook=plain)
    except (zipfile.BadZipFile, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{name} is damaged: {error}") from error
