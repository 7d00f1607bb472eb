"""One rank over MPI: mpi_rank.py WHAT RANK PLACE ADDRESS... ; the last line is JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tfcluster.runtime.collective import CollectiveError, Group, ReduceOp, Signature
from tfcluster.runtime.collective.collectives import (
    allgather_bytes,
    broadcast_bytes,
    reduce_arrays,
)
from tfcluster.runtime.collective.transports.mpi import MpiTransport
from tfcluster.runtime.net.rendezvous import Member

DTYPES = "int8 uint8 int16 int32 int64 uint64 float32 float64 complex64 complex128"
OPS = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]


def values(rank: int, dtype: str, length: int = 37) -> np.ndarray[Any, Any]:
    """Small whole numbers, so that results are exact in every dtype."""
    return np.random.default_rng(rank).integers(1, 4, length).astype(dtype)


def main(what: str, rank: int, host_key: str, addresses: list[str]) -> dict[str, Any]:
    size = len(addresses)
    member = Member(rank, size, bytes(32))
    transport = MpiTransport(member, addresses, host_key=host_key or None)
    group = Group(transport)
    try:
        return ACTS[what](group, transport)
    except CollectiveError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        group.close()


def operations(group: Group, transport: MpiTransport) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in DTYPES.split():
        for op in OPS:
            signature = Signature(f"{dtype} {op.value}")
            (array,) = reduce_arrays(group, [values(group.rank, dtype)], op, signature)
            found[signature.what] = [str(x) for x in array]
    for length in (1, 5_000, 300_001):
        mine = np.random.default_rng(group.rank).normal(size=length)
        (array,) = reduce_arrays(
            group, [mine.astype("float32")], ReduceOp.SUM, Signature("bits")
        )
        found[f"bits {length}"] = hashlib.sha256(array.tobytes()).hexdigest()
    word = str(group.rank).encode()
    every = [word + str(peer).encode() for peer in range(group.size)]
    found["gathered"] = b" ".join(allgather_bytes(group, word, Signature("g"))).decode()
    found["shared"] = broadcast_bytes(
        group, word, group.size - 1, Signature("s")
    ).decode()
    with group.exchange(Signature("a")) as call:
        found["swapped"] = b" ".join(call.transport.alltoall(every)).decode()
    transport.allgather(b"")
    mapped = Path("/proc/self/maps").read_text().splitlines()
    found["files"] = [
        line.split()[-1]
        for line in mapped
        if "/dev/shm/" in line and not line.endswith("(deleted)")
    ]
    found["environment"] = [name for name in os.environ if name.startswith("PMI")]
    found["over mpi"] = transport._mpi is not None
    return found


ACTS = {"operations": operations}


if __name__ == "__main__":
    _, name, number, where, *others = sys.argv
    print(json.dumps(main(name, int(number), where, others)))
