"""Before a program runs, the ranks agree that it is the same, and on its inputs.

The invariant of the partition needs equal inputs. Each rank sends a digest of its
batch; where digests differ, all ranks continue with the chief's batch. Ranks that are
to have batches of their own join them instead.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfcluster.protocol.wire import loads
from tfcluster.runtime.collective import (
    CollectiveMismatchError,
    Group,
    Signature,
    tensor_words,
)
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.partition.host_rows import gathered, packed, unpacked
from tfcluster.runtime.partition.placement import Shard
from tfcluster.runtime.partition.program_inputs import ProgramInput, RowPart
from tfcluster.runtime.partition.variables import VariableCheck, Watched, digest
from tfcluster.runtime.tensor_types import Tensor

_CHIEF = 0


class Agree(Protocol):
    """Compares what all ranks are about to run; see ``Agreement.on``."""

    def __call__(
        self,
        program: str,
        inputs: Sequence[Tensor],
        variables: Sequence[Watched],
        exchanges: Sequence[str],
    ) -> list[Tensor]: ...


class Agreement:
    """Compares programs, batches and variables over the ranks.

    ``warn`` is called on all ranks with a text. For ``is_divided``, see
    ``VariableCheck``.
    """

    def __init__(
        self,
        group: Group,
        warn: Callable[[str], None],
        is_divided: Callable[[Tensor], bool] = lambda handle: False,
    ) -> None:
        self._group = group
        self._warn = warn
        self._signatures: dict[str, tuple[Sequence[Watched], Signature]] = {}
        self.variables = VariableCheck(group, warn, is_divided)

    def on(
        self,
        program: str,
        inputs: Sequence[Tensor],
        variables: Sequence[Watched] = (),
        exchanges: Sequence[str] = (),
    ) -> list[Tensor]:
        """The inputs with which all ranks continue: this rank's, or the chief's.

        ``program`` is equal on all ranks that are to run the same program. The inputs
        have any shapes and dtypes, which may differ between the ranks. Some
        of the ``variables`` are compared; see ``VariableCheck``. ``exchanges`` says
        what the program exchanges, unless its exchanges compare that themselves. Raises
        CollectiveMismatchError on all ranks if the programs differ, or what they
        exchange though their inputs are equal; CollectiveError if variables differ; and
        what ``Group.exchange`` raises.
        """
        arrays = [np.asarray(tensor) for tensor in inputs]
        place = self.variables.place(program)
        compared = self.variables.due(program, variables)
        words = tuple(exchanges)
        # One number for two things: if it differs, the ranks look which of them does.
        rest = digest(compared) ^ (zlib.crc32(repr(words).encode()) if words else 0)
        note = struct.pack("<II", _digest(arrays), rest)
        chief_arrays: list[Array] | None = None
        signature = self._signature(program, variables)
        try:
            with self._group.exchange(signature, note=note) as call:
                of_inputs, of_rest = zip(
                    *(struct.unpack("<II", note) for note in call.notes), strict=True
                )
                if len(set(of_inputs)) > 1:
                    data = call.transport.broadcast(_packed(arrays), _CHIEF)
                    chief_arrays = _unpacked(data)
        except CollectiveMismatchError:
            self.variables.go_back(program, place)
            raise
        differ = len(set(of_rest)) > 1
        if differ and chief_arrays is None:
            with self._group.exchange(Signature(f"exchanges of {program}", words)):
                pass  # Raises the mismatch.
        self.variables.settle(program, compared, differ=differ)
        if chief_arrays is None:
            return list(inputs)
        self._warn(
            f"{program}: the ranks have different batches, so all of them compute the "
            "chief's. Is the data read in another order on each host, or drawn by "
            "random ops in a parallel map()? If the program shards it by rank, remove "
            "shard(), or set runtime.batch: per_worker"
        )
        pairs = zip(chief_arrays, inputs, strict=True)
        return [tf.constant(array, own.dtype) for array, own in pairs]

    def on_first_values(self, program: str, variables: Sequence[Watched]) -> None:
        """Set the variables that were never compared to the chief's values.

        All ranks must call this. Raises what ``on`` raises.
        """
        new = self.variables.new(variables)
        if new:
            self.on(program, (), new)

    def _signature(self, program: str, variables: Sequence[Watched]) -> Signature:
        """The program's name and what it calls its variables, with their shapes."""
        entry = self._signatures.get(program)
        if entry is None or entry[0] is not variables:
            words = tuple(
                tensor_words(variable.name, variable.dtype.name, variable.shape)
                for variable in variables
            )
            entry = self._signatures[program] = variables, Signature(program, words)
        return entry[1]


