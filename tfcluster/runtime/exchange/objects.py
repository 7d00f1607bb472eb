"""Sends Python objects between ranks, as JSON: received data is never executed.

Supported are None, booleans, numbers, strings, bytes, lists, tuples, dictionaries whose
keys are supported, and numpy arrays and scalars of numbers and booleans.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np

from tfcluster.runtime.collective import Signature
from tfcluster.runtime.collective.collectives import allgather_bytes, broadcast_bytes
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.process_group import exchanged, rank, size
from tfcluster.runtime.process_sets import ProcessSet, global_process_set

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""A value that ``json.dumps`` takes."""

_TAG = "\0"
_NUMERIC_KINDS = "biufc"


def broadcast_object(
    obj: object = None,
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank ``root_rank``; the other ranks' objects are ignored.

    The module's docstring lists the supported types. Instances of subclasses come back
    as their base class, and arrays as new arrays of the same shape and dtype. ``name``
    must be equal on all ranks; ``session`` is ignored. Raises TypeError on all ranks if
    the object cannot be sent, ValueError if there is no such rank or this process is
    not in ``process_set``, CollectiveMismatchError on all ranks if they call something
    else, and another CollectiveError before ``init`` or if a rank is lost or late.
    Follows ``broadcast_object`` of horovod/tensorflow/functions.py, but as JSON instead
    of pickles: received data is never executed.
    """
    if root_rank not in process_set.ranks:
        there = f"{size()} ranks" if process_set.process_set_id == 0 else process_set
        raise ValueError(f"rank {root_rank} is not among {there}")
    root = process_set.ranks.index(root_rank)
    sent = _encoded(obj) if rank() == root_rank else b""
    signature = Signature(f"broadcast of object {name or ''} from rank {root_rank}")
    found = broadcast_bytes(process_set.group(), sent, root, signature)
    exchanged(combined=False)
    return _decoded(found, root_rank)


def broadcast_object_fn(
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[object], Any]:
    """Return a function that broadcasts its argument; see ``broadcast_object``.

    The function raises what ``broadcast_object`` raises. Follows
    ``broadcast_object_fn`` of horovod/tensorflow/functions.py.
    """

    def broadcast(obj: object) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


def allgather_object(
    obj: object,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """The objects of the ranks of ``process_set``, in rank order.

    The objects may differ in type and size. ``session`` is ignored. Raises TypeError on
    all ranks if an object cannot be sent, ValueError if this process is not in
    ``process_set``, and a CollectiveError like ``broadcast_object``. Follows
    ``allgather_object`` of horovod/tensorflow/functions.py.
    """
    signature = Signature(f"allgather of object {name or ''}".rstrip())
    parts = allgather_bytes(process_set.group(), _encoded(obj), signature)
    exchanged(combined=True)
    return [_decoded(part, sender) for sender, part in enumerate(parts)]


def _encoded(obj: object) -> bytes:
    """``[null, data]``, or ``[error, null]`` for every rank to raise."""
    try:
        return json.dumps([None, to_json(obj)]).encode()
    except (TypeError, RecursionError) as error:
        return json.dumps([str(error), None]).encode()


def _decoded(data: bytes, sender: int) -> Any:
    error, found = json.loads(data)
    if error is not None:
        raise TypeError(f"the object of rank {sender} cannot be sent: {error}")
    return from_json(found)


def to_json(value: object) -> Json:
    """Convert to JSON's types. Raises TypeError for values that cannot be sent.

    A type that JSON lacks becomes a dictionary whose key NUL has the type's name.
    """
    if value is None or type(value) in (bool, int, float, str):
        return cast("Json", value)
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "of": [to_json(item) for item in value]}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        if all(type(key) is str and key != _TAG for key in value):
            return {key: to_json(item) for key, item in value.items()}
        pairs: list[Json] = [
            [to_json(key), to_json(item)] for key, item in value.items()
        ]
        return {_TAG: "dict", "of": pairs}
    if isinstance(value, np.ndarray | np.generic):
        return _array_to_json(value)
    raise TypeError(
        f"{type(value).__module__}.{type(value).__qualname__}; what can be sent are "
        "None, booleans, numbers, strings, bytes, numpy arrays of numbers, and lists, "
        "tuples and dictionaries of these"
    )


def _array_to_json(value: Array | np.generic) -> Json:
    array = np.asarray(value)
    if array.dtype.kind not in _NUMERIC_KINDS:
        raise TypeError(f"a numpy array of dtype {array.dtype}")
    return {
        _TAG: "array" if isinstance(value, np.ndarray) else "scalar",
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "of": base64.b64encode(array.tobytes()).decode(),
    }


def from_json(found: Json) -> Any:
    """Undo ``to_json``; arrays are writeable copies.

    Instances of subclasses come back as their base class.
    """
    if isinstance(found, list):
        return [from_json(item) for item in found]
    if not isinstance(found, dict):
        return found
    fields: dict[str, Any] = found
    kind = fields.get(_TAG)
    if kind is None:
        return {key: from_json(item) for key, item in fields.items()}
    if kind == "tuple":
        return tuple(from_json(item) for item in fields["of"])
    if kind == "dict":
        return {from_json(key): from_json(item) for key, item in fields["of"]}
    data = base64.b64decode(fields["of"])
    if kind == "bytes":
        return data
    array = np.frombuffer(data, fields["dtype"]).reshape(fields["shape"]).copy()
    return array if kind == "array" else array[()]
