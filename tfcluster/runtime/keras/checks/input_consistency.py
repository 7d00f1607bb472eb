"""Detects ranks that read different batches.

Each rank takes its rows from a batch that should be the same on all ranks. A sample of
the first, second, fourth, eighth, ... batch is compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Signature
from tfcluster.runtime.collective.collectives import allgather_bytes
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.tf_variables import new_variable
from tfcluster.runtime.tensor_types import Leaf, Nest, Tensor

_SAMPLE = 256
"""How many numbers at each end of a tensor are compared."""
_DIGEST_BYTES = 4
_ROUNDING = 1e-3
"""Two floats whose absolute or relative difference is smaller than this were only
rounded differently."""
_SIGNATURE = Signature("digest of a batch")


class InputConsistency:
    """Counts training steps, and compares the batches of some steps."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._steps: tf.Variable | None = None

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def look(self, data: Nest) -> None:
        """Compare this rank's batch with the other ranks', eagerly or in a graph.

        ``data`` is the whole batch, before it is divided: tensors and arrays of any
        shapes and dtypes; other leaves are not compared. All ranks must call this.
        Raises what ``Session.differs``, ``exchange_in_order`` and ``Group.exchange``
        raise, when the step runs.
        """
        found = [_sample(leaf) for leaf in tf.nest.flatten(data)]
        samples = [sample for sample in found if sample is not None]
        if not samples:
            return
        if self._steps is None:
            with tf.device("CPU:0"):
                self._steps = new_variable(0, tf.int64)
        step = self._steps.assign_add(1)
        tf.cond(
            tf.equal(tf.bitwise.bitwise_and(step, step - 1), 0),
            lambda: exchange_in_order(self._compare, samples, tf.int64),
            lambda: tf.constant(0, tf.int64),
        )

    def _compare(self, *samples: Array) -> np.int64:
        ours = digest(samples)
        found = allgather_bytes(self._session.group, ours, _SIGNATURE)
        if len(set(found)) > 1 and not self._equal_but_for_rounding(samples):
            self._session.differs(
                "the ranks read different batches. Each rank takes its rows from a "
                "different batch, so some rows are used more often than others. Set a "
                "seed for the data, or use the global random generators of Python, "
                "NumPy, TensorFlow or Keras, which have the same seed on all ranks"
            )
        nothing: np.int64 = np.int64(0)
        return nothing

    def _equal_but_for_rounding(self, samples: Sequence[Array]) -> bool:
        """Whether the ranks' samples differ only by how their processors rounded them.

        All ranks must call this.
        """
        floats = [array for array in samples if array.dtype.kind == "f"]
        others = [array for array in samples if array.dtype.kind != "f"]
        sent = np.concatenate(
            [np.empty(0), *(array.astype(np.float64) for array in floats)]
        ).tobytes()
        signature = Signature("sample of a batch")
        found = allgather_bytes(self._session.group, digest(others) + sent, signature)
        first, *rest = (np.frombuffer(each[_DIGEST_BYTES:]) for each in found)
        return len({each[:_DIGEST_BYTES] for each in found}) == 1 and all(
            each.shape == first.shape
            and np.allclose(each, first, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)
            for each in rest
        )


def digest(arrays: Sequence[Array]) -> bytes:
    """A CRC-32 checksum (4 bytes, big-endian) of arrays of numbers or of bytes."""
    code = 0
    for array in arrays:
        if array.dtype == object:
            array = np.frombuffer(b"\0".join(map(bytes, array)), np.uint8)
        code = zlib.crc32(np.ascontiguousarray(array).tobytes(), code)
    return code.to_bytes(4, "big")


def _sample(leaf: Leaf) -> Tensor | None:
    if isinstance(leaf, tf.SparseTensor | tf.RaggedTensor):
        leaf = leaf.values
    if not isinstance(leaf, tf.Tensor | np.ndarray):
        return None
    flat = tf.reshape(leaf, [-1])
    return tf.concat([flat[:_SAMPLE], flat[-_SAMPLE:]], 0)
