"""Divides a traced function among the ranks, which compute what one process does.

The whole batch is traced, exactly as on one machine. ``specialise`` gives every tensor
its static shape. ``propagate`` finds a placement for every tensor: ``Replicate``,
``Shard`` or ``Partial``, as in PyTorch's DTensor. ``rules`` says for each family of ops
which placements it can compute from which. ``rewrite`` writes the function of one rank:
the same ops on its rows, and the exchanges between them. Whatever has no rule is
computed whole by every rank. So a rule makes the result faster, never different.

The invariant: outside of partitioned functions every rank holds the same bits as every
other rank, and up to rounding those of one machine. This package knows nothing about
Keras.
"""
