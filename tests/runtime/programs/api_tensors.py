# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Operations on tensors, compared with numpy, on every rank, eager and in functions."""

import itertools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc
from tests.runtime.programs import api_gather_broadcast, checks
from tests.runtime.programs.api_data import (
    HALF_DTYPES,
    HOROVODS,
    OPERATIONS,
    OPS,
    combined,
    exchanges,
    of_rank,
    pairs,
    refuses,
    same,
)
from tests.runtime.programs.checks import RANK, SIZE

SUM_TEXT: Any = "sum"


def check_init():
    before = tf.constant(1.0) + 1
    tfc.init()
    tfc.init()
    assert tfc.is_initialized()
    assert float(tfc.allreduce(before)) == 2.0


def check_ranks():
    assert (tfc.rank(), tfc.size()) == (RANK, SIZE)
    assert (tfc.local_rank(), tfc.local_size()) == (RANK, SIZE)
    ops = (tfc.rank_op, tfc.size_op, tfc.local_rank_op, tfc.local_size_op)
    expected = [RANK, SIZE, RANK, SIZE]
    assert [int(op()) for op in ops] == expected
    traced = tf.function(lambda: [op() for op in ops])()
    assert [int(value) for value in traced] == expected
    assert traced[0].dtype == tf.int32
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        assert session.run([op() for op in ops]) == expected


def check_allreduce_every_dtype_and_operation():
    shapes = itertools.cycle(((5,), (2, 3), (2, 3, 2)))
    for (dtype, name), shape in zip(pairs(), shapes, strict=False):
        parts = [of_rank(rank, shape, dtype) for rank in range(SIZE)]
        found = tfc.allreduce(tf.constant(parts[RANK]), op=OPS[name])
        same(found, combined(name, parts), dtype)


def check_allreduce_in_a_function():
    chosen = list(pairs())
    parts = [
        [of_rank(rank, (3, 2), dtype) for dtype, _ in chosen] for rank in range(SIZE)
    ]

    @tf.function
    def reduced(tensors):
        return [
            tfc.allreduce(tensor, op=OPS[name])
            for tensor, (_, name) in zip(tensors, chosen, strict=True)
        ]

    found = reduced([tf.constant(part) for part in parts[RANK]])
    for i, (dtype, name) in enumerate(chosen):
        same(found[i], combined(name, [part[i] for part in parts]), dtype)


def check_allreduce_large_and_empty():
    for shape in ((100_003,), (0,), (0, 4), ()):
        parts = [of_rank(rank, shape) for rank in range(SIZE)]
        for dtype in ("float32", "float16", "bfloat16", "int8"):
            own = tf.cast(tf.constant(parts[RANK], tf.float32), dtype)
            found = tfc.allreduce(own)
            assert found.shape == own.shape
            cast = [tf.cast(tf.constant(p, tf.float32), dtype).numpy() for p in parts]
            same(found, combined("average", cast), dtype)


def check_allreduce_defaults():
    own = tf.constant([float(RANK), 1.0])
    mean = [(SIZE - 1) / 2, 1.0]
    np.testing.assert_allclose(tfc.allreduce(own), mean)
    np.testing.assert_allclose(tfc.allreduce(own, True), mean)
    np.testing.assert_allclose(tfc.allreduce(own, False), np.array(mean) * SIZE)
    np.testing.assert_allclose(tfc.allreduce(own, op=tfc.Sum), np.array(mean) * SIZE)
    for variable in (tf.Variable(own), keras.Variable(own)):
        np.testing.assert_allclose(tfc.allreduce(variable), mean)
    assert int(tfc.allreduce(tf.constant(-RANK))) == -SIZE * (SIZE - 1) // 2 // SIZE
    assert int(tfc.allreduce(tf.constant(100, tf.int8))) == 100


