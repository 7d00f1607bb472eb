# As people write scripts: without types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Combines gradients: nothing in the program's main file says so."""

import tfcluster.runtime as hvd


def distributed(optimizer):
    return hvd.DistributedOptimizer(optimizer)


def combined(gradients):
    return [hvd.allreduce(gradient) for gradient in gradients]
