# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Lists of tensors, IndexedSlices and None are sorted by kind and put back in order."""

import random

import numpy as np
import tensorflow as tf

from tests.runtime.programs import checks
from tfcluster.runtime.exchange.reduce_engine import ReduceKind, TensorList
from tfcluster.runtime.tensors import is_sparse


def slices_of(number):
    return tf.IndexedSlices(
        tf.fill([2, 3], float(number)), tf.constant([number, 0]), tf.constant([9, 3])
    )


MAKERS = {
    ReduceKind.NONE: lambda number: None,
    ReduceKind.DENSE: lambda number: tf.fill([number % 3], float(number)),
    ReduceKind.SPARSE: slices_of,
}


def check_any_order_of_kinds_comes_back():
    draw = random.Random(7)
    for length in range(12):
        kinds = draw.choices(list(ReduceKind), k=length)
        values = [MAKERS[kind](number) for number, kind in enumerate(kinds)]
        found = TensorList.of(values)
        assert list(found.kinds) == kinds
        for kind, value, back in zip(kinds, values, found.tensors(), strict=True):
            assert ReduceKind.of(back) is kind
            if kind is ReduceKind.DENSE:
                np.testing.assert_array_equal(value, back)
            elif kind is ReduceKind.SPARSE:
                assert is_sparse(back)
                np.testing.assert_array_equal(value.values, back.values)
                np.testing.assert_array_equal(value.indices, back.indices)
                assert back.dense_shape is value.dense_shape


def check_the_flat_list_has_dense_tensors_values_and_indices():
    values = [slices_of(4), None, tf.constant([1.0]), slices_of(5), tf.constant(2.0)]
    found = TensorList.of(values)
    assert (found.dense_count, found.summed_count, len(found.flat)) == (2, 4, 6)
    assert [tensor.dtype.name for tensor in found.flat[:4]] == ["float32"] * 4
    assert [t.numpy().tolist() for t in found.flat[4:]] == [[4, 0], [5, 0]]
    arrays = [tensor.numpy() for tensor in found.flat]
    dense, sparse = found.unflattened(arrays)
    again = [*dense, *(s.values for s in sparse), *(s.indices for s in sparse)]
    assert all(one is other for one, other in zip(arrays, again, strict=True))
    assert found.in_order("ab", "cd") == ["c", None, "a", "d", "b"]


def check_a_list_of_another_length_is_refused():
    found = TensorList.of([slices_of(1), slices_of(2)])
    for arrays in ([np.zeros(1)] * 3, [np.zeros(1)] * 5):
        try:
            found.unflattened(arrays)
        except ValueError:
            continue
        raise AssertionError(f"{len(arrays)} arrays were taken")


def check_words_name_the_kind():
    assert ReduceKind.NONE.words("a", "", ()) == "a without gradient"
    dense = ReduceKind.DENSE.words("a", "float32", (2, 3))
    assert ReduceKind.SPARSE.words("a", "float32", (2, 3)) == f"rows of {dense}"


checks.run(globals())
