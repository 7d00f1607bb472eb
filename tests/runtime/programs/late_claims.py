# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Distributes its training by its own library; the second time it does so too late."""

import keras
import numpy as np

import tfcluster.runtime as tfc
from tests.runtime.programs.library_of_late_claims import distributed
from tfcluster.runtime.scripts import program_kind

tfc.init()
X = np.random.default_rng(tfc.rank()).normal(size=(16, 3))
rows: set[int] = set()


class Model(keras.Sequential):
    def train_step(self, data):
        rows.add(data[0].shape[0])
        return super().train_step(data)


def fit(optimizer):
    keras.utils.set_random_seed(1)
    model = Model([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(X, X.sum(1), batch_size=4, verbose=0)
    return model.get_weights()[0]


weights = fit(distributed(keras.optimizers.SGD(0.1)))
print("rows of a step", sorted(rows))
everyone = tfc.allgather_object(weights)
assert all(np.array_equal(theirs, weights) for theirs in everyone)
print(f"weights of rank {tfc.rank()} are those of all")

# Forget the claim; the program trains, and only then claims the distribution.
program_kind._known.distributes_itself = False
fit(keras.optimizers.SGD(0.1))
try:
    distributed(keras.optimizers.SGD(0.1))
except tfc.CollectiveError as error:
    print("too late:", error)
