"""Trains with Keras's ``fit`` on JAX: ``DataParallel`` over processes, and gloo."""

from __future__ import annotations

import os

import jax
import keras

from benchmarks.trainers import workload
from benchmarks.trainers.keras_fit import fit

job = workload.parse()
rank, size = workload.place()
if size > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    first = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    keras.distribution.initialize(first, size, rank)
    # Each process has its own rows already.
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(auto_shard_dataset=False)
    )
fit(job, *job.rows_of_rank(rank, size))