def agree_on_shapes(agree: Agree, program: str, shapes: Sequence[str]) -> None:
    """Compare the shapes for which the ranks have traced a program's function.

    Raises CollectiveMismatchError if they differ: then not all ranks can compute the
    chief's batch.
    """
    try:
        agree(program, [], [], shapes)
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"{error}. These are the shapes of their batches, for which the function "
            "was traced, so a rank cannot compute the chief's batch. Let all ranks "
            "read the same data in the same order, or give the function an "
            "input_signature with None for what varies"
        ) from None


def joined(group: Group, program: str, batch: Sequence[Tensor]) -> list[ProgramInput]:
    """This rank's rows of the batch that the batches of all ranks are together.

    Each tensor has the rows of this rank's batch in its first dimension. If the ranks
    have unlike numbers of rows, the results are the whole batch. Raises
    CollectiveMismatchError if other dimensions or dtypes differ, and what
    ``Group.exchange`` raises.
    """
    rows = int(batch[0].shape[0])
    words = tuple(
        tensor_words(f"input {i}", tensor.dtype.name, (None, *tensor.shape[1:]))
        for i, tensor in enumerate(batch)
    )
    signature = Signature(f"batches of {program}", words)
    with group.exchange(signature, note=struct.pack("<Q", rows)) as call:
        counts = [struct.unpack("<Q", note)[0] for note in call.notes]
        shard = Shard(0, sum(counts))
        whole = [(shard.rows, *tensor.shape[1:]) for tensor in batch]
        if len(set(counts)) == 1:
            parts = [RowPart(shard, shape) for shape in whole]
            return [ProgramInput(*pair) for pair in zip(batch, parts, strict=True)]
        arrays = [gathered(call.transport, np.asarray(own), shard) for own in batch]
    pairs = zip(arrays, batch, strict=True)
    return [ProgramInput(tf.constant(array, own.dtype)) for array, own in pairs]


def _digest(arrays: Sequence[Array]) -> int:
    """A checksum of shapes, dtypes and values, 32 bits."""
    checksum = zlib.crc32(repr([(a.dtype.str, a.shape) for a in arrays]).encode())
    for array in arrays:
        if array.dtype == object:
            checksum = zlib.crc32(packed(array), checksum)
            continue
        flat = np.ascontiguousarray(array).reshape(-1)
        checksum = zlib.crc32(flat.view(np.uint8).data, checksum)
    return checksum


def _packed(arrays: Sequence[Array]) -> bytes:
    """Arrays of numbers, or of strings, which are ``bytes`` objects."""
    parts = list(map(packed, arrays))
    kinds = [
        [array.dtype.name, array.shape, len(part)]
        for array, part in zip(arrays, parts, strict=True)
    ]
    head = json.dumps(kinds).encode()
    return b"".join((struct.pack("<I", len(head)), head, *parts))


def _unpacked(data: bytes) -> list[Array]:
    (length,) = struct.unpack_from("<I", data)
    start = 4 + length
    arrays: list[Array] = []
    for name, shape, nbytes in loads(data[4:start]):
        is_text = name == "object"
        dtype = np.object_ if is_text else tf.as_dtype(str(name)).as_numpy_dtype
        part = data[start : start + nbytes]
        arrays.append(unpacked(part, np.dtype(dtype)).reshape(shape))
        start += nbytes
    return arrays
