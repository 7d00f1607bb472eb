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
from tfcluster.runtime.partition.variables import VariableCheck, Watched, digest
from tfcluster.runtime.tensor_types import Tensor
from tfcluster.wire import loads

_CHIEF = 0


class Agreement:
    """Compares programs, batches and variables over the ranks.

    ``warn`` is called on all ranks with a text.
    """

    def __init__(self, group: Group, warn: Callable[[str], None]) -> None:
        self._group = group
        self._warn = warn
        self._variables = VariableCheck(group, warn)

    def on(
        self, program: str, inputs: Sequence[Tensor], variables: Sequence[Watched] = ()
    ) -> list[Tensor]:
        """The inputs with which all ranks continue: this rank's, or the chief's.

        ``program`` is equal on all ranks that are to run the same program. The inputs
        are numbers of any shapes and dtypes, which may differ between the ranks. Some
        of the ``variables`` are compared; see ``VariableCheck``. Raises
        CollectiveMismatchError on all ranks if the programs differ, CollectiveError if
        variables do, and what ``Group.exchange`` raises.
        """
        arrays = [np.asarray(each) for each in inputs]
        compared = self._variables.due(program, variables)
        note = struct.pack("<II", _digest(arrays), digest(compared))
        found: list[Array] | None = None
        with self._group.exchange(Signature(program), note=note) as call:
            of_inputs, of_variables = zip(
                *(struct.unpack("<II", each) for each in call.notes), strict=True
            )
            if len(set(of_inputs)) > 1:
                found = _unpacked(call.transport.broadcast(_packed(arrays), _CHIEF))
        differ = len(set(of_variables)) > 1
        self._variables.settle(program, compared, differ=differ)
        if found is None:
            return list(inputs)
        self._warn(
            f"{program}: the ranks have different batches, so all of them compute the "
            "chief's. Is the data shuffled with a seed of its own, or read in another "
            "order on each host?"
        )
        dtypes = [each.dtype for each in inputs]
        return [tf.constant(*pair) for pair in zip(found, dtypes, strict=True)]

    def on_first_values(self, program: str, variables: Sequence[Watched]) -> None:
        """Set the variables that were never compared to the chief's values.

        All ranks must call this. Raises what ``on`` raises.
        """
        new = self._variables.new(variables)
        if new:
            self.on(program, (), new)


def _digest(arrays: Sequence[Array]) -> int:
    """A checksum of shapes, dtypes and values, 32 bits."""
    checksum = zlib.crc32(repr([(a.dtype.str, a.shape) for a in arrays]).encode())
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
    return checksum


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
