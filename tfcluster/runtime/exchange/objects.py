"""Sends Python objects between ranks, as plain data, which is never executed.

``tfcluster.base.plain_data`` lists the supported types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfcluster.base import plain_data
from tfcluster.runtime.collective import Signature
from tfcluster.runtime.collective.collectives import allgather_bytes, broadcast_bytes
from tfcluster.runtime.process_group import exchanged, rank, size
from tfcluster.runtime.process_sets import ProcessSet, global_process_set


def broadcast_object(
    obj: object = None,
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank ``root_rank``; the other ranks' objects are ignored.

    ``tfcluster.base.plain_data.PLAIN`` lists the supported types. Instances of their
    subclasses come back as their base class, and arrays as new arrays of the same shape
    and dtype. ``name`` must be equal on all ranks; ``session`` is ignored. Raises
    TypeError on all ranks if the object cannot be sent, ValueError if there is no such
    rank or this process is not in ``process_set``, CollectiveMismatchError on all ranks
    if they call something else, and another CollectiveError before ``init`` or if a
    rank is lost or late.
    Follows ``broadcast_object`` of horovod/tensorflow/functions.py, but without
    pickles: received data is never executed.
    """
    if root_rank not in process_set.ranks:
        there = f"{size()} ranks" if process_set.process_set_id == 0 else process_set
        raise ValueError(f"rank {root_rank} is not among {there}")
    root = process_set.ranks.index(root_rank)
    sent = _encoded(obj) if rank() == root_rank else b""
    signature = Signature(f"broadcast of object {name or ''} from rank {root_rank}")
    data = broadcast_bytes(process_set.group(), sent, root, signature)
    exchanged(combined=False)
    return _decoded(data, root_rank)


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
    """The object, or after a first byte of 1 an error for every rank to raise."""
    try:
        return b"\0" + plain_data.packed(obj, "it")
    except (TypeError, RecursionError) as error:
        return b"\1" + str(error).encode()


def _decoded(data: bytes, sender: int) -> Any:
    if data[:1] == b"\1":
        reason = data[1:].decode()
        raise TypeError(f"the object of rank {sender} cannot be sent: {reason}")
    return plain_data.unpacked(data[1:])
