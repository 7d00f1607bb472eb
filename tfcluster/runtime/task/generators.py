"""Random generators of Python, numpy and TensorFlow, equal on all ranks.

The global generators get a seed. A generator that the program makes without a seed,
such as ``np.random.default_rng()``, would take one from the operating system: it gets
bits that all ranks share.
"""

from __future__ import annotations

import math
import os
import random
import sys
from typing import Any

from tfcluster.runtime.task.import_hook import around_import

_SEED_BITS = 128
_OWN_MODULES = (__name__, "random")


def seed_generators(seed: int, *, python: bool = True, numpy: bool = True) -> None:
    """Let all generators of this process follow from ``seed``.

    Python's is seeded now, numpy's when numpy is imported, unless ``python`` or
    ``numpy`` is false: the program may have seeded them. Those that the program makes
    without a seed get bits that follow from ``seed``, also in ``random.seed()`` and
    ``np.random.seed()``. What depends on ``os.urandom`` stays as it is, such as
    ``secrets``, ``uuid`` and ``SystemRandom``.
    """
    if python:
        random.seed(seed)
    entropy = _Entropy(seed)
    original: Any = random.Random.seed

    def seeded(generator: random.Random, a: Any = None, version: int = 2) -> None:
        original(generator, entropy.bits(_SEED_BITS) if a is None else a, version)

    random.Random.seed = seeded  # type: ignore[assignment, method-assign]
    # The function of the global generator is bound to the original.
    random.seed = random.seed.__self__.seed  # type: ignore[attr-defined]
    os.register_at_fork(before=entropy.before_fork, after_in_child=entropy.in_child)

    def into_numpy() -> None:
        import numpy as np

        if numpy:
            np.random.seed(seed)
        # SeedSequence takes its entropy from this function.
        bit_generator: Any = np.random.bit_generator
        if hasattr(bit_generator, "randbits"):
            bit_generator.randbits = entropy.bits

    around_import(("numpy",), before=lambda name: None, after=into_numpy)


def seed_tensorflow_generators(seed: int) -> None:
    """Let those of TensorFlow take what numpy's take; see ``seed_generators``.

    ``seed`` becomes the global one, until the program sets another, for ops that have
    no seed of their own. Those that have one draw what they draw without a global seed.
    """
    # Imported here, because they need TensorFlow.
    import numpy as np
    import tensorflow as tf

    from tfcluster.runtime import tf_patches

    def ints(original: Any, shape: Any, dtype: Any = tf.int64) -> Any:
        if not tf.executing_eagerly():
            return original(shape=shape, dtype=dtype)
        words = np.random.SeedSequence().generate_state(math.prod(shape), np.uint64)
        kind = tf.as_dtype(dtype)
        return tf.constant(words.astype(kind.as_numpy_dtype), kind, shape)

    tf.random.set_seed(seed)
    ours, _ = tf.compat.v1.get_seed(0)

    def seeds(original: Any, op_seed: Any) -> Any:
        found, of_op = original(op_seed)
        if op_seed is None or found != ours:
            return found, of_op
        return _DEFAULT_GRAPH_SEED, of_op

    tf_patches.TABLE.install(
        {tf_patches.NON_DETERMINISTIC_INTS: ints, tf_patches.GET_SEED: seeds}
    )


_DEFAULT_GRAPH_SEED = 87654321
"""What TensorFlow takes for the global seed if only an op has a seed."""


class _Entropy:
    """Bits for generators without a seed, in the order in which a module asks for them.

    Each module has a sequence of its own, since some make generators on one rank only,
    such as libraries that the chief saves files with. Python's own modules have none:
    ``tempfile`` must find unlike names on the ranks. A forked process has other bits
    than its parent, or all helpers of a program would draw the same numbers.
    """

    def __init__(self, seed: int) -> None:
        self._seed = str(seed)
        self._forks = 0
        self._sequences: dict[str, random.Random] = {}

    def bits(self, count: int) -> int:
        """The next bits for the module that called the library."""
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__") in _OWN_MODULES:
            frame = frame.f_back
        return self._next(str(frame.f_globals.get("__name__")), count)

    def _next(self, module: str, count: int) -> int:
        if module.partition(".")[0] in sys.stdlib_module_names:
            return random.SystemRandom().getrandbits(count)
        sequence = self._sequences.get(module)
        if sequence is None:
            key = f"generators of {module}, {self._seed}"
            sequence = self._sequences[module] = random.Random(key)
        return sequence.getrandbits(count)

    def before_fork(self) -> None:
        self._forks += 1

    def in_child(self) -> None:
        self._seed = f"{self._seed}, fork {self._forks}"
        self._forks = 0
        self._sequences.clear()
        # Python has just seeded it from the operating system.
        random.seed(self._next(__name__, _SEED_BITS))
