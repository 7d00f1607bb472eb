"""Finds out which ranks are on one host, and sets up shared memory for them.

Ranks send all others a key of their host, ranks with equal keys try to share memory,
and all ranks learn whether that worked. If it fails for one rank of a host (containers
may isolate processes from each other), no rank of that host uses shared memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfcluster.runtime.collective.transports import shm_barrier
from tfcluster.runtime.collective.transports.multiplexed_sockets import PeerSockets
from tfcluster.runtime.collective.transports.shm_allreduce import ShmCollectives
from tfcluster.runtime.collective.transports.shm_barrier import (
    ProgressCounters,
    ShmSegment,
)

Gather = Callable[[bytes], list[bytes]]
Groups = tuple[tuple[int, ...], ...]


def share_memory(
    me: int,
    sockets: PeerSockets,
    gather: Gather,
    timeout_s: float,
    *,
    host_key: str | None = None,
) -> tuple[Groups, ShmCollectives | None]:
    """The groups of ranks that share memory, and the transport within our own group.

    Groups are ordered by their first ranks. A rank that shares memory with no other
    rank is its own group, and has no transport (None). ``gather`` is an all-gather.
    ``host_key`` overrides the detected key of this rank; "" means that no other rank
    shares it.
    """
    here = own_host_key() if host_key is None else host_key
    groups = _grouped(gather((here or f"rank {me}").encode()))
    ours = next(group for group in groups if me in group)
    negotiation = _ShmNegotiation(me, ours)
    offers = [json.loads(offer) for offer in gather(negotiation.offer())]
    local = negotiation.accept(offers, sockets, timeout_s)
    succeeded = [answer == b"1" for answer in gather(b"0" if local is None else b"1")]
    negotiation.close_offered()
    if local is not None and not all(succeeded[rank] for rank in ours):
        local.progress.close()
        local = None
    return tuple(sorted(_final_groups(groups, succeeded))), local


def _final_groups(groups: Groups, succeeded: Sequence[bool]) -> list[tuple[int, ...]]:
    final: list[tuple[int, ...]] = []
    for group in groups:
        together = len(group) > 1 and all(succeeded[rank] for rank in group)
        final += [group] if together else [(rank,) for rank in group]
    return final


def _grouped(host_keys: Sequence[bytes]) -> Groups:
    by_host: dict[bytes, list[int]] = {}
    for rank, host_key in enumerate(host_keys):
        by_host.setdefault(host_key, []).append(rank)
    return tuple(tuple(ranks) for ranks in by_host.values())


def own_host_key() -> str:
    """A text that is equal for processes of one user that can see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return ""
    return f"{boot} {namespace} {os.geteuid()}"


class _ShmNegotiation:
    """The descriptors that a rank offers to the other ranks on its host."""

    def __init__(self, me: int, ours: Sequence[int]) -> None:
        self._me = me
        self._ours = ours
        self._segment: ShmSegment | None = None
        self._memory: int | None = None
        self._pipe: tuple[int, int] | None = None

    def offer(self) -> bytes:
        """JSON with the location of memory and waker; null if nothing is shared."""
        if len(self._ours) == 1:
            return b"null"
        try:
            if self._me == self._ours[0]:
                self._memory, self._segment = shm_barrier.create(len(self._ours))
            self._pipe = shm_barrier.pipe()
        except OSError:
            return b"null"
        offer = {
            "pid": os.getpid(),
            "waker": self._pipe[1],
            "memory": self._memory,
            "nonce": self._segment.nonce.hex() if self._segment else None,
        }
        return json.dumps(offer).encode()

    def accept(
        self, offers: Sequence[Any], sockets: PeerSockets, timeout_s: float
    ) -> ShmCollectives | None:
        theirs = [offers[rank] for rank in self._ours]
        if self._pipe is None or not all(theirs):
            return None
        me = self._ours.index(self._me)
        wakers: dict[int, int] = {}
        try:
            memory = self._segment or _attach(theirs[0], len(self._ours))
            for member, offer in enumerate(theirs):
                if member != me:
                    waker = shm_barrier.open_waker(
                        int(offer["pid"]), int(offer["waker"])
                    )
                    wakers[member] = waker
        except (OSError, ValueError, TypeError):
            for waker in wakers.values():
                os.close(waker)
            return None
        progress = ProgressCounters(
            memory,
            me,
            self._ours,
            wakeup=os.dup(self._pipe[0]),
            wakers=wakers,
            sockets={member: sockets.fileno(self._ours[member]) for member in wakers},
        )
        return ShmCollectives(memory, me, progress, timeout_s)

    def close_offered(self) -> None:
        """Close the offered descriptors: all ranks have opened them, or given up."""
        for descriptor in (self._memory, *(self._pipe or ())):
            if descriptor is not None:
                os.close(descriptor)
        self._segment = self._memory = self._pipe = None


def _attach(offer: Any, members: int) -> ShmSegment:
    return shm_barrier.attach(
        int(offer["pid"]), int(offer["memory"]), bytes.fromhex(offer["nonce"]), members
    )
