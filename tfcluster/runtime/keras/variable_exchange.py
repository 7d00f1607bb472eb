"""Sets variables to values that the ranks compute together, eagerly or in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfcluster.runtime.collective import Signature, tensor_words
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.tf_variables import raw
from tfcluster.runtime.keras.types import Variable
from tfcluster.runtime.tensor_types import Tensor
from tfcluster.runtime.tensors import name_of

Combine = Callable[[Signature, Sequence[Array], Sequence[Array]], Sequence[Array]]
"""A function of the exchange's signature, this rank's values of the variables, and the
values of the other inputs. It returns one array per variable, of its shape and dtype.
"""


def exchange_variables(
    what: str,
    variables: Sequence[Variable],
    combine: Combine,
    inputs: Sequence[Tensor] = (),
) -> None:
    """Assign the result of ``combine`` to ``variables`` when the step runs.

    All ranks must call this at the same point, with variables of the same names, shapes
    and dtypes, which are part of the signature ``what``. ``inputs`` are further tensors
    whose values ``combine`` needs. Raises what ``combine`` raises; in a graph, when the
    op runs.
    """
    targets = [raw(variable) for variable in variables]
    values = [tf.convert_to_tensor(target) for target in targets]
    signature = Signature(
        what,
        tuple(
            tensor_words(name_of(variable), value.dtype.name, value.shape)
            for variable, value in zip(variables, values, strict=True)
        ),
    )
    count = len(values)

    def run(*arrays: Array) -> list[Array]:
        return list(combine(signature, arrays[:count], arrays[count:]))

    found = exchange_in_order(
        run, [*values, *inputs], [value.dtype for value in values]
    )
    # Not with Keras's assign, which would look like an assignment by the program.
    for target, new in zip(targets, tf.nest.flatten(found), strict=True):
        target.assign(tf.ensure_shape(new, target.shape))
