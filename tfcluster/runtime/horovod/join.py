"""``join``: wait until all ranks have used up their data."""

from __future__ import annotations

import struct
import time

from tfcluster.runtime import process_group
from tfcluster.runtime.collective import CollectiveMismatchError, Signature
from tfcluster.runtime.collective.collectives import allgather_bytes

_TIME = struct.Struct(">d")


def join(device: object = None) -> int:
    """Wait until all ranks have called this; return the rank that called it last.

    The clocks of the hosts decide which rank was last. ``device`` is ignored. Raises
    CollectiveMismatchError on all ranks if some of them still train, and another
    CollectiveError before ``init`` or if a rank is lost or late. Horovod's ``join``
    (horovod/tensorflow/mpi_ops.py) lets a rank without data contribute zeros to the
    others' exchanges, so that the last batches give different results than in a single
    process.
    """
    arrival = _TIME.pack(time.time())
    try:
        found = allgather_bytes(process_group.group(), arrival, Signature("join"))
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"{error}. A rank without more data cannot wait in join() while others "
            "train: give all ranks the same number of steps, for instance "
            "int(hvd.allreduce(steps, op=hvd.Min)); or let tfcluster divide the "
            "batches, which also handles uneven batches"
        ) from error
    times = [_TIME.unpack(data)[0] for data in found]
    return times.index(max(times))
