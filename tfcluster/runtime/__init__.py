"""What runs inside a task, and the Python API: ``import tfcluster.runtime as tfc``.

Importing it costs nothing: TensorFlow comes with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfcluster.runtime import callbacks, elastic, v1
    from tfcluster.runtime.api.moving import (
        allgather,
        alltoall,
        broadcast,
        grouped_allgather,
    )
    from tfcluster.runtime.api.places import (
        local_rank_op,
        local_size_op,
        process_set_included_op,
        rank_op,
        size_op,
    )
    from tfcluster.runtime.api.reducing import (
        Adasum,
        Average,
        Max,
        Min,
        Product,
        Sum,
        allreduce,
        grouped_allreduce,
        grouped_reducescatter,
        reducescatter,
    )
    from tfcluster.runtime.api.variables import (
        broadcast_,
        broadcast_global_variables,
        broadcast_variables,
    )
    from tfcluster.runtime.builds import (
        ccl_built,
        check_extension,
        check_num_rank_power_of_2,
        cuda_built,
        ddl_built,
        gloo_built,
        gloo_enabled,
        is_homogeneous,
        mpi_built,
        mpi_enabled,
        mpi_threads_supported,
        nccl_built,
        rocm_built,
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
        PartialDistributedOptimizer,
    )
    from tfcluster.runtime.distributed.tape import (
        DistributedGradientTape,
        PartialDistributedGradientTape,
    )
    from tfcluster.runtime.joining import (
        join,
    )
    from tfcluster.runtime.keras.loading import (
        load_model,
    )
    from tfcluster.runtime.keras.synchronised_normalization import (
        SyncBatchNormalization,
    )
    from tfcluster.runtime.objects import (
        allgather_object,
        broadcast_object,
        broadcast_object_fn,
    )
    from tfcluster.runtime.process_sets import (
        ProcessSet,
        add_process_set,
        get_process_set_ids_and_ranks,
        global_process_set,
        is_process_set_included,
        process_set_included,
        remove_process_set,
    )
    from tfcluster.runtime.timeline import (
        start_timeline,
        stop_timeline,
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
    "Adasum",
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
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "Session",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
    "cluster_spec",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "device_filters",
    "elastic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_chief",
    "is_homogeneous",
    "is_initialized",
    "is_process_set_included",
    "join",
    "load_model",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "server",
    "session_config",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
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
        "process_set_included_op",
        "rank_op",
        "size_op",
    ),
    "tfcluster.runtime.api.reducing": (
        "Adasum",
        "Average",
        "Max",
        "Min",
        "Product",
        "Sum",
        "allreduce",
        "grouped_allreduce",
        "grouped_reducescatter",
        "reducescatter",
    ),
    "tfcluster.runtime.api.variables": (
        "broadcast_",
        "broadcast_global_variables",
        "broadcast_variables",
    ),
    "tfcluster.runtime.builds": (
        "ccl_built",
        "check_extension",
        "check_num_rank_power_of_2",
        "cuda_built",
        "ddl_built",
        "gloo_built",
        "gloo_enabled",
        "is_homogeneous",
        "mpi_built",
        "mpi_enabled",
        "mpi_threads_supported",
        "nccl_built",
        "rocm_built",
    ),
    "tfcluster.runtime.collective.errors": (
        "CollectiveError",
        "CollectiveMismatchError",
        "CollectiveTimeoutError",
        "NotDistributedError",
        "PeerLostError",
    ),
    "tfcluster.runtime.compression": ("Compression",),
    "tfcluster.runtime.distributed.optimizer": (
        "DistributedOptimizer",
        "PartialDistributedOptimizer",
    ),
    "tfcluster.runtime.distributed.tape": (
        "DistributedGradientTape",
        "PartialDistributedGradientTape",
    ),
    "tfcluster.runtime.joining": ("join",),
    "tfcluster.runtime.keras.loading": ("load_model",),
    "tfcluster.runtime.keras.synchronised_normalization": ("SyncBatchNormalization",),
    "tfcluster.runtime.objects": (
        "allgather_object",
        "broadcast_object",
        "broadcast_object_fn",
    ),
    "tfcluster.runtime.process_sets": (
        "ProcessSet",
        "add_process_set",
        "get_process_set_ids_and_ranks",
        "global_process_set",
        "is_process_set_included",
        "process_set_included",
        "remove_process_set",
    ),
    "tfcluster.runtime.timeline": (
        "start_timeline",
        "stop_timeline",
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
_MODULES = ("callbacks", "elastic", "v1")


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
