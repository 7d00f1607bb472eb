"""Before a program runs, the ranks agree that it is the same, and on its inputs.

The invariant of the partition needs equal inputs. Each rank sends a digest of its
batch; where digests differ, all ranks continue with the chief's batch.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Group, Signature
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.tensor_types import Tensor
from tfcluster.wire import loads

_CHIEF = 0


class Agreement:
    """Compares programs and batches over the ranks.

    ``differing`` is called on all ranks with the name of a program whose batches
    differ.
    """

    def __init__(self, group: Group, differing: Callable[[str], None]) -> None:
        self._group = group
        self._differing = differing

    def on(self, program: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs with which all ranks continue: this rank's, or the chief's.

        ``program`` is equal on all ranks that are to run the same program. The inputs
        are numbers of any shapes and dtypes, which may differ between the ranks. Raises
        CollectiveMismatchError on all ranks if the programs differ, and what
        ``Group.exchange`` raises.
        """
        arrays = [np.asarray(each) for each in inputs]
        note = _digest(arrays)
        with self._group.exchange(Signature(program), note=note) as call:
            if len(set(call.notes)) == 1:
                return list(inputs)
            found = _unpacked(call.transport.broadcast(_packed(arrays), _CHIEF))
        self._differing(program)
        dtypes = [each.dtype for each in inputs]
        return [tf.constant(*pair) for pair in zip(found, dtypes, strict=True)]


def _digest(arrays: Sequence[Array]) -> bytes:
    """Eight bytes that differ if the arrays do, but for rare coincidences."""
    checksum = 0
    shapes = zlib.crc32(repr([(a.dtype.str, a.shape) for a in arrays]).encode())
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
    return struct.pack("<II", checksum, shapes)


def _packed(arrays: Sequence[Array]) -> bytes:
    head = json.dumps([[a.dtype.name, a.shape] for a in arrays]).encode()
    data = (np.ascontiguousarray(array).tobytes() for array in arrays)
    return b"".join((struct.pack("<I", len(head)), head, *data))


def _unpacked(data: bytes) -> list[Array]:
    (length,) = struct.unpack_from("<I", data)
    start = 4 + length
    found = []
    for name, shape in loads(data[4:start]):
        dtype = tf.as_dtype(str(name)).as_numpy_dtype
        array: Array = np.frombuffer(
            data, dtype, count=math.prod(shape), offset=start
        ).reshape(shape)
        found.append(array)
        start += array.nbytes
    return found
