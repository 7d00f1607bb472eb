"""Every error that the runtime raises for a program to see.

    ContextError               a task's surroundings contradict themselves
    NoRankError                a rank was asked for in a task that does not train
    CollectiveError            the exchange between the ranks failed
      CollectiveMismatchError    ranks do different things, or with different tensors
      CollectiveTimeoutError     a rank did not come, or did not answer in time
      PeerLostError              a rank has left: its process ended or its host is gone
      NotDistributedError        training went on without any exchange

After a mismatch in the same exchange all ranks are still in step, and a program may
catch it and go on. After any other CollectiveError they cannot be in step again.
"""

from __future__ import annotations

from collections.abc import Sequence


class ContextError(ValueError):
    """The environment contradicts itself, or TensorFlow's rules for TF_CONFIG."""


class NoRankError(RuntimeError):
    """A rank was asked for in a task that does not train: a ps or data server."""


class CollectiveError(RuntimeError):
    """The exchange between the ranks failed."""

    of_another_rank = False
    """It is only the consequence of what has happened on another rank."""


class CollectiveMismatchError(CollectiveError):
    """Ranks do different things, or with different tensors."""


class CollectiveTimeoutError(CollectiveError):
    """A rank did not come, or did not answer in time."""


class PeerLostError(CollectiveError):
    """A rank has left: its process ended, or the connection broke."""

    of_another_rank = True


class HostsUpdatedInterrupt(RuntimeError):
    """Never raised: the hosts of a running training do not change."""


class NotDistributedError(CollectiveError):
    """The program trains, but its ranks exchange nothing."""


def peer_lost(rank: int) -> PeerLostError:
    return PeerLostError(
        f"rank {rank} has left: its process ended or the connection to it broke"
    )


def peers_late(ranks: Sequence[int], timeout_s: float) -> CollectiveTimeoutError:
    missing = ", ".join(map(str, ranks))
    return CollectiveTimeoutError(
        f"rank {missing} has sent nothing for {timeout_s:g} s"
    )