def check_allreduce_refusals():
    booleans = tf.constant([True])
    refuses(TypeError, "no average", lambda: tfc.allreduce(booleans))
    refuses(
        TypeError,
        "cannot be scaled",
        lambda: tfc.allreduce(booleans, op=tfc.Sum, prescale_factor=2.0),
    )
    refuses(TypeError, "not string", lambda: tfc.allreduce(tf.constant("x")))
    refuses(
        TypeError, "support min", lambda: tfc.allreduce(tf.constant(1j), op=tfc.Min)
    )
    own = tf.constant(1.0)
    refuses(ValueError, "not both", lambda: tfc.allreduce(own, True, tfc.Sum))
    refuses(ValueError, "can be Average", lambda: tfc.allreduce(own, op=SUM_TEXT))
    refuses(ValueError, "rank 9 is not among", lambda: tfc.broadcast(own, 9))
    refuses(ValueError, "at least one", lambda: tfc.allgather(own))
    refuses(ValueError, "at least one", lambda: tfc.reducescatter(own))
    refuses(ValueError, "at least one", lambda: tfc.alltoall(own))


def check_allreduce_sums_halves_in_float32():
    own = tf.constant([2048.0 if RANK == 0 else 1.0], tf.float16)
    total = float(tfc.allreduce(own, op=tfc.Sum)[0])
    assert total == np.float16(2048 + SIZE - 1)
    large = tf.constant([60000.0], tf.float16)
    assert float(tfc.allreduce(large)[0]) == 60000.0


def check_allreduce_factors():
    parts = [of_rank(rank, (4,)) for rank in range(SIZE)]
    found = tfc.allreduce(
        tf.constant(parts[RANK]), op=tfc.Sum, prescale_factor=0.5, postscale_factor=3.0
    )
    same(found, combined("sum", parts) * np.float32(1.5), "float32")
    found = tfc.allreduce(tf.constant([3]), op=tfc.Sum, prescale_factor=0.5)
    assert found.numpy().tolist() == [SIZE]


def check_compression():
    parts = [of_rank(rank, (40,)) / 3 for rank in range(SIZE)]
    own = tf.constant(parts[RANK].astype("float32"))
    mean = sum(parts) / SIZE
    for compression, precision in (
        (tfc.Compression.none, 1e-6),
        (tfc.Compression.fp16, 1e-3),
        (tfc.Compression.bf16, 8e-3),
    ):
        found = tfc.allreduce(own, compression=compression)
        assert found.dtype == tf.float32
        np.testing.assert_allclose(found, mean, atol=precision)
        exact = np.allclose(found, mean, atol=1e-7)
        assert exact == (compression is tfc.Compression.none)
    whole = tfc.allreduce(tf.constant([70001]), compression=tfc.Compression.fp16)
    assert whole.numpy().tolist() == [70001]


def check_grouped():
    parts = [
        [
            of_rank(rank, (3,)),
            of_rank(rank, (2, 2), "int32"),
            of_rank(rank, (4,), "float16"),
        ]
        for rank in range(SIZE)
    ]
    slices = tf.IndexedSlices(tf.fill([RANK, 2], 1.0), tf.range(RANK), [SIZE, 2])
    found = tfc.grouped_allreduce([*map(tf.constant, parts[RANK]), slices])
    assert exchanges(tfc.grouped_allreduce, [*map(tf.constant, parts[RANK])]) == 1
    for i, dtype in enumerate(("float32", "int32", "float16")):
        same(found[i], combined("average", [part[i] for part in parts]), dtype)
    dense = [[(SIZE - 1 - row) / SIZE] * 2 for row in range(SIZE)]
    np.testing.assert_allclose(tf.convert_to_tensor(found[3]), dense, rtol=1e-6)
    assert tfc.grouped_allreduce([]) == []
    rows = tfc.grouped_allgather([tf.fill([RANK], RANK), tf.fill([1, 2], True)])
    assert rows[0].numpy().tolist() == [r for r in range(SIZE) for _ in range(r)]
    assert rows[1].shape.as_list() == [SIZE, 2]


