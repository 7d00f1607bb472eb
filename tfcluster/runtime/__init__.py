"""The code that runs inside a task, and the API: ``import tfcluster.runtime as tfc``.

Importing this package is cheap: TensorFlow is imported when the first name that needs
it is used.
"""

from __future__ import annotations

import ast
import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfcluster.runtime import callbacks, elastic
    from tfcluster.runtime import tf1 as v1
    from tfcluster.runtime.errors import (
        CollectiveError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        NotDistributedError,
        PeerLostError,
    )
    from tfcluster.runtime.exchange.gather_broadcast import (
        allgather,
        alltoall,
        broadcast,
        broadcast_,
        broadcast_global_variables,
        broadcast_variables,
        grouped_allgather,
    )
    from tfcluster.runtime.exchange.objects import (
        allgather_object,
        broadcast_object,
        broadcast_object_fn,
    )
    from tfcluster.runtime.exchange.rank_ops import (
        local_rank_op,
        local_size_op,
        process_set_included_op,
        rank_op,
        size_op,
    )
    from tfcluster.runtime.exchange.reduce import (
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
    from tfcluster.runtime.exchange.wire_format import (
        Compression,
    )
    from tfcluster.runtime.horovod.capabilities import (
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
    from tfcluster.runtime.horovod.join import (
        join,
    )
    from tfcluster.runtime.horovod.load_model import (
        load_model,
    )
    from tfcluster.runtime.horovod.optimizer import (
        DistributedOptimizer,
        PartialDistributedOptimizer,
    )
    from tfcluster.runtime.horovod.sync_batch_normalization import (
        SyncBatchNormalization,
    )
    from tfcluster.runtime.horovod.tape import (
        DistributedGradientTape,
        PartialDistributedGradientTape,
    )
    from tfcluster.runtime.horovod.timeline import (
        start_timeline,
        stop_timeline,
    )
    from tfcluster.runtime.keras.whole_batches import gather_batch, merge_with
    from tfcluster.runtime.process_group import (
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
    from tfcluster.runtime.process_sets import (
        ProcessSet,
        add_process_set,
        get_process_set_ids_and_ranks,
        global_process_set,
        is_process_set_included,
        process_set_included,
        remove_process_set,
    )
    from tfcluster.runtime.tf1 import (
        BroadcastGlobalVariablesHook,
        Session,
        cluster_spec,
        device_filters,
        server,
        session_config,
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
    "gather_batch",
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
    "merge_with",
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


@functools.cache
def _places() -> dict[str, tuple[str, str]]:
    """The module of each name, and its name there, from the imports above."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, original = _places()[name]
    if module == __name__:
        return importlib.import_module(f"{module}.{original}")
    value = getattr(importlib.import_module(module), original)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
