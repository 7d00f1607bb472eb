"""allgather, broadcast and alltoall: they move values and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfcluster.runtime import process_group
from tfcluster.runtime.collective import ReduceOp, Signature, tensor_words
from tfcluster.runtime.collective.packing import allgatherv, alltoallv
from tfcluster.runtime.collective.transports.base import Array, flat_bytes
from tfcluster.runtime.exchange.graph_ops import (
    exchange_op,
    require_numbers,
    unconverted,
    with_gradients,
)
from tfcluster.runtime.exchange.reduce_engine import Exchange, reduce_tensors
from tfcluster.runtime.exchange.wire_format import Reduction
from tfcluster.runtime.process_sets import (
    ProcessSet,
    global_process_set,
    process_set_of,
)
from tfcluster.runtime.tensor_types import Gradient, Tensor
from tfcluster.runtime.tensors import as_tensor, is_inexact, name_of


def size_op(process_set_id: int | str = 0, name: str | None = None) -> Tensor:
    """``size()`` of a process set as an int32 scalar tensor.

    It is a constant: the value when the op is created. A string given as
    ``process_set_id`` is taken as the name. Raises ValueError if there is no such
    process set, and NoRankError in a ps or data task. Follows ``size_op`` of
    horovod/tensorflow/mpi_ops.py, as do the other functions here.
    """
    if isinstance(process_set_id, str):
        return size_op(0, process_set_id)
    return tf.constant(process_set_of(process_set_id).size(), tf.int32, name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """1 if this process is in the process set, else 0, as an int32 scalar tensor.

    Raises ValueError if there is no such process set, NoRankError in a ps or data task.
    """
    included = process_set_of(process_set_id).included()
    return tf.constant(int(included), tf.int32, name=name)


def rank_op(name: str | None = None) -> Tensor:
    """``rank()`` as an int32 scalar tensor.

    Raises what ``rank`` raises.
    """
    return tf.constant(process_group.rank(), tf.int32, name=name)


def local_size_op(name: str | None = None) -> Tensor:
    """``local_size()`` as an int32 scalar tensor.

    Raises what ``local_size`` raises.
    """
    return tf.constant(process_group.local_size(), tf.int32, name=name)


def local_rank_op(name: str | None = None) -> Tensor:
    """``local_rank()`` as an int32 scalar tensor.

    Raises what ``local_rank`` raises.
    """
    return tf.constant(process_group.local_rank(), tf.int32, name=name)


_Backward: TypeAlias = Callable[..., list[Gradient]]
"""Computes the gradients of an op's inputs from the gradients of its outputs."""