def check_slices():
    width, height = 3, 7

    def local(rank):
        """A rank's rows: rank 1 has none, other ranks have some rows twice."""
        count = 0 if rank == 1 else rank + 2
        indices = np.array([(3 * i * rank + i) % height for i in range(count)], "int64")
        return of_rank(rank, (count, width)), indices

    def dense(rank):
        whole = np.zeros((height, width), "float32")
        np.add.at(whole, local(rank)[1], local(rank)[0])
        return whole

    values, indices = local(RANK)
    slices = tf.IndexedSlices(
        tf.constant(values, shape=[len(indices), width]),
        tf.constant(indices),
        tf.constant([height, width], tf.int64),
    )
    whole = [dense(rank) for rank in range(SIZE)]
    for average in (True, False):
        expected = combined("average" if average else "sum", whole)
        for act in (tfc.allreduce, tf.function(tfc.allreduce)):
            found = act(slices, average=average)
            assert isinstance(found, tf.IndexedSlices)
            assert found.indices.dtype == tf.int64
            assert found.values.shape[0] == sum(len(local(r)[1]) for r in range(SIZE))
            assert found.dense_shape.numpy().tolist() == [height, width]
            same(tf.convert_to_tensor(found), expected, "float32")
        found = tfc.allreduce(slices, average=average, sparse_as_dense=True)
        assert isinstance(found, tf.Tensor)
        same(found, expected, "float32")
    same(
        tfc.allreduce(tf.convert_to_tensor(slices)),
        combined("average", whole),
        "float32",
    )
    whole_numbers = tf.IndexedSlices(
        tf.fill([1, 2], 5 * RANK), tf.constant([0]), [1, 2]
    )
    found = tfc.allreduce(whole_numbers)
    assert found.values.numpy().tolist() == [[5 * r / SIZE] * 2 for r in range(SIZE)]
    unsupported = NotImplementedError
    refuses(unsupported, "support max", lambda: tfc.allreduce(slices, op=tfc.Max))
    refuses(unsupported, "scaled", lambda: tfc.allreduce(slices, postscale_factor=2.0))


def check_factors_of_doubles_are_exact():
    for dtype in ("float64", "complex128"):
        one = tf.constant([1.0, 3.0], tf.as_dtype(dtype))
        found = tfc.allreduce(one, prescale_factor=0.1, op=tfc.Sum).numpy()
        np.testing.assert_allclose(found, np.array([0.1, 0.3]) * SIZE, rtol=1e-15)
        found = tfc.allreduce(one, postscale_factor=0.1).numpy()
        np.testing.assert_allclose(found, [0.1, 0.3], rtol=1e-15)
    large = tf.constant([10**9], tf.int64)
    assert tfc.allreduce(large, postscale_factor=0.1).numpy().tolist() == [10**8]


def check_the_second_argument_of_allgather_may_be_the_name():
    own = tf.fill([1, 2], RANK)
    for found in (
        tfc.allgather(own, "rows"),
        tfc.allgather(own, name="rows"),
        tf.function(lambda: tfc.allgather(own, "rows"))(),
    ):
        assert found.numpy().tolist() == [[r, r] for r in range(SIZE)]


def check_global_variables_are_none_of_eager_execution():
    refuses(
        RuntimeError,
        "broadcast_variables(model.variables",
        lambda: tfc.broadcast_global_variables(0),
    )
    refuses(
        RuntimeError,
        "broadcast_variables(model.variables",
        lambda: tfc.BroadcastGlobalVariablesHook(0).begin(),
    )


