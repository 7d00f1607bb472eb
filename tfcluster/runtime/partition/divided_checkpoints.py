"""Checkpoints of TensorFlow's with weights that are divided by rows.

The chief writes such a weight a slice of rows at a time, each into a file of its own,
as for variables that are divided among servers. TensorFlow reads it as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.partition.divided_variables import (
    DividedVariable,
    DividedVariables,
)
from tfcluster.runtime.tensor_types import Tensor

_NAME = "tfcluster_rows"
SLICE_BYTES = 32 << 20
"""About the size of the slices: how much memory the chief needs, and each file has."""


class DividedCheckpoints:
    """Saves and restores weights that are divided by rows, in TensorFlow's checkpoints.

    ``table_of`` says whether an object that a checkpoint saves is such a weight.
    """

    def __init__(
        self,
        tables: DividedVariables,
        table_of: Callable[[Any], DividedVariable | None],
    ) -> None:
        self._tables = tables
        self._table_of = table_of

    def without_tables(
        self,
        original: Callable[..., None],
        saver: Any,
        tensors: Mapping[Any, Mapping[str, Any]],
        *args: Any,
        **keywords: Any,
    ) -> None:
        """Create TensorFlow's saver of variables, which leaves divided ones to this.

        ``tensors`` are what each object saves, by the keys in the checkpoint.
        """
        divided: dict[str, DividedVariable] = {}
        others = type(tensors)()
        for saved, of_object in tensors.items():
            table = self._table_of(_object_of(saved))
            if table is None:
                others[saved] = of_object  # type: ignore[index]
            else:
                divided |= dict.fromkeys(of_object, table)
        original(saver, others, *args, **keywords)
        if divided:
            save, restore = (
                partial(self._save, divided),
                partial(self._restore, divided),
            )
            tf_internals.add_saver(saver, _NAME, save, restore)

    def _save(
        self, divided: Mapping[str, DividedVariable], path: Tensor
    ) -> list[Tensor]:
        """Write all rows; returns the prefixes of the files, which are then merged."""
        prefix = tf.compat.as_str(path.numpy()).removesuffix(f"-{_NAME}")
        written: list[str] = []
        for key, table in divided.items():
            for first, end in table.chunks(nbytes=SLICE_BYTES):
                written.append(f"{prefix}_temp/rows-{len(written)}")
                tf.raw_ops.SaveV2(
                    prefix=written[-1],
                    tensor_names=[key],
                    shape_and_slices=[_slice(table, first, end)],
                    tensors=[self._tables.rows(table, first, end)],
                )
        return list(map(tf.constant, written))

    def _restore(self, divided: Mapping[str, DividedVariable], prefix: Tensor) -> None:
        """Read this process's rows, by the slices that were saved.

        TensorFlow reads a slice as a whole, so of a weight that was saved as a whole
        all rows are read, once.
        """
        listed = tf.train.load_checkpoint(prefix.numpy()).debug_string().split(b"\n")
        for key, table in divided.items():
            is_whole = any(line.startswith(f"{key} (".encode()) for line in listed)
            nbytes = table.nbytes if is_whole else SLICE_BYTES
            self._tables.assign(table, partial(_stored, prefix, key, table), nbytes)


def _object_of(saved: Any) -> Any:
    """The object of the program that is saved: TensorFlow may wrap it twice."""
    wrapped = getattr(saved, "obj", None)
    return saved if wrapped is None else getattr(wrapped, "op", wrapped)


def _stored(
    prefix: Tensor, key: str, table: DividedVariable, first: int, end: int
) -> Tensor:
    """Rows in a checkpoint. Raises a ``tf.errors.OpError`` if it has others."""
    (rows,) = tf.raw_ops.RestoreV2(
        prefix=prefix,
        tensor_names=[key],
        shape_and_slices=[_slice(table, first, end)],
        dtypes=[table.dtype],
    )
    return rows


def _slice(table: DividedVariable, first: int, end: int) -> str:
    """Rows of a variable as TensorFlow's checkpoints name them."""
    others = ["-"] * (len(table.shape) - 1)
    sizes = " ".join(map(str, table.shape))
    return f"{sizes} {':'.join([f'{first},{end - first}', *others])}"
