"""Recurrent layers that keep their state from batch to batch (``stateful=True``).

Their states have one row for each row of the batch, so a rank needs the states of its
rows. The variables have the rows of the whole batch on every rank, as on one machine.
In each step a rank begins with its rows of the variables, and at the end all ranks get
the new states of all rows, with one exchange for each layer. So the states are complete
whenever they are read, reset or saved, and when a batch is not divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.losses.whole_batch import WholeBatch
from tfcluster.runtime.keras.session import BY_ROWS, Session, Share
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.keras.types import RNN
from tfcluster.runtime.tensor_types import Nest, Number, Tensor


class RnnStates:
    """The hook on the call of ``keras.layers.RNN`` and its subclasses."""

    def __init__(self, session: Session, whole_batch: WholeBatch) -> None:
        self._session = session
        self._whole_batch = whole_batch

    def install(self) -> None:
        """Install the hook in Keras, once per process."""
        patches.TABLE.install({patches.RNN_CALL: self._call})

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _call(
        self,
        original: Callable[..., Nest],
        layer: RNN,
        sequences: Tensor,
        initial_state: Nest = None,
        mask: Nest = None,
        training: bool = False,
    ) -> Nest:
        """The layer's call, with Keras's arguments and result.

        ``sequences`` has this rank's rows in its first dimension. Raises ValueError if
        the whole batch does not have as many rows as the states; see ``_rows``.
        """
        share = self._session.share
        if (
            not layer.stateful
            or initial_state is not None
            or share is None
            or share.total is None
            or not self._whole_batch.may_gather()
        ):
            if layer.stateful and self._session.within(BY_ROWS):
                # A check calls the layer with some of the rows only.
                return _stateless(original, layer, sequences, None, mask, training)
            return original(layer, sequences, initial_state, mask, training)
        variables = keras.tree.flatten(layer.states)
        first, present = _rows(layer, share, int(variables[0].shape[0]))
        own = keras.tree.map_structure(
            lambda variable: tf.convert_to_tensor(variable)[first : first + present],
            layer.states,
        )
        kept = layer.return_state
        found = _stateless(original, layer, sequences, own, mask, training)
        new = [tf.stop_gradient(state) for state in keras.tree.flatten(found[1:])]
        gathered = self._whole_batch.gather(new, f"states of {layer.name}")
        for variable, state in zip(variables, gathered, strict=True):
            # Not with Keras's assign: the variable would look like a moving average,
            # which is averaged over the ranks.
            scoped = internals.in_stateless_scope()
            target = variable if scoped else raw(variable)
            target.assign(tf.ensure_shape(state, variable.shape))
        return found if kept else found[0]


def _stateless(
    original: Callable[..., Nest],
    layer: RNN,
    sequences: Tensor,
    initial_state: Nest,
    mask: Nest,
    training: bool,
) -> Any:
    """The layer's call without its own states.

    With an ``initial_state``, returns a tuple of the outputs and the new states.
    """
    before = layer.return_state
    layer.stateful, layer.return_state = False, before or initial_state is not None
    try:
        return original(layer, sequences, initial_state, mask, training)
    finally:
        layer.stateful, layer.return_state = True, before


def _rows(layer: RNN, share: Share, size: int) -> tuple[Number, Number]:
    """This rank's first row and number of rows, in a batch with ``size`` rows.

    Raises ValueError if the batch has another number of rows. In a graph for batches of
    any size, raises InvalidArgumentError when the step runs.
    """
    problem = (
        f"the layer {layer.name} is stateful, for batches of {size} rows: all batches "
        "need this number of rows. Use drop_remainder=True, or a number of samples "
        "that batch_size divides"
    )
    total = share.total
    if not tf.is_tensor(total) and not tf.is_tensor(share.undivided):
        if share.undivided:
            return 0, size
        if total != size:
            raise ValueError(problem)
        return share.first, max(int(share.present), 1)
    same = tf.equal(tf.cast(total, tf.int64), size)
    undivided = tf.cast(share.undivided, tf.bool)
    with tf.control_dependencies([tf.debugging.Assert(same | undivided, [problem])]):
        first = tf.cast(tf.identity(share.first), tf.int64)
    present = tf.maximum(tf.cast(share.present, tf.int64), 1)
    return (
        tf.where(undivided, tf.zeros_like(first), first),
        tf.where(undivided, tf.constant(size, tf.int64), present),
    )
