# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""The last rank acts differently from the others: all ranks soon get an error."""

import threading
import time

import keras
import pytest
import tensorflow as tf

import tfcluster.runtime as tfc
from tests.runtime.programs import checks
from tests.runtime.programs.checks import RANK, SIZE

LAST = RANK == SIZE - 1
DEADLINE_S = 10.0

MISMATCHES = {
    "shape": (lambda: tfc.allreduce(tf.ones([3 if LAST else 2])), "float32 (3)"),
    "dtype": (
        lambda: tfc.allreduce(tf.ones([2], tf.float16 if LAST else tf.float32)),
        "float16 (2)",
    ),
    "half": (
        lambda: tfc.allreduce(tf.ones([2], tf.bfloat16 if LAST else tf.float16)),
        "bfloat16 (2)",
    ),
    "op": (
        lambda: tfc.allreduce(tf.ones([2]), op=tfc.Max if LAST else tfc.Min),
        "allreduce (max)",
    ),
    "factor": (
        lambda: tfc.allreduce(tf.ones([2]), prescale_factor=2.0 if LAST else 1.0),
        "scaled by (2.0, 1.0)",
    ),
    "compression": (
        lambda: tfc.allreduce(
            tf.ones([2]),
            compression=tfc.Compression.fp16 if LAST else tfc.Compression.none,
        ),
        "float32 as float16 (2)",
    ),
    "name": (lambda: tfc.allreduce(tf.ones([2]), name="b" if LAST else "a"), "of b"),
    "root": (lambda: tfc.broadcast(tf.ones([2]), int(LAST)), "from rank 1"),
    "broadcast": (
        lambda: tfc.broadcast(tf.ones([2, 3 if LAST else 4]), 0),
        "float32 (2, 3)",
    ),
    "operation": (
        lambda: (tfc.allgather if LAST else tfc.allreduce)(tf.ones([2])),
        "allgather",
    ),
    "rows": (lambda: tfc.allgather(tf.ones([2, 3 if LAST else 4])), "float32 (3)"),
    "count": (lambda: tfc.grouped_allreduce([tf.ones([1])] * (2 + LAST)), "3"),
    "slices": (
        lambda: tfc.allreduce(
            tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
            if LAST
            else tf.ones([3, 2])
        ),
        "rows of tensor float32 (2)",
    ),
    "alltoall": (
        lambda: tfc.alltoall(tf.ones([SIZE]), [5] * SIZE if LAST else [1] * SIZE),
        "splits that fit",
    ),
    "reducescatter": (
        lambda: tfc.reducescatter(tf.ones([4 if LAST else 5])),
        "float32 (4)",
    ),
}


def renew():
    """Restart the runtime, so that all ranks are at the same exchange again."""
    tfc.shutdown()
    tfc.init()


def fails(act, words):
    start = time.monotonic()
    try:
        act()
    except tfc.CollectiveMismatchError as error:
        text = str(error)
    else:
        raise AssertionError("nothing was raised")
    seconds = time.monotonic() - start
    assert words in text, text
    assert f"rank {SIZE - 1}" in text, text
    assert seconds < DEADLINE_S, seconds


def check_mismatch_eagerly():
    for act, words in MISMATCHES.values():
        renew()
        fails(act, words)


def check_mismatch_in_a_function():
    for act, words in MISMATCHES.values():
        renew()
        fails(tf.function(act), words)


def check_mismatch_of_variables():
    renew()
    variables = [keras.Variable([1.0], name="b" if LAST else "a")]
    fails(lambda: tfc.broadcast_variables(variables, 0), "b float32 (1)")


def check_mismatch_of_objects():
    renew()
    fails(lambda: tfc.broadcast_object(1, int(LAST)), "from rank 1")


def check_after_a_mismatch_all_go_on():
    """No restart is needed, and later errors are not confused with the mismatch."""
    renew()
    for act, words in MISMATCHES.values():
        for way in (act, tf.function(act)):
            fails(way, words)
            assert float(tfc.allreduce(tf.constant(1.0), op=tfc.Sum)) == SIZE
    # TensorFlow's own errors are still raised as such.
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.function(lambda: tf.debugging.assert_equal(tf.constant(RANK), -1))()


def check_order_of_opposite_threads():
    """Either all ranks get both results or all get an error; none waits for ever."""
    for attempt in range(3):
        renew()
        outcomes: dict[str, object] = {}

        def act(name, outcomes=outcomes):
            try:
                total = tfc.allreduce(tf.constant(1.0), op=tfc.Sum, name=name)
                outcomes[name] = float(total)
            except tfc.CollectiveError as error:
                outcomes[name] = type(error)

        names = ["a", "b"] if (RANK + attempt) % 2 else ["b", "a"]
        threads = [threading.Thread(target=act, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        right = list(outcomes.values()) == [float(SIZE)] * 2
        wrong = set(outcomes.values()) == {tfc.CollectiveMismatchError}
        assert right or wrong, outcomes


def check_order_opposite_by_name():
    renew()
    names = ["b", "a"] if LAST else ["a", "b"]
    fails(lambda: [tfc.allreduce(tf.ones([1]), name=name) for name in names], "of b")


def check_no_gradient_on_one_rank():
    """A branch without gradient is named: in eager code, functions and tapes."""
    used, branch = (
        keras.Variable([1.0], name="used"),
        keras.Variable([1.0], name="branch"),
    )
    variables = [used.value, branch.value]

    def taped():
        with tfc.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = used.value * 2.0
            if not LAST:
                loss += branch.value
        return tape.gradient(loss, variables)

    optimizer = tfc.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([used, branch])

    def applied():
        gradient = tf.constant([1.0])
        optimizer.apply([gradient, None if LAST else gradient], [used, branch])

    for act in (taped, applied, tf.function(taped), tf.function(applied)):
        renew()
        fails(act, "without gradient")
    renew()

    def nothing():
        tfc.DistributedOptimizer(keras.optimizers.SGD(1.0)).apply(
            [None if LAST else tf.constant([1.0])], [used]
        )

    fails(nothing, "used without gradient")


if __name__ == "__main__":
    checks.run(globals())
