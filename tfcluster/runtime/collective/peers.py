"""Errors about other ranks, in the words that every transport uses for them."""

from __future__ import annotations

from collections.abc import Sequence

from tfcluster.runtime.collective.errors import CollectiveTimeoutError, PeerLostError


def peer_lost(rank: int) -> PeerLostError:
    return PeerLostError(
        f"rank {rank} has left: its process ended or the connection to it broke"
    )


def peers_late(ranks: Sequence[int], timeout_s: float) -> CollectiveTimeoutError:
    missing = ", ".join(map(str, ranks))
    return CollectiveTimeoutError(
        f"rank {missing} has sent nothing for {timeout_s:g} s"
    )
