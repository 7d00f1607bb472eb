"""The code that runs inside a task, and the API: ``import tfcluster.runtime as tfc``.

Importing this package is cheap: TensorFlow is imported when the first name that needs
it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfcluster.runtime.lazy_names import attributes

if TYPE_CHECKING:
    from tfcluster.runtime import callbacks as callbacks
    from tfcluster.runtime import elastic as elastic
    from tfcluster.runtime import tf1
    from tfcluster.runtime.errors import CollectiveError as CollectiveError
    from tfcluster.runtime.errors import (
        CollectiveMismatchError as CollectiveMismatchError,
    )
    from tfcluster.runtime.errors import (
        CollectiveTimeoutError as CollectiveTimeoutError,
    )
    from tfcluster.runtime.errors import NotDistributedError as NotDistributedError
    from tfcluster.runtime.errors import PeerLostError as PeerLostError
    from tfcluster.runtime.exchange.gather_broadcast import allgather as allgather
    from tfcluster.runtime.exchange.gather_broadcast import alltoall as alltoall
    from tfcluster.runtime.exchange.gather_broadcast import broadcast as broadcast
    from tfcluster.runtime.exchange.gather_broadcast import broadcast_ as broadcast_
    from tfcluster.runtime.exchange.gather_broadcast import (
        broadcast_global_variables as broadcast_global_variables,
    )
    from tfcluster.runtime.exchange.gather_broadcast import (
        broadcast_variables as broadcast_variables,
    )
    from tfcluster.runtime.exchange.gather_broadcast import (
        grouped_allgather as grouped_allgather,
    )
    from tfcluster.runtime.exchange.gather_broadcast import (
        local_rank_op as local_rank_op,
    )
    from tfcluster.runtime.exchange.gather_broadcast import (
        local_size_op as local_size_op,
    )
    from tfcluster.runtime.exchange.gather_broadcast import (
        process_set_included_op as process_set_included_op,
    )
    from tfcluster.runtime.exchange.gather_broadcast import rank_op as rank_op
    from tfcluster.runtime.exchange.gather_broadcast import size_op as size_op
    from tfcluster.runtime.exchange.objects import allgather_object as allgather_object
    from tfcluster.runtime.exchange.objects import broadcast_object as broadcast_object
    from tfcluster.runtime.exchange.objects import (
        broadcast_object_fn as broadcast_object_fn,
    )
    from tfcluster.runtime.exchange.reduce import Adasum as Adasum
    from tfcluster.runtime.exchange.reduce import Average as Average
    from tfcluster.runtime.exchange.reduce import Max as Max
    from tfcluster.runtime.exchange.reduce import Min as Min
    from tfcluster.runtime.exchange.reduce import Product as Product
    from tfcluster.runtime.exchange.reduce import Sum as Sum
    from tfcluster.runtime.exchange.reduce import allreduce as allreduce
    from tfcluster.runtime.exchange.reduce import grouped_allreduce as grouped_allreduce
    from tfcluster.runtime.exchange.reduce import (
        grouped_reducescatter as grouped_reducescatter,
    )
    from tfcluster.runtime.exchange.reduce import reducescatter as reducescatter
    from tfcluster.runtime.exchange.wire_format import Compression as Compression
    from tfcluster.runtime.horovod.capabilities import ccl_built as ccl_built
    from tfcluster.runtime.horovod.capabilities import (
        check_extension as check_extension,
    )
    from tfcluster.runtime.horovod.capabilities import (
        check_num_rank_power_of_2 as check_num_rank_power_of_2,
    )
    from tfcluster.runtime.horovod.capabilities import cuda_built as cuda_built
    from tfcluster.runtime.horovod.capabilities import ddl_built as ddl_built
    from tfcluster.runtime.horovod.capabilities import gloo_built as gloo_built
    from tfcluster.runtime.horovod.capabilities import gloo_enabled as gloo_enabled
    from tfcluster.runtime.horovod.capabilities import is_homogeneous as is_homogeneous
    from tfcluster.runtime.horovod.capabilities import join as join
    from tfcluster.runtime.horovod.capabilities import mpi_built as mpi_built
    from tfcluster.runtime.horovod.capabilities import mpi_enabled as mpi_enabled
    from tfcluster.runtime.horovod.capabilities import (
        mpi_threads_supported as mpi_threads_supported,
    )
    from tfcluster.runtime.horovod.capabilities import nccl_built as nccl_built
    from tfcluster.runtime.horovod.capabilities import rocm_built as rocm_built
    from tfcluster.runtime.horovod.capabilities import start_timeline as start_timeline
    from tfcluster.runtime.horovod.capabilities import stop_timeline as stop_timeline
    from tfcluster.runtime.horovod.optimizer import (
        DistributedOptimizer as DistributedOptimizer,
    )
    from tfcluster.runtime.horovod.optimizer import (
        PartialDistributedOptimizer as PartialDistributedOptimizer,
    )
    from tfcluster.runtime.horovod.optimizer import load_model as load_model
    from tfcluster.runtime.horovod.sync_batch_normalization import (
        SyncBatchNormalization as SyncBatchNormalization,
    )
    from tfcluster.runtime.horovod.tape import (
        DistributedGradientTape as DistributedGradientTape,
    )
    from tfcluster.runtime.horovod.tape import (
        PartialDistributedGradientTape as PartialDistributedGradientTape,
    )
    from tfcluster.runtime.keras.whole_batches import gather_batch as gather_batch
    from tfcluster.runtime.keras.whole_batches import merge_with as merge_with
    from tfcluster.runtime.process_group import barrier as barrier
    from tfcluster.runtime.process_group import cross_rank as cross_rank
    from tfcluster.runtime.process_group import cross_size as cross_size
    from tfcluster.runtime.process_group import is_chief as is_chief
    from tfcluster.runtime.process_group import is_initialized as is_initialized
    from tfcluster.runtime.process_group import local_rank as local_rank
    from tfcluster.runtime.process_group import local_size as local_size
    from tfcluster.runtime.process_group import rank as rank
    from tfcluster.runtime.process_group import shutdown as shutdown
    from tfcluster.runtime.process_group import size as size
    from tfcluster.runtime.process_sets import ProcessSet as ProcessSet
    from tfcluster.runtime.process_sets import add_process_set as add_process_set
    from tfcluster.runtime.process_sets import (
        get_process_set_ids_and_ranks as get_process_set_ids_and_ranks,
    )
    from tfcluster.runtime.process_sets import global_process_set as global_process_set
    from tfcluster.runtime.process_sets import init as init
    from tfcluster.runtime.process_sets import (
        is_process_set_included as is_process_set_included,
    )
    from tfcluster.runtime.process_sets import (
        process_set_included as process_set_included,
    )
    from tfcluster.runtime.process_sets import remove_process_set as remove_process_set
    from tfcluster.runtime.tf1 import (
        BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook,
    )
    from tfcluster.runtime.tf1 import Session as Session
    from tfcluster.runtime.tf1 import cluster_spec as cluster_spec
    from tfcluster.runtime.tf1 import device_filters as device_filters
    from tfcluster.runtime.tf1 import server as server
    from tfcluster.runtime.tf1 import session_config as session_config

    v1 = tf1

__getattr__ = attributes(__name__, v1="tf1")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
