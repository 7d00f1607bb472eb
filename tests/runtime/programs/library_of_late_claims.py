# As people write scripts: without types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Has a distributed optimizer made: the program's main file does not name it."""

import tfcluster.runtime as hvd


def distributed(optimizer):
    return hvd.DistributedOptimizer(optimizer)