@unconverted
def allgather(
    tensor: Tensor,
    axis: int | str | None = 0,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Concatenate the ranks' tensors along ``axis``, in rank order.

    ``tensor`` has at least one dimension and a dtype as in ``allreduce``. Dtypes must
    be equal on all ranks, shapes may differ only along ``axis`` (negative numbers count
    from the last; None means 0). The result has the dtype, and along ``axis`` the sum
    of the ranks' lengths. The gradient is this rank's part of the mean of the ranks'
    gradients. A string given as ``axis`` is taken as the name, because ``name`` is
    Horovod's second argument; ``ignore_name_scope`` has no effect.

    Raises ValueError for scalars, for an axis that does not exist or of a tensor whose
    number of dimensions is unknown, and if this process is not in ``process_set``;
    TypeError for tensors that are neither numbers nor booleans; CollectiveMismatchError
    on all ranks if they differ otherwise, and another CollectiveError before ``init``
    or if a rank is lost or late. Follows ``allgather`` of
    horovod/tensorflow/mpi_ops.py.
    """
    if isinstance(axis, str):
        name = axis
    if not isinstance(axis, int):
        axis = 0
    tensor = tf.convert_to_tensor(tensor)
    if axis:
        order = _swapped(tensor.shape.rank, axis)
        moved = allgather(tf.transpose(tensor, order), 0, name, process_set=process_set)
        return tf.transpose(moved, order)
    what = f"allgather of {name}" if name else "allgather"
    return gather_tensors([tensor], what, process_set)[0]


@unconverted
def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """``allgather`` each tensor of a list along axis 0, all in one exchange.

    Returns a list of the same length and order; the number of rows may differ between
    tensors and ranks. Shapes, dtypes and errors are as for ``allgather``. Follows
    ``grouped_allgather`` of horovod/tensorflow/mpi_ops.py.
    """
    what = f"grouped allgather of {name}" if name else "grouped allgather"
    return gather_tensors(tensors, what, process_set)


def gather_tensors(
    tensors: Sequence[Tensor], what: str, among: ProcessSet = global_process_set
) -> list[Tensor]:
    """Concatenate the ranks' tensors along the first dimension, in one exchange.

    ``what`` names the exchange: see ``exchange_op``. Raises what ``allgather`` raises.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for tensor in tensors:
        require_numbers(tensor.dtype, what)
        if tensor.shape.rank == 0:
            raise ValueError(f"{what} takes tensors of at least one dimension")

    def forward(*flat: Tensor) -> tuple[list[Tensor], _Backward]:
        results, counts = _gathered(flat, what, among)

        def backward(*upstream: Tensor | None) -> list[Gradient]:
            totals = _averaged(upstream, results, f"gradient of {what}", among)
            starts = tf.reduce_sum(counts[:, : among.rank()], axis=1)
            rows = counts[:, among.rank()]
            return [
                None
                if total is None
                else as_tensor(total)[starts[i] : starts[i] + rows[i]]
                for i, total in enumerate(totals)
            ]

        return results, backward

    return with_gradients(forward, tensors)


def _gathered(
    tensors: Sequence[Tensor], what: str, among: ProcessSet
) -> tuple[list[Tensor], Tensor]:
    """The results, and the ranks' row counts (int64, tensors x ranks)."""
    dtypes = [tensor.dtype for tensor in tensors]

    def act(*arrays: Array) -> list[Array]:
        words = tuple(
            tensor_words("rows of", dtype.name, array.shape[1:])
            for dtype, array in zip(dtypes, arrays, strict=True)
        )
        with among.group().exchange(Signature(what, words)) as call:
            gathered = [allgatherv(call.transport, array) for array in arrays]
        counts = np.array([counts for _, counts in gathered], np.int64)
        return [*(result for result, _ in gathered), counts]

    *results, counts = exchange_op(act, tensors, [*dtypes, tf.int64], what, among)
    for result, tensor in zip(results, tensors, strict=True):
        result.set_shape([None, *tensor.shape[1:]])
    counts.set_shape([len(tensors), among.size()])
    return results, counts


@unconverted
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The tensor of rank ``root_rank``; shapes and dtypes must be equal on all ranks.

    ``tensor`` has any shape and a dtype as in ``allreduce``; the result has the same.
    ``root_rank`` is a rank of all ranks, also with ``process_set``. At the root the
    gradient is the mean of the ranks' gradients, elsewhere it is zero.
    ``ignore_name_scope`` has no effect.

    Raises ValueError if there is no such rank in ``process_set`` or this process is not
    in it, TypeError for tensors that are neither numbers nor booleans,
    CollectiveMismatchError on all ranks if they differ, and another CollectiveError
    before ``init`` or if a rank is lost or late. Follows ``broadcast`` of
    horovod/tensorflow/mpi_ops.py.
    """
    what = f"broadcast of {name}" if name else "broadcast"
    return broadcast_tensors([tensor], root_rank, what, ["tensor"], process_set)[0]


def broadcast_tensors(
    tensors: Sequence[Tensor],
    root_rank: int,
    what: str,
    names: Sequence[str],
    among: ProcessSet = global_process_set,
) -> list[Tensor]:
    """The tensors of rank ``root_rank``, sent in one exchange.

    ``names`` are the tensors' names, for the error message if the ranks' tensors
    differ; ``what`` names the exchange: see ``exchange_op``. Raises what ``broadcast``
    raises.
    """
    if root_rank not in among.ranks:
        there = f"{among.size()} ranks" if among.process_set_id == 0 else among
        raise ValueError(f"rank {root_rank} is not among {there}")
    root = among.ranks.index(root_rank)
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for tensor in tensors:
        require_numbers(tensor.dtype, what)
    if not tensors:
        return []

    def forward(*flat: Tensor) -> tuple[list[Tensor], _Backward]:
        results = _broadcast(flat, root, what, names, among)

        def backward(*upstream: Tensor | None) -> list[Gradient]:
            totals = _averaged(upstream, results, f"gradient of {what}", among)
            if among.rank() == root:
                return totals
            return [None if total is None else _zeros_after(total) for total in totals]

        return results, backward

    return with_gradients(forward, tensors)


def _broadcast(
    tensors: Sequence[Tensor],
    root: int,
    what: str,
    names: Sequence[str],
    among: ProcessSet,
) -> list[Tensor]:
    dtypes = [tensor.dtype for tensor in tensors]

    def act(*arrays: Array) -> list[Array]:
        words = tuple(
            tensor_words(name, dtype.name, array.shape)
            for name, dtype, array in zip(names, dtypes, arrays, strict=True)
        )
        signature = Signature(f"{what} from rank {among.ranks[root]}", words)
        with among.group().exchange(signature) as call:
            data = call.transport.broadcast(flat_bytes(arrays), root)
        ends = np.cumsum([0, *(array.nbytes for array in arrays)])
        return [
            np.frombuffer(data[start:end], array.dtype).reshape(array.shape)
            for start, end, array in zip(ends[:-1], ends[1:], arrays, strict=True)
        ]

    results = exchange_op(act, tensors, dtypes, what, among, combines=False)
    for result, tensor in zip(results, tensors, strict=True):
        result.set_shape(tensor.shape)
    return results


@unconverted
def broadcast_variables(
    variables: Iterable[tf.Variable],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Set TensorFlow or Keras variables to the values of rank ``root_rank``.

    They are sent in one exchange. Order, names, shapes and dtypes must be the same on
    all ranks; ``allreduce`` lists the supported dtypes. Returns None, or in a
    TensorFlow 1 graph the op that assigns the variables. ``inplace`` is an argument of
    Horovod's function and has no effect. Raises what ``broadcast`` raises. Follows
    ``broadcast_variables`` of horovod/tensorflow/functions.py.
    """
    chosen = list(variables)
    values = broadcast_tensors(
        [tf.convert_to_tensor(variable) for variable in chosen],
        root_rank,
        "broadcast of variables",
        [name_of(variable) for variable in chosen],
        process_set,
    )
    assigned = [
        variable.assign(value) for variable, value in zip(chosen, values, strict=True)
    ]
    in_graph = not tf.compat.v1.executing_eagerly_outside_functions()
    return tf.group(*assigned) if in_graph else None


def broadcast_(
    variables: Iterable[tf.Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Variable | Tensor]:
    """Like ``broadcast_variables``, but returns the variables.

    In a TensorFlow 1 graph it returns tensors with the new values instead, which have
    the variables' shapes and dtypes. ``name`` has no effect. Raises what ``broadcast``
    raises. Follows ``broadcast_`` of horovod/tensorflow/mpi_ops.py.
    """
    chosen = list(variables)
    done = broadcast_variables(chosen, root_rank, process_set)
    if done is None:
        return chosen
    with tf.control_dependencies([done]):
        return [tf.identity(variable.read_value()) for variable in chosen]


def broadcast_global_variables(root_rank: int) -> tf.Operation | None:
    """Call ``broadcast_variables`` for all global variables of a TensorFlow 1 graph.

    Returns the op that assigns them. Raises RuntimeError in TensorFlow 2, which keeps
    no list of all variables, and what ``broadcast`` raises. Follows
    ``broadcast_global_variables`` of horovod/tensorflow/__init__.py.
    """
    if tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            "broadcast_global_variables is for TensorFlow 1 graphs: with eager "
            "execution, no list of all variables exists. Call "
            "broadcast_variables(model.variables, root_rank), and the same for "
            "optimizer.variables"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


@unconverted
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every rank: the next ``splits[r]`` rows go to rank r.

    ``tensor`` has shape (rows, ...) and a dtype as in ``allreduce``. ``splits`` has
    shape (ranks,), integers; rows beyond their sum are not sent. Without it the rows
    are divided evenly. Returns the received rows in rank order, of the same dtype and
    other dimensions, and if ``splits`` was given also how many came from each rank:
    int32, shape (ranks,). The gradient is sent back the same way; it is zero for rows
    that were not sent. ``ignore_name_scope`` has no effect.

    Raises ValueError for scalars, if this process is not in ``process_set``, and if the
    splits do not fit the rows in the same way on every rank. Raises
    CollectiveMismatchError on all ranks if the splits do not fit on some ranks only, or
    if tensors differ in more than their rows; another CollectiveError before ``init``
    or if a rank is lost or late; TypeError for tensors that are neither numbers nor
    booleans. Follows ``alltoall`` of horovod/tensorflow/mpi_ops.py.
    """
    what = f"alltoall of {name}" if name else "alltoall"
    tensor = tf.convert_to_tensor(tensor)
    require_numbers(tensor.dtype, what)
    if tensor.shape.rank == 0:
        raise ValueError(f"{what} takes tensors of at least one dimension")
    even = splits is None
    row_counts = tf.zeros([0], tf.int64) if even else tf.cast(splits, tf.int64)

    def forward(tensor: Tensor) -> tuple[list[Tensor], _Backward]:
        result, received, sent = _swapped_rows(
            tensor, row_counts, what, process_set, even=even
        )

        def backward(upstream: Tensor, *_: Tensor | None) -> list[Gradient]:
            back = _swapped_rows(
                upstream, received, f"gradient of {what}", process_set, even=False
            )[0]
            rows = tf.shape(tensor, tf.int64)[0] - tf.reduce_sum(sent)
            stayed = tf.concat([[rows], tf.shape(back, tf.int64)[1:]], 0)
            return [tf.concat([back, tf.zeros(stayed, back.dtype)], 0)]

        return [result, received], backward

    result, received = with_gradients(forward, [tensor])
    return result if even else (result, tf.cast(received, tf.int32))


def _swapped_rows(
    tensor: Tensor, splits: Tensor, what: str, among: ProcessSet, *, even: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The received rows, and the counts of rows received from and sent to each rank.

    The counts are int64 vectors with an element for each rank.
    """
    dtype = tensor.dtype

    def act(array: Array, splits: Array) -> list[Array]:
        ranks = among.group()
        sent, wrong = _checked(splits, len(array), ranks.size, even=even)
        words = tensor_words("rows of", dtype.name, array.shape[1:])
        # A rank with wrong splits says so in its signature, so no rank waits for it.
        with ranks.exchange(
            Signature(what, (words, wrong or "splits that fit"))
        ) as call:
            if not wrong:
                result, received = alltoallv(call.transport, array, sent)
        if wrong:
            raise ValueError(f"{what}: {wrong}")
        return [result, received, np.array(sent, np.int64)]

    result, received, sent = exchange_op(
        act, [tensor, splits], [dtype, tf.int64, tf.int64], what, among
    )
    result.set_shape([None, *tensor.shape[1:]])
    received.set_shape([among.size()])
    sent.set_shape([among.size()])
    return result, received, sent


def _checked(
    splits: Array, rows: int, size: int, *, even: bool
) -> tuple[list[int], str | None]:
    """The number of rows for each rank, and a description of what is wrong, if any."""
    if even:
        fits = rows % size == 0
        return [rows // size] * size, (
            None if fits else f"{rows} rows cannot be divided evenly among {size} ranks"
        )
    wanted = [int(split) for split in splits.reshape(-1)]
    fits = len(wanted) == size and min(wanted) >= 0 and sum(wanted) <= rows
    return wanted, None if fits else f"splits {wanted} of {rows} rows for {size} ranks"


def _averaged(
    upstream: Sequence[Tensor | None],
    results: Sequence[Tensor],
    what: str,
    among: ProcessSet,
) -> list[Gradient]:
    """The means of the ranks' gradients; None for results of integer dtype."""
    wanted = [i for i, result in enumerate(results) if is_inexact(result)]
    gradients = [
        tf.zeros_like(results[i]) if (one := upstream[i]) is None else one
        for i in wanted
    ]
    exchange = Exchange(what, Reduction(ReduceOp.AVERAGE), among=among)
    names = [f"tensor {i}" for i in wanted]
    means = iter(reduce_tensors(exchange, gradients, names))
    return [next(means) if is_inexact(result) else None for result in results]


def _zeros_after(tensor: Gradient) -> Gradient:
    """Zeros like ``tensor``; forces its computation, in which other ranks take part."""
    with tf.control_dependencies([tensor]):
        return tf.zeros_like(tensor)


def _swapped(rank: int | None, axis: int) -> list[int]:
    if rank is None or not -rank <= axis < rank:
        raise ValueError(f"allgather: a tensor of {rank} dimensions has no axis {axis}")
    order = list(range(rank))
    order[0], order[axis] = order[axis], order[0]
    return order
