"""Every error that the runtime raises for a program to see.

    ContextError               the environment of a task contradicts itself
    NoRankError                rank or size was called in a task that does not train
    CollectiveError            a collective operation between the ranks failed
      CollectiveMismatchError    ranks call different operations, or differ in tensors
      CollectiveTimeoutError     a rank did not arrive, or did not answer in time
      PeerLostError              a rank has left: its process ended or its host is gone
      NotDistributedError        the program trains without exchanging gradients

After a mismatch in the same exchange all ranks are still in step, and a program may
catch the error and continue. After any other CollectiveError the group can no longer be
used.
"""

from __future__ import annotations

from collections.abc import Sequence


class ContextError(ValueError):
    """The environment contradicts itself or TensorFlow's rules for TF_CONFIG."""


class NoRankError(RuntimeError):
    """Rank or size was called in a task that does not train: a ps or data task."""


class CollectiveError(RuntimeError):
    """A collective operation between the ranks failed."""

    of_another_rank = False
    """Whether the cause is on another rank, which reports it."""


class CollectiveMismatchError(CollectiveError):
    """Ranks call different operations, or the same operation with different tensors."""


class CollectiveTimeoutError(CollectiveError):
    """A rank did not arrive, or did not answer in time."""


class PeerLostError(CollectiveError):
    """A rank has left: its process ended, or the connection broke."""

    of_another_rank = True


class HostsUpdatedInterrupt(RuntimeError):
    """Never raised: hosts do not change during a run. Horovod scripts catch it.

    Follows horovod/common/exceptions.py.
    """


class NotDistributedError(CollectiveError):
    """The program trains, but its ranks exchange no gradients."""


def peer_lost(rank: int) -> PeerLostError:
    """The error for a rank whose connection has closed."""
    return PeerLostError(
        f"rank {rank} has left: its process ended or the connection to it broke"
    )


def peers_late(ranks: Sequence[int], timeout_s: float) -> CollectiveTimeoutError:
    """The error for ranks that have sent nothing for ``timeout_s`` seconds."""
    missing = ", ".join(map(str, ranks))
    return CollectiveTimeoutError(
        f"rank {missing} has sent nothing for {timeout_s:g} s"
    )
