"""The API of ``horovod.keras``: functions whose arguments differ from other modules'.

They exchange values: a tensor, an array or a number. The result is a tensor, or an
array if the default session of a TensorFlow 1 program can compute it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcluster import runtime
from tfcluster.runtime.collective import ReduceOp
from tfcluster.runtime.exchange.wire_format import Compressor
from tfcluster.runtime.process_sets import ProcessSet, global_process_set
from tfcluster.runtime.tensor_types import Tensor

__all__ = list(runtime.__all__)  # Most of these come from __getattr__.


def __getattr__(name: str) -> object:
    return getattr(runtime, name)


def allreduce(
    value: Tensor,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Compressor | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine the ranks' values, of equal shape and dtype; average them by default.

    Returns a tensor of that shape and dtype, or in a graph with a default session an
    array. The other arguments and the errors are as for
    ``tfcluster.runtime.allreduce``. Follows ``allreduce`` of horovod/keras/__init__.py.
    """
    return _value(
        runtime.allreduce(
            tf.convert_to_tensor(value),
            average,
            op,
            name,
            compression,
            prescale_factor,
            postscale_factor,
            process_set=process_set,
        )
    )


def allgather(
    value: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Concatenate the ranks' values along the first dimension.

    The other dimensions and the dtype must be equal on all ranks. Returns a value like
    ``allreduce``. Raises what ``tfcluster.runtime.allgather`` raises. Follows
    ``allgather`` of horovod/keras/__init__.py.
    """
    return _value(runtime.allgather(value, 0, name, process_set=process_set))


def broadcast(
    value: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The value of rank ``root_rank``, of equal shape and dtype on all ranks.

    Returns a value like ``allreduce``. Raises what ``tfcluster.runtime.broadcast``
    raises. Follows ``broadcast`` of horovod/keras/__init__.py.
    """
    return _value(runtime.broadcast(value, root_rank, name, process_set=process_set))


def reducescatter(
    value: Tensor,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine the ranks' values and return this rank's rows of the first dimension.

    Returns a value like ``allreduce``. The rows and the errors are as for
    ``tfcluster.runtime.reducescatter``. Follows ``reducescatter`` of
    horovod/keras/__init__.py.
    """
    return _value(runtime.reducescatter(value, op, name, process_set=process_set))


def _value(tensor: Tensor) -> Any:
    session = tf.compat.v1.get_default_session()
    return tensor if session is None else session.run(tensor)