def check_allreduce_gradients():
    """Compare with finite differences of a weighted result, summed over all ranks.

    Where Horovod's definition is different, its gradient is a multiple of that.
    """
    own = tf.constant(of_rank(RANK, (2 * SIZE + 1, 2), "float64"))

    for name, act in OPERATIONS.items():

        def loss(x, act=act):
            result = act(x)
            weights = tf.reshape(tf.range(tf.size(result)), tf.shape(result))
            return tf.reduce_sum(result * tf.cast(weights % 7 + RANK, tf.float64))

        def gradient(x, loss=loss):
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = loss(x)
            return tape.gradient(value, x)

        expected = np.zeros(own.shape)
        # Change one number of one rank at a time; all other numbers stay the same.
        places = (0, 3, 4 * SIZE + 1)
        probes = [
            (rank, places[(rank + i) % 3])
            for rank in range(SIZE)
            for i in range(3 if SIZE < 3 else 1)
        ]
        for rank, i in probes:
            step = np.zeros(own.shape)
            step.reshape(-1)[i] = 1e-3 if rank == RANK else 0.0
            ends = [
                float(tfc.allreduce(loss(own + sign * step), op=tfc.Sum))
                for sign in (1, -1)
            ]
            if rank == RANK:
                expected.reshape(-1)[i] = (ends[0] - ends[1]) / 2e-3
        chosen = [i for rank, i in probes if rank == RANK]
        expected *= HOROVODS.get(name, 1)
        for found in (gradient(own), tf.function(gradient)(own)):
            np.testing.assert_allclose(
                found.numpy().reshape(-1)[chosen],
                expected.reshape(-1)[chosen],
                rtol=1e-6,
                atol=1e-6,
                err_msg=name,
            )


def check_no_gradient_of_a_maximum():
    own = tf.constant([1.0])
    with tf.GradientTape() as tape:
        tape.watch(own)
        found = tfc.allreduce(own, op=tfc.Max)
    refuses(ValueError, "has no gradient", lambda: tape.gradient(found, own))


def check_gradients_of_variables_and_beside_integers():
    for variable in (tf.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])):
        expected = [SIZE * (SIZE + 1) / 2 + 10] * 2
        np.testing.assert_allclose(beside_integers(variable), expected, rtol=1e-6)
        traced = tf.function(beside_of(variable))
        np.testing.assert_allclose(traced(), expected, rtol=1e-6)


def beside_of(variable):
    """A function without arguments: TensorFlow would turn a variable into a tensor."""
    return lambda: beside_integers(variable)


def beside_integers(variable):
    with tf.GradientTape() as tape:
        counts = tf.constant([RANK])
        found = tfc.grouped_allreduce([counts, variable, counts], op=tfc.Sum)
        gathered = tfc.grouped_allgather([counts, variable])
        loss = tf.reduce_sum(found[1]) * (RANK + 1)
        loss += tf.reduce_sum(gathered[1]) * 10.0
    assert found[0].dtype == gathered[0].dtype == tf.int32
    return tape.gradient(loss, variable)


def check_half_gradients():
    for dtype in HALF_DTYPES:
        own = tf.constant([1.0, 2.0], tf.as_dtype(dtype))
        with tf.GradientTape() as tape:
            tape.watch(own)
            found = tf.reduce_sum(tfc.allreduce(own) * own)
        assert tape.gradient(found, own).dtype == own.dtype


def check_retraced_on_one_rank_only():
    """Rank 1 retraces at every step, and builds functions that other ranks do not."""
    state = tf.Variable(0.0)

    @tf.function
    def step(x, salt):
        state.assign_add(tfc.allreduce(x, op=tfc.Sum))
        gathered = tfc.allgather(x[None])
        return tfc.allreduce(state * tf.reduce_sum(gathered))

    expected = 0.0
    for i in range(5):
        found = float(step(tf.constant(float(RANK + i)), i if RANK == 1 else 0))
        total = sum(rank + i for rank in range(SIZE))
        expected += total
        assert found == expected * total


def check_order_in_a_graph():
    """Stateful ops keep their order, also in branches and loops."""

    @tf.function
    def act(x):
        total = tf.constant(0.0)
        for i in tf.range(3):
            total += tfc.allreduce(x, op=tfc.Sum)
            if i == 1:
                total += tf.reduce_sum(tfc.allgather(x[None]))
            else:
                total += tfc.broadcast(x, 0)
        tfc.allreduce(tf.ones([4]))
        return total

    found = float(act(tf.constant(float(RANK))))
    assert found == 4 * sum(range(SIZE)), found


if __name__ == "__main__":
    # The checks of the other module come last, because they end with a shutdown.
    checks.run({**globals(), **vars(api_gather_broadcast)})
