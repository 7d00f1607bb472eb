"""What runs inside a task, and the Python API: ``import tfcluster.runtime as tfc``.

Importing it costs nothing: TensorFlow comes with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfcluster.runtime import callbacks, v1
    from tfcluster.runtime.api.moving import (
        allgather,
        alltoall,
        broadcast,
        grouped_allgather,
    )
    from tfcluster.runtime.api.places import (
        local_rank_op,
        local_size_op,
        rank_op,
        size_op,
    )
    from tfcluster.runtime.api.reducing import (
        Average,
        Max,
        Min,
        Product,
        Sum,
        allreduce,
        grouped_allreduce,
        reducescatter,
    )
    from tfcluster.runtime.api.variables import (
        broadcast_global_variables,
        broadcast_variables,
    )
    from tfcluster.runtime.collective.errors import (
        CollectiveError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        NotDistributedError,
        PeerLostError,
    )
    from tfcluster.runtime.compression import (
        Compression,
    )
    from tfcluster.runtime.distributed.optimizer import (
        DistributedOptimizer,
    )
    from tfcluster.runtime.distributed.tape import (
        DistributedGradientTape,
    )
    from tfcluster.runtime.objects import (
        allgather_object,
        broadcast_object,
    )
    from tfcluster.runtime.v1 import (
        BroadcastGlobalVariablesHook,
        Session,
        cluster_spec,
        device_filters,
        server,
        session_config,
    )
    from tfcluster.runtime.world import (
        barrier,
        cross_rank,
        cross_size,
        init,
        is_chief,
        is_initialized,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
    )

__all__ = [
    "Average",
    "BroadcastGlobalVariablesHook",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "NotDistributedError",
    "PeerLostError",
    "Product",
    "Session",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cluster_spec",
    "cross_rank",
    "cross_size",
    "device_filters",
    "grouped_allgather",
    "grouped_allreduce",
    "init",
    "is_chief",
    "is_initialized",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "rank",
    "rank_op",
    "reducescatter",
    "server",
    "session_config",
    "shutdown",
    "size",
    "size_op",
    "v1",
]

_HOMES: dict[str, tuple[str, ...]] = {
    "tfcluster.runtime.api.moving": (
        "allgather",
        "alltoall",
        "broadcast",
        "grouped_allgather",
    ),
    "tfcluster.runtime.api.places": (
        "local_rank_op",
        "local_size_op",
        "rank_op",
        "size_op",
    ),
    "tfcluster.runtime.api.reducing": (
        "Average",
        "Max",
        "Min",
        "Product",
        "Sum",
        "allreduce",
        "grouped_allreduce",
        "reducescatter",
    ),
    "tfcluster.runtime.api.variables": (
        "broadcast_global_variables",
        "broadcast_variables",
    ),
    "tfcluster.runtime.collective.errors": (
        "CollectiveError",
        "CollectiveMismatchError",
        "CollectiveTimeoutError",
        "NotDistributedError",
        "PeerLostError",
    ),
    "tfcluster.runtime.compression": ("Compression",),
    "tfcluster.runtime.distributed.optimizer": ("DistributedOptimizer",),
    "tfcluster.runtime.distributed.tape": ("DistributedGradientTape",),
    "tfcluster.runtime.objects": (
        "allgather_object",
        "broadcast_object",
    ),
    "tfcluster.runtime.v1": (
        "BroadcastGlobalVariablesHook",
        "Session",
        "cluster_spec",
        "device_filters",
        "server",
        "session_config",
    ),
    "tfcluster.runtime.world": (
        "barrier",
        "cross_rank",
        "cross_size",
        "init",
        "is_chief",
        "is_initialized",
        "local_rank",
        "local_size",
        "rank",
        "shutdown",
        "size",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("callbacks", "v1")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
