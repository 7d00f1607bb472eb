# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Combines gradients, which is not visible in the program's main file."""

import tfcluster.runtime as hvd


def distributed(optimizer):
    return hvd.DistributedOptimizer(optimizer)


def combined(gradients):
    return [hvd.allreduce(gradient) for gradient in gradients]
